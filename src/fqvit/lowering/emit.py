"""Collect the ops and constants of a program, and describe the values that ops compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.ir.ops import Zero
from fqvit.ir.program import AnyOp, Move
from fqvit.ir.value import Constant
from fqvit.lowering.encode import encode_ratio
from fqvit.models.layers import Leaf
from fqvit.quant.qparams import QParams


@dataclass(frozen=True)
class LoweredValue:
    """The integer form of one value of the float graph: a buffer and the meaning of its integers.

    q: quantization parameters if the buffer holds codes; None if it holds accumulators
    unit: float64 [1] or [C], the real value of 1 in an accumulator
    """

    buffer: str
    shape: tuple[int, ...]
    q: QParams | None = None
    unit: NDArray[np.float64] = field(default_factory=lambda: np.ones(1))

    def codes(self) -> QParams:
        """Return the quantization parameters. Raises FqvitError if the buffer holds accumulators."""
        if self.q is None:
            raise FqvitError(f"{self.buffer}: holds accumulators, expected codes. Set a bit width for this site in the recipe.")
        return self.q


class Emitter:
    """Collects ops, constants and moves. Equal shared constants are stored once."""

    def __init__(self) -> None:
        self.ops: list[AnyOp] = []
        self.constants: dict[str, Constant] = {}
        self.moves: dict[str, Move] = {}  # how ops depend on the image size, by the buffer that they write
        self._shared: dict[tuple[str, bytes, tuple[int, ...]], str] = {}
        self._owners: dict[Leaf, str] = {}

    def op(self, op: AnyOp) -> None:
        """Append an op."""
        self.ops.append(op)

    def constant(self, name: str, array: Constant) -> None:
        """Add a constant under a new name."""
        assert name not in self.constants
        self.constants[name] = np.ascontiguousarray(array)

    def shared(self, kind: str, array: Constant) -> str:
        """Return the name of an equal constant of this kind; if there is none, add one: kind.0, kind.1, ..."""
        key = (kind, array.tobytes(), array.shape)
        if key not in self._shared:
            self._shared[key] = f"{kind}.{sum(known[0] == kind for known in self._shared)}"
            self.constant(self._shared[key], array)
        return self._shared[key]

    def weights(self, name: str, leaf: Leaf, parts: Mapping[str, Constant]) -> str | None:
        """Return the name of an earlier op of this leaf with equal weights. If there is none, add constants and return None.

        name: the op that uses the weights   parts: the constants w and, with groups, choice and codebooks
        """
        owner = self._owners.get(leaf)
        if owner is not None and all(np.array_equal(self.constants[f"{owner}.{part}"], x) for part, x in parts.items()):
            return owner
        self._owners.setdefault(leaf, name)
        for part, array in parts.items():
            self.constant(f"{name}.{part}", array)
        return None

    def alpha(self, q: QParams) -> str | None:
        """Return the name of the constant that holds the exponents of the Power-of-Two Factors; None if there are none."""
        return None if q.alpha is None else self.shared("alpha", q.alpha)

    def zero(self, q: QParams) -> Zero:
        """Return one zero point for all channels, one each for Q, K and V, or the name of a constant with one per channel."""
        if (q.zero == q.zero[0]).all():
            return int(q.zero[0])
        thirds = q.zero.reshape(3, -1) if len(q.zero) % 3 == 0 else q.zero[:, None]
        if len(thirds) == 3 and (thirds == thirds[:, :1]).all():
            return tuple(thirds[:, 0].tolist())
        return self.shared("zero", q.zero.astype(np.uint8 if q.bits <= 8 else np.uint16))

    def requantizer(self, name: str, ratios: NDArray[np.float64], short: bool) -> None:
        """Add the constants mult and shift of an op: one pair per output channel for ratios float64 [O].

        short: 16-bit multipliers. Their relative error of at most 2^-16 is far below one 8-bit code.
        """
        mult, shift = np.array([encode_ratio(name, float(ratio), short) for ratio in ratios]).T
        self.constant(f"{name}.mult", mult.astype(np.uint16 if mult.max() < 1 << 16 else np.int32))
        self.constant(f"{name}.shift", shift.astype(np.uint8))
