"""Lowering: turn a float model and its calibration into an integer program."""
