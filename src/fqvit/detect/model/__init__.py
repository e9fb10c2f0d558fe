"""The float networks of detectors, and loading their checkpoints."""
