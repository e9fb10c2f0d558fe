"""The interface of lowering rules: take a Lowering, emit ops, return the lowered value of the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fqvit.errors import FqvitError
from fqvit.ir.program import Move, MoveKind
from fqvit.lowering.context import LoweringContext
from fqvit.lowering.emit import Emitter, LoweredValue
from fqvit.lowering.encode import encode_ratio
from fqvit.models.graph import Node
from fqvit.quant.qparams import QParams


@dataclass(frozen=True)
class Lowering:
    """The arguments of a rule: one node of the graph, its lowered inputs, and the emitter that collects its ops."""

    context: LoweringContext
    emit: Emitter
    node: Node
    inputs: Sequence[LoweredValue]

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def site(self) -> str:
        """The site whose codes this node writes: its own, or that of the ReLU that is fused into it."""
        return self.context.fused_relus.get(self.name, self.name)

    @property
    def q(self) -> QParams | None:
        """The quantization parameters of this node's site; None if its output stays in the accumulator."""
        return self.context.calibration.sites.get(self.site)

    def codes(self) -> QParams:
        """Return the quantization parameters of this node's site. Raises FqvitError if it has none."""
        if self.q is None:
            raise FqvitError(f"{self.name}: not calibrated. Calibrate this model with this recipe again.")
        return self.q

    def encode_ratio(self, ratio: float) -> tuple[int, int]:
        """Return (mult, shift) of a ratio; the recipe decides the width of mult."""
        return encode_ratio(self.name, ratio, self.context.short)

    def move(self, y: str, kind: MoveKind, cut: tuple[int, int] = (0, 0), of: str = "") -> None:
        """If the program is resizable, record how the op that writes `y` depends on the image size.

        cut: (window, shift)   of: the buffer that gives the target size; see ir.program.Move
        """
        if self.context.resizable:
            self.emit.moves[y] = Move(kind, *cut, of)


# A rule takes the leaf (an instance of the class under which RULES lists the rule) and the Lowering of its node.
Rule = Callable[[Any, Lowering], LoweredValue]
