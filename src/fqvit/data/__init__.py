"""Read and preprocess images from folders, tar shards and Parquet files."""
