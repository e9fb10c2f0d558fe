"""Read and preprocess images from folders and tar shards."""
