"""Images as fixed batches of uint8 pixels: preprocessing, folders and tar shards."""
