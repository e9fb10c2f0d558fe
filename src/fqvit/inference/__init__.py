"""Use programs on images: embed, classify or detect; embeddings and their files; search and zero-shot classification."""
