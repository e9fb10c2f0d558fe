"""Collect the ops and constants of a program under construction."""

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
    """What a value of the graph became: a buffer of codes (q), or integers worth `unit` each (float64 [1] or [C])."""

    buffer: str
    shape: tuple[int, ...]
    q: QParams | None = None
    unit: NDArray[np.float64] = field(default_factory=lambda: np.ones(1))

    def codes(self) -> QParams:
        if self.q is None:
            raise FqvitError(f"{self.buffer}: an accumulator where codes are needed. Give this site bits in the recipe.")
        return self.q


class Emitter:
    """Collects ops and constants. Equal shared constants are stored once."""

    def __init__(self) -> None:
        self.ops: list[AnyOp] = []
        self.constants: dict[str, Constant] = {}
        self.moves: dict[str, Move] = {}  # how an op follows from the size of the image, by the buffer that it writes
        self._shared: dict[tuple[str, bytes, tuple[int, ...]], str] = {}
        self._owners: dict[Leaf, str] = {}

    def op(self, op: AnyOp) -> None:
        self.ops.append(op)

    def constant(self, name: str, array: Constant) -> None:
        assert name not in self.constants
        self.constants[name] = np.ascontiguousarray(array)

    def shared(self, kind: str, array: Constant) -> str:
        """The name of an equal constant, or of a new one: kind.0, kind.1, ..."""
        key = (kind, array.tobytes(), array.shape)
        if key not in self._shared:
            self._shared[key] = f"{kind}.{sum(known[0] == kind for known in self._shared)}"
            self.constant(self._shared[key], array)
        return self._shared[key]

    def weights(self, name: str, leaf: Leaf, parts: Mapping[str, Constant]) -> str | None:
        """Constants of op `name` with a leaf's weights; or the name of an earlier op of the same leaf that has equal ones."""
        owner = self._owners.get(leaf)
        if owner is not None and all(np.array_equal(self.constants[f"{owner}.{part}"], x) for part, x in parts.items()):
            return owner
        self._owners.setdefault(leaf, name)
        for part, array in parts.items():
            self.constant(f"{name}.{part}", array)
        return None

    def alpha(self, q: QParams) -> str | None:
        return None if q.alpha is None else self.shared("alpha", q.alpha)

    def zero(self, q: QParams) -> Zero:
        """One number where all channels agree, three where Q, K and V do, else the name of a constant."""
        if (q.zero == q.zero[0]).all():
            return int(q.zero[0])
        thirds = q.zero.reshape(3, -1) if len(q.zero) % 3 == 0 else q.zero[:, None]
        if len(thirds) == 3 and (thirds == thirds[:, :1]).all():
            return tuple(thirds[:, 0].tolist())
        return self.shared("zero", q.zero.astype(np.uint8 if q.bits <= 8 else np.uint16))

    def requantizer(self, name: str, ratios: NDArray[np.float64], short: bool) -> None:
        """The constants mult and shift of an op, one per channel.

        short: 16 bits of mult, where the result is codes: 2^-17 of their range is far below one of them.
        """
        mult, shift = np.array([encode_ratio(name, float(ratio), short) for ratio in ratios]).T
        self.constant(f"{name}.mult", mult.astype(np.uint16 if mult.max() < 1 << 16 else np.int32))
        self.constant(f"{name}.shift", shift.astype(np.uint8))
