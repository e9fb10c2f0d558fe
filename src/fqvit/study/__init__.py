"""The paper's evaluation: tables of models and methods, the ablation, the sweep over K, and counts of bit operations."""
