"""Methods that refine a calibration: mixed precision, weight rounding, and searched scales."""
