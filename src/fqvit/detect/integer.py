"""The networks of a detector as integer programs, run by the native engine: Networks of pipeline.py. Needs no torch.

Between programs values are still floats here: RoIAlign, decoding and suppression are pipeline.py's, and squares become codes as
each head takes them. Its neighbour is float.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fqvit.detect.images import Pixels, pad_pixels
from fqvit.detect.pipeline import Maps
from fqvit.detect.roialign import Singles
from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError
from fqvit.ir.program import CodeInput, Output, Program
from fqvit.ir.resize import resized
from fqvit.runtime.native import Engine

KEPT_SIZES = 2  # engines: each has its own packed weights and an arena of some hundred MB at a photograph's size


class IntegerNetworks:
    """pyramid: its program for any image size   boxes, masks: of the heads, one a stage"""

    def __init__(
        self,
        pyramid: Program,
        boxes: Sequence[Program],
        masks: Sequence[Program],
        settings: DetectSettings,
        threads: int | None = None,
    ) -> None:
        self.template, self.settings, self.threads = pyramid, settings, threads
        self.heads = [[_Head(program, threads) for program in part] for part in (boxes, masks)]
        self.stages = len(boxes)
        self.box_side, self.mask_side = (part[0].input.shape[0] for part in self.heads)
        self._engines: OrderedDict[tuple[int, int], Engine] = OrderedDict()

    def maps(self, pixels: Pixels) -> Maps:
        padded = pad_pixels(pixels, self.settings)
        engine = self._engine((padded.shape[0], padded.shape[1]))
        outputs = [(o.kind, _values(o, x)[0]) for o, x in zip(engine.header.outputs, engine.run_all(padded[None]), strict=True)]
        return Maps(*([x for kind, x in outputs if kind == wanted] for wanted in ("map", "scores", "deltas")))

    def boxes(self, stage: int, squares: Singles) -> tuple[Singles, Singles]:
        classes, deltas = self.heads[0][stage].run(squares)
        return classes, deltas

    def masks(self, stage: int, squares: Singles, labels: NDArray[np.int64]) -> Singles:
        (logits,) = self.heads[1][stage].run(squares)
        chosen: Singles = logits[np.arange(len(labels)), :, :, labels]
        return chosen

    def _engine(self, size: tuple[int, int]) -> Engine:
        if size not in self._engines:
            while len(self._engines) >= KEPT_SIZES:
                self._engines.popitem(last=False)
            self._engines[size] = Engine(resized(self.template, *size), self.threads)
        self._engines.move_to_end(size)
        return self._engines[size]


class _Head:
    """One head's engine, and what its codes mean."""

    def __init__(self, program: Program, threads: int | None) -> None:
        if program.header.input is None:
            raise FqvitError(f"{program.header.model}: takes pixels, expected a head of a detector, which takes squares.")
        self.input: CodeInput = program.header.input
        self.engine = Engine(program, threads)

    def run(self, squares: Singles) -> list[Singles]:
        """[n, side, side, C] -> the values of every output."""
        codes = np.floor(squares / self.input.scale + 0.5) + self.input.zero
        outputs = self.engine.run_all(codes.clip(0, 2**self.input.bits - 1).astype(np.uint8))
        return [_values(output, x) for output, x in zip(self.engine.header.outputs, outputs, strict=True)]


def _values(output: Output, codes: NDArray[Any]) -> Singles:
    """What the integers of an output mean."""
    return ((codes.astype(np.float64) - output.zero) * output.scale).astype(np.float32)
