"""From a float model and its calibration to an integer program."""
