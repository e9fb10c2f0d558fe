"""Checkpoint files of every known layout, as tensors under the names of our modules."""
