"""The paper's evaluation: tables of methods, the ablation, the sweep over K, and bit operations."""
