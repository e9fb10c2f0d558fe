"""Read checkpoints of all supported layouts and convert their tensors to those of our modules."""
