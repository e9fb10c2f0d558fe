"""Collect how close the embeddings and tokens of a program are to those of the float model, image by image.

See also: evaluate/similarity.py (the measures), tokens.py (tokens as colours), predictions.py (the same for logits), gather.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.evaluate.similarity import COMPARED_KINDS, OutputSimilarity, OutputVectors, Vectors, described_outputs
from fqvit.ir.program import Program
from fqvit.report.maps import jpeg
from fqvit.report.tokens import TokenColours

SHOWN = 12  # images with the lowest cosine
THUMBNAIL = 96  # long side of the thumbnail of a neighbour; thumbnails of all images are kept


@dataclass(frozen=True)
class Neighbour:
    """The nearest other image. thumbnail: a data: URI"""

    path: str
    thumbnail: str


@dataclass(frozen=True)
class WorstImage:
    """An image whose integer output is far from the float output. pixels: u8 [H, W, C], as the model sees them

    float_neighbour, integer_neighbour: None if the output is not a vector or there are too few images
    """

    path: str
    pixels: NDArray[np.uint8]
    cosine: float
    float_neighbour: Neighbour | None = None
    integer_neighbour: Neighbour | None = None


@dataclass(frozen=True)
class EmbeddingQuality:
    """All that the report shows about the outputs of a program that are not logits.

    outputs: in the order of the program   cosines: f64 [N] by output, one per image
    main: the name of the output that `worst` is about: the first vector, or else the first output   worst: lowest cosine first
    tokens: patch tokens of a few images as colours   token_site: their site; "" if there are none
    """

    outputs: Sequence[OutputSimilarity]
    cosines: Mapping[str, NDArray[np.float64]]
    main: str
    worst: Sequence[WorstImage]
    tokens: Sequence[TokenColours] = ()
    token_site: str = ""


class EmbeddingPairs:
    """The outputs of a program that are not logits, next to those of the float model, accumulated from batches."""

    def __init__(self, program: Program) -> None:
        found = enumerate(described_outputs(program))
        self.outputs = {i: OutputVectors(info) for i, info in found if info.kind in COMPARED_KINDS}
        vectors = [i for i, output in self.outputs.items() if len(output.info.shape) == 1]
        self.main = vectors[0] if vectors else next(iter(self.outputs), None)
        self.kept: dict[int, NDArray[np.uint8]] = {}  # pixels of the images that have the lowest cosines so far
        self.thumbnails: list[str] = []  # of all images, because any may be a neighbour

    def add(
        self,
        pixels: NDArray[np.uint8],
        paths: Sequence[str],
        floats: Sequence[Vectors],
        integers: Sequence[np.ndarray[Any, Any]],
    ) -> None:
        """Add a batch. pixels: u8 [N, H, W, C]; floats, integers: all outputs of the float model and of the program."""
        for i, output in self.outputs.items():
            output.add(paths, floats[i], integers[i])
        if self.main is not None:
            main = self.outputs[self.main]
            start = len(main.names) - len(paths)
            lowest = main.worst(SHOWN)
            if len(main.info.shape) == 1:
                self.thumbnails += [jpeg(one, THUMBNAIL, 75) for one in pixels]
            self.kept = {at: self.kept[at] if at < start else pixels[at - start].copy() for at in lowest}

    def result(self) -> EmbeddingQuality | None:
        """Summarize the images seen; None if the program outputs only logits."""
        if self.main is None:
            return None
        neighbours = {i: output.neighbours() for i, output in self.outputs.items()}
        main, near = self.outputs[self.main], neighbours[self.main]
        worst = []
        for at in main.worst(SHOWN):
            one = WorstImage(main.names[at], self.kept[at], main.cosines[at])
            if near is not None:
                # Of several equally near images, show the same one for float and integers.
                both = (near.by_integer[at] if near.same[at] else near.by_float[at], near.by_integer[at])
                shown = (Neighbour(main.names[other], self.thumbnails[other]) for other in both)
                one = WorstImage(one.path, one.pixels, one.cosine, *shown)
            worst.append(one)
        return EmbeddingQuality(
            outputs=[output.result(neighbours[i]) for i, output in self.outputs.items()],
            cosines={output.info.name: np.array(output.cosines) for output in self.outputs.values()},
            main=main.info.name,
            worst=worst,
        )
