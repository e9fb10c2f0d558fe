"""Float models: modules, checkpoints in every supported layout, and tracing."""
