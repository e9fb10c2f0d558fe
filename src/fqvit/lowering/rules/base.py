"""What every lowering rule takes: the node, its inputs and the program under construction.

A rule reads the values of its inputs (which buffer, what its integers mean), emits ops, and returns the value of its output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.lowering.emit import Emitter, LoweredValue
from fqvit.models.graph import Node
from fqvit.quant.qparams import QParams


@dataclass(frozen=True)
class Lowering:
    """What a rule has at hand."""

    emit: Emitter
    node: Node
    inputs: list[LoweredValue]
    preprocess: Preprocess

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def site(self) -> str:
        """The site whose codes this node writes: its own, or that of the ReLU after it, which is the clamp of the codes."""
        return self.emit.relus.get(self.name, self.name)

    @property
    def q(self) -> QParams | None:
        """The calibrated parameters of this node's site; None where it stays in the accumulator."""
        return self.emit.calibration.sites.get(self.site)

    def codes(self) -> QParams:
        if self.q is None:
            raise FqvitError(f"{self.name}: not calibrated. Calibrate this model with this recipe again.")
        return self.q


# (leaf, low) -> the value of the node's output. The leaf is an instance of the class that the rule is listed under.
Rule = Callable[[Any, Lowering], LoweredValue]
