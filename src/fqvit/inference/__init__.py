"""Use programs on images: embeddings and their files, search, zero-shot classification."""
