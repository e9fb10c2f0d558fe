"""What lowering rules share: the growing program, its constants, and the encoding of real numbers in fixed point."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.ir.fixed import multiplier
from fqvit.ir.ops import Zero
from fqvit.ir.program import AnyOp, Move, MoveKind, Site
from fqvit.ir.value import Constant
from fqvit.models.graph import Graph
from fqvit.models.layers import Leaf
from fqvit.quant.calibration import Calibration
from fqvit.quant.qparams import SCALE_GRID, QParams

G_BITS = 22  # LayerNorm's gamma: 2^-22 of itself is far below a code, and t * g stays inside 2^53
B_FRACTION = 20
SHORT = 15  # bits by which 16-bit multipliers are shorter
SUM_BITS = 16  # of what is added to a residual sum's codes where multipliers are short: the code's own and its fraction


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

    def __init__(self, calibration: Calibration, masked: bool) -> None:
        self.calibration = calibration
        self.short = calibration.recipe.mult == "short"  # no multiplier has more than 16 bits
        # The codes of the sum that reads a linear map, by that map's name.
        self.sums: dict[str, QParams] = {}
        self.relus: dict[str, str] = {}  # the ReLU whose codes a map writes, by that map's name
        # Whether the program will be made for other image sizes: how ops follow from the size is then written down.
        self.resizable = False
        self.moves: dict[str, Move] = {}
        self.masked = masked  # some window is masked, so the last attention code means 0 everywhere
        self.values: dict[str, LoweredValue] = {}
        self.ops: list[AnyOp] = []
        self.constants: dict[str, Constant] = {}
        self._shared: dict[tuple[str, bytes, tuple[int, ...]], str] = {}
        self._owners: dict[Leaf, str] = {}

    def op(self, op: AnyOp) -> None:
        self.ops.append(op)

    def move(self, y: str, kind: MoveKind, cut: tuple[int, int] = (0, 0), of: str = "") -> None:
        """Says how the op that writes y follows from the size of the image."""
        if self.resizable:
            self.moves[y] = Move(kind, *cut, of)

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

    def encode(self, name: str, ratio: float, short: bool = False) -> tuple[int, int]:
        """(mult, shift) of a ratio. short: 16 bits of mult even where the recipe does not ask for it."""
        try:
            return _shortened(*multiplier(ratio)) if self.short or short else multiplier(ratio)
        except (ValueError, OverflowError):
            raise FqvitError(
                f"{name}: the ratio of its scales is {ratio:g}, which no multiplier holds. Check the checkpoint's values."
            ) from None

    def requantizer(self, name: str, ratios: NDArray[np.float64], short: bool = False) -> None:
        """The constants mult and shift of an op, one a channel.

        short: 16 bits of mult, where the result is codes: 2^-17 of their range is far below one of them.
        """
        mult, shift = np.array([self.encode(name, float(ratio), short) for ratio in ratios]).T
        self.constant(f"{name}.mult", mult.astype(np.uint16 if mult.max() < 1 << 16 else np.int32))
        self.constant(f"{name}.shift", shift.astype(np.uint8))

    def shared_shift(self, name: str, ratios: Sequence[NDArray[np.float64]]) -> tuple[list[NDArray[np.int64]], int]:
        """Multipliers below 2^30 (16 bits if short) at one shift: ratio = mult / 2^shift. It leaves room for alpha up to 15."""
        largest = max(float(r.max()) for r in ratios)
        shift = min((15 if self.short else 29) - math.frexp(largest)[1], 47)
        if shift < 1:
            raise FqvitError(
                f"{name}: the ratio of its scales is {largest:g}, which no multiplier holds. Check the checkpoint's values."
            )
        return [np.floor(r * 2.0**shift + 0.5).astype(np.int64) for r in ratios], shift

    def sum_unit(self, name: str) -> float | None:
        """Where multipliers are short: the unit of what is added to a residual sum, a fraction of its step, so that the sum's
        shift serves both its terms. None elsewhere."""
        if not self.short or name not in self.sums:
            return None
        q = self.sums[name]
        return float(q.scale[0]) / 2.0 ** max(SUM_BITS - q.bits, 2)

    def affine(self, name: str, gain: NDArray[np.float64], offset: NDArray[np.float64]) -> tuple[int, int]:
        """LayerNorm's constant [g, b] and (shift, b_shift): gain = g / 2^(shift - 24), offset = b / 2^(shift - b_shift)."""
        g_fraction = min(max(G_BITS - math.frexp(float(np.abs(gain).max()) or 1.0)[1], 0), 28)
        b_fraction = min(B_FRACTION, 30 - math.frexp(float(np.abs(offset).max()) or 1.0)[1])
        both = np.stack([gain * 2.0**g_fraction, offset * 2.0**b_fraction])
        self.constant(f"{name}.affine", self.int32(name, "gamma or beta", np.floor(both + 0.5).astype(np.int64)))
        shift = 24 + g_fraction
        return shift, shift - b_fraction

    def int32(self, name: str, what: str, values: NDArray[np.int64]) -> NDArray[np.int32]:
        if np.abs(values).max() >= 2**31:
            raise FqvitError(f"{name}: {what} does not fit 32 bits. Check the checkpoint's values.")
        return values.astype(np.int32)

    def sites(self, graph: Graph) -> dict[str, Site]:
        """How to read the codes of every quantized site."""
        found = {}
        for node in graph.nodes:
            q = self.values[node.name].q
            if q is None or node.name not in self.calibration.sites:
                continue
            role = node.leaf.role
            if q.log2:
                found[node.name] = Site(role, q.bits, log2=True, zero_code=q.zero_code)
            elif q.levels:
                found[node.name] = Site(role, q.bits, levels=q.levels)
            elif len(q.scale) > 3 and role == "gelu":
                finest, alpha, zeros = powers(q)
                found[node.name] = Site(role, q.bits, (_short(finest),), zeros, self.shared("alpha", alpha))
            elif len(q.scale) > 3:
                units, steps = self.steps(q, 3 if role == "qkv" else 1)
                zero = self.zero(q)
                found[node.name] = Site(role, q.bits, units, (zero,) if isinstance(zero, int) else zero, steps=steps)
            else:
                scales = tuple(_short(scale) for scale in q.scale)
                found[node.name] = Site(role, q.bits, scales, tuple(q.zero.tolist()), self.alpha(q))
        return found

    def steps(self, q: QParams, groups: int) -> tuple[tuple[float, ...], str]:
        """A step for each channel as a unit and the name of a u16 [C] constant: how many units each step is. With three groups
        Q and K have one step each, which is their unit, and the constant is of V's channels alone."""
        scale = q.scale.reshape(groups, -1)
        unit = float(scale[-1].max()) / SCALE_GRID
        counts = np.rint(scale[-1] / unit).astype(np.uint16)
        return tuple(_short(u) for u in (*scale[:-1, 0].tolist(), unit)), self.shared("steps", counts)


def _shortened(mult: int, shift: int) -> tuple[int, int]:
    """16 bits of a multiplier of 31, rounded; as it is where its shift has no room, or where it is 0."""
    if shift <= SHORT or mult == 0:
        return mult, shift
    short, shift = (mult + (1 << (SHORT - 1))) >> SHORT, shift - SHORT
    if short < 1 << 16:
        return short, shift
    return (short >> 1, shift - 1) if shift > 1 else (short - 1, shift)


def powers(q: QParams) -> tuple[float, NDArray[np.uint8], tuple[int, ...]]:
    """Steps that are one step times powers of two, as that step, the powers u8 [C], and the zero point of each power."""
    finest = float(q.scale.min())
    alpha = np.rint(np.log2(q.scale / finest)).astype(np.uint8)
    zeros = [int(q.zero[alpha == a][0]) if (alpha == a).any() else 0 for a in range(int(alpha.max()) + 1)]
    return finest, alpha, tuple(zeros)


def _short(scale: float) -> float:
    """Nine digits: for reading codes, not for running; the ops hold what runs."""
    return float(f"{scale:.9g}")
