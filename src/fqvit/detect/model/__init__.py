"""The float networks of detectors, and how their checkpoints are loaded."""
