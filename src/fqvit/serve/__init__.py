"""Serve programs over HTTP: classification, embeddings and detection, with micro-batching and limits."""
