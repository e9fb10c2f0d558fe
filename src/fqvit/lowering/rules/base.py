"""What every lowering rule takes: the node, its inputs and the program under construction.

A rule reads the values of its inputs (which buffer, what its integers mean), emits ops, and returns the value of its output.
"""

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
    """What a rule takes: one node of the graph, its lowered inputs, and the emitter that collects its ops."""

    context: LoweringContext
    emit: Emitter
    node: Node
    inputs: Sequence[LoweredValue]

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def site(self) -> str:
        """The site whose codes this node writes: its own, or that of the ReLU after it, which is the clamp of the codes."""
        return self.context.fused_relus.get(self.name, self.name)

    @property
    def q(self) -> QParams | None:
        """The calibrated parameters of this node's site; None where it stays in the accumulator."""
        return self.context.calibration.sites.get(self.site)

    def codes(self) -> QParams:
        if self.q is None:
            raise FqvitError(f"{self.name}: not calibrated. Calibrate this model with this recipe again.")
        return self.q

    def encode(self, ratio: float) -> tuple[int, int]:
        """(mult, shift) of a ratio, in the multiplier width of the recipe."""
        return encode_ratio(self.name, ratio, self.context.short)

    def move(self, y: str, kind: MoveKind, cut: tuple[int, int] = (0, 0), of: str = "") -> None:
        """Record how the op that writes y follows from the size of the image, if the program is resizable."""
        if self.context.resizable:
            self.emit.moves[y] = Move(kind, *cut, of)


# (leaf, low) -> the value of the node's output. The leaf is an instance of the class that the rule is listed under.
Rule = Callable[[Any, Lowering], LoweredValue]
