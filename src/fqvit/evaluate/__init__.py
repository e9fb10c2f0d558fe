"""Accuracy of models and programs, comparison with float, and summaries of programs."""
