"""The paper's evaluation: cells of tables, what they are compared with, and counts of operations."""
