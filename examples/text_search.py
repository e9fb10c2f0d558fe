"""Search images by text: python examples/text_search.py IMAGES.safetensors TEXT.npz

IMAGES.safetensors: embeddings of images, made by `fqvit embed` with the vision tower of a CLIP or SigLIP model.
TEXT.npz: embeddings of texts by the text tower of the same model, saved with
    numpy.savez("TEXT.npz", embeddings=float32 [texts, C], names=str [texts])
"""

from __future__ import annotations

import sys

import fqvit
from fqvit.inference.search import index_of
from fqvit.inference.zero_shot import MIDDLE, read_text

if len(sys.argv) < 3:
    sys.exit("usage: python examples/text_search.py IMAGES.safetensors TEXT.npz")
try:
    images, texts = fqvit.Embeddings.load(sys.argv[1]), read_text(sys.argv[2])
    found = index_of(images).search(texts.codes, MIDDLE, count=5)
except fqvit.FqvitError as error:
    sys.exit(str(error))

for text, rows, scores in zip(texts.names, found.rows, found.scores / 2**24):
    print(text)
    for row, cosine in zip(rows, scores):
        print(f"  {cosine:.4f}  {images.names[row]}")
