"""Use programs on images: embeddings of images and their files."""
