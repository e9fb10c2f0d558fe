"""Cut a network into segments at residual sums, and estimate how much the result depends on each of their outputs.

See also: reconstruct.py (learns segment by segment).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fqvit.data.preprocess import Preprocess
from fqvit.models import layers
from fqvit.models.graph import IMAGES, Graph, Node
from fqvit.models.pixels import normalise

ALIKE = (layers.Linear, layers.LayerNorm, layers.Gelu, layers.Add)  # leaves that treat every token alike
BATCH = 8
# Share of the importance of each channel that is distributed equally over all tokens. In the last block only the class token
# counts, and learning on one token per image may fit the calibration images only.
EQUAL = 0.5


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes that read only one earlier value, `start`. Later nodes read only the output of the last node."""

    start: str
    nodes: tuple[Node, ...]

    @property
    def end(self) -> Node:
        return self.nodes[-1]

    @property
    def alike(self) -> bool:
        """Whether the segment treats every token alike, as MLPs do."""
        return all(isinstance(node.leaf, ALIKE) for node in self.nodes)

    def run(self, x: Tensor, call: Callable[[Node, list[Tensor]], Tensor], visit: Callable[[Node, Tensor], Tensor]) -> Tensor:
        """Run the nodes on the value of `start`. call, visit: see Graph.run"""
        values = {self.start: x}
        for node in self.nodes:
            values[node.name] = visit(node, call(node, [values[name] for name in node.inputs]))
        return values[self.end.name]


def segments(graph: Graph) -> list[Segment]:
    """Cut the graph after every residual sum beyond which no earlier value is read. The last segment ends at the output.

    A pyramid also reads the residual stream between two stages, through norms that are on no path to a later residual sum.
    Such nodes belong to no segment but the last.
    """
    trunk = _trunk(graph)
    last_read = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    last_read_in_trunk = {name: i for i, node in enumerate(graph.nodes) if node.name in trunk for name in node.inputs}
    found: list[Segment] = []
    start, first = IMAGES, 0
    for i, node in enumerate(graph.nodes):
        inner = [other for other in graph.nodes[first:i] if other.name in trunk]
        reach = max([last_read_in_trunk.get(start, -1), *(last_read.get(other.name, -1) for other in inner)])
        is_sum = node.leaf.role == "residual" and node.name in trunk
        if is_sum and reach <= i and node.name not in graph.outputs:
            found.append(Segment(start, (*inner, node)))
            start, first = node.name, i + 1
    return [*found, Segment(start, graph.nodes[first:])]


def _trunk(graph: Graph) -> set[str]:
    """Return the names of the last residual sum and of all nodes that it depends on."""
    sums = [node.name for node in graph.nodes if node.leaf.role == "residual"]
    trunk = set(sums[-1:])
    for node in reversed(graph.nodes):
        if node.name in trunk:
            trunk.update(node.inputs)
    return trunk


def importance(graph: Graph, preprocess: Preprocess, images: NDArray[np.uint8]) -> dict[str, Tensor]:
    """Return the importance [T, C] of the errors of every segment's output, with mean 1: {name of its last node: importance}.

    It is the mean squared gradient of the log-probability of a class that is drawn from the model's own prediction: the
    diagonal of the Fisher information. Without logits, a random projection of the normalized output takes its place. A share
    of EQUAL is the same for all tokens. Empty if there is one segment only, or if the output has no gradient (sign bits).
    """
    ends = {each.end.name for each in segments(graph)} - {graph.output}
    role = graph.node(graph.output).leaf.role
    logits, pyramid = role == "logits", role == "deltas"
    random = torch.Generator().manual_seed(0)
    total: dict[str, Tensor] = {}
    for first in range(0, len(images), BATCH):
        kept: dict[str, Tensor] = {}

        def visit(node: Node, y: Tensor, kept: dict[str, Tensor] = kept) -> Tensor:
            if node.name in ends:
                # No parameter requires a gradient, so the autograd graph starts at the first of these values.
                kept[node.name] = y = y if kept else y.detach().requires_grad_()
                y.retain_grad()
            return y

        with torch.enable_grad():
            results = graph.run_all(normalise(images[first : first + BATCH], preprocess), visit)
            # All outputs of a pyramid count equally; other networks have one main output.
            y = torch.cat([F.normalize(each.flatten(1), dim=-1) for each in results], 1) if pyramid else results[-1].flatten(1)
            if not y.requires_grad:
                return {}
            if logits:
                drawn = torch.multinomial(y.detach().softmax(-1), 1, generator=random)[:, 0]
                F.cross_entropy(y, drawn, reduction="sum").backward()  # type: ignore[no-untyped-call]
            else:
                (F.normalize(y, dim=-1) * torch.randn(y.shape, generator=random)).sum().backward()  # type: ignore[no-untyped-call]
        for name, value in kept.items():
            if value.grad is not None:
                total[name] = total.get(name, torch.zeros(())) + value.grad.square().sum(0)
    return {name: _with_equal_share(value / value.mean()) for name, value in total.items() if float(value.mean()) > 0}


def _with_equal_share(value: Tensor) -> Tensor:
    """Distribute a share of EQUAL of the importance [..., C] of each channel equally over all tokens."""
    return (1 - EQUAL) * value + EQUAL * value.reshape(-1, value.shape[-1]).mean(0)
