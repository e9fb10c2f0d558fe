"""Use one embedding of a program as a function from images to vectors, with its integer similarity."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.inference.embeddings import SIGNS
from fqvit.inference.products import Codes, Ints
from fqvit.inference.search import BinaryIndex, Index, searchable
from fqvit.inference.zero_shot import TextClasses
from fqvit.runtime.native import Engine


class Embedder:
    """One output of a program: images u8 [N, H, W, C] -> codes [N, C].

    info: describes the output   position: its place among the outputs of the program
    """

    def __init__(self, path: Path, output: str | None = None, engine: Engine | None = None) -> None:
        """output: the name of the output; None: the first embedding. engine: an engine with this program, if already loaded"""
        self.path, self.engine = path, engine or Engine(path)
        outputs = {info.name: info for info in self.engine.outputs}
        self.info = searchable(outputs, str(path), output)
        self.position = list(outputs).index(self.info.name)

    def __call__(self, images: NDArray[np.uint8]) -> Codes:
        return self.engine.run_all(images)[self.position]

    def similarity(self, gallery: Codes) -> Callable[[Codes], Ints]:
        """Return a function that maps queries [Q, C] to integer cosine similarities with the gallery [G, C]: i64 [Q, G]."""
        if self.info.kind == SIGNS:
            return BinaryIndex(gallery).scores
        return partial(Index(gallery, self.info.zero, self.engine.threads).scores, zero=self.info.zero)

    def check_text(self, path: str, text: TextClasses) -> None:
        """Raise FqvitError if text embeddings cannot be compared with this output. path: file of the text embeddings"""
        if self.info.kind == SIGNS:
            raise FqvitError(f"{self.path}: output {self.info.name!r} has sign bits only. Choose another output (--output).")
        text.check_length(path, self.info.shape[0], f"output {self.info.name!r} of {self.path}")
