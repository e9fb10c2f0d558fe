"""Find the values of a graph that users ask for by name: the residual stream after each block, the patches, the last norm.

Blocks are found from the paths of the nodes: `blocks.3.attn.softmax` belongs to block `blocks.3`. The residual stream
after a block is the value of the block that later nodes read. See also: outputs.py (adds the outputs to a graph).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from fqvit.models.general import Join, MeanRows, Narrow
from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Add, Embed, LayerNorm, Mean, Softmax

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Pooling:
    """The norm that follows the last block. norm: its node   first: whether it comes before tokens are selected or averaged"""

    norm: Node
    first: bool


class Streams:
    """The values of one graph. shapes: output shape of every node for one image"""

    def __init__(self, graph: Graph, shapes: Shapes) -> None:
        self.graph, self.shapes = graph, shapes
        self.nodes = {node.name: node for node in graph.nodes}

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The nodes that write the residual stream after each block, in order. Blocks with one row per image do not count."""
        attention = _blocks(node.name for node in self.graph.nodes if isinstance(node.leaf, Softmax))
        sums = (node.name for node in self.graph.nodes if isinstance(node.leaf, Add) and node.leaf.role == "residual")
        found = (self._leaving(block) for block in attention or _blocks(sums))
        return tuple(name for name in found if name is not None and self.rows(name) > 1)

    def rows(self, name: str) -> int:
        """Return the number of vectors of channels that a node writes."""
        return math.prod(self.shapes[name][:-1])

    def _leaving(self, block: str) -> str | None:
        """Return the node of a block that later nodes read: the last residual sum, or else the last node other than Narrow."""
        inside = {name for name in self.nodes if _is_inside(name, block)}
        read = {name for node in self.graph.nodes if node.name not in inside for name in node.inputs}
        leaving = [name for name in self.nodes if name in inside and name in read.union(self.graph.outputs)]
        kept = [name for name in leaving if not isinstance(self.nodes[name].leaf, Narrow)]
        residual = [name for name in kept if self.nodes[name].leaf.role == "residual"]
        return next(reversed(residual or kept), None)

    @cached_property
    def prefix(self) -> int:
        """The number of tokens before the patches: class token and registers."""
        if not self.layers:
            return 0
        block = _blocks([self.layers[0]])
        before: list[Node] = []
        for node in self.graph.nodes:
            if block and _is_inside(node.name, block[0]):
                break
            before.append(node)
        for node in before:
            if isinstance(node.leaf, Embed):
                return int(node.params[0].shape[1])
            if isinstance(node.leaf, Join):
                return self._joined_prefix(node)
        return 0

    def _joined_prefix(self, join: Node) -> int:
        """Return how many rows of a Join come before those of its largest input, the patches."""
        assert isinstance(join.leaf, Join)
        runs = [math.prod(self.shapes[name]) // join.leaf.width for name in join.inputs]
        largest = runs.index(max(runs))
        first = sum(runs[:largest])
        index = join.leaf.index.tolist()
        own = [i for i, run in enumerate(index) if first <= run < first + runs[largest]]
        return own[0] * join.leaf.width // join.leaf.shape[-1] if own else 0

    def source(self, name: str) -> str:
        """Follow data movement (role route) back from a node to the one that computes its values."""
        while name in self.nodes and self.nodes[name].leaf.role == "route":
            name = self.nodes[name].inputs[0]
        return name

    @cached_property
    def last_norm(self) -> Pooling | None:
        """The norm after the last block, before or after pooling; None if no norm follows."""
        if not self.layers:
            return None
        stream = self.layers[-1]
        for node in self.graph.nodes:
            if not isinstance(node.leaf, LayerNorm) or node.name in self._in_blocks:
                continue
            x = self.source(node.inputs[0])
            if x == stream and self.rows(node.name) == self.rows(stream):
                return Pooling(node, True)
            pooled = self.nodes.get(x)
            averaged = (
                pooled is not None and isinstance(pooled.leaf, Mean | MeanRows) and self.source(pooled.inputs[0]) == stream
            )
            if averaged or (x == stream and self.rows(node.name) == 1):
                return Pooling(node, False)
        return None

    @cached_property
    def _in_blocks(self) -> set[str]:
        blocks = _blocks(self.layers)
        return {name for name in self.nodes if any(_is_inside(name, block) for block in blocks)}

    @cached_property
    def classifier(self) -> str | None:
        """The node that computes the logits; None if the model has no classifier."""
        return self.graph.output if self.nodes[self.graph.output].leaf.role == "logits" else None

    @cached_property
    def embedding(self) -> str | None:
        """The model's own pooled vector: the input of the classifier, or else the first output that is one vector per image."""
        if self.classifier is not None:
            return self.nodes[self.classifier].inputs[0]
        outputs = (self.graph.output, *self.graph.others)
        return next((name for name in outputs if name in self.nodes and len(self.shapes[name]) == 1), None)

    def names(self) -> tuple[str, ...]:
        """Return the names of the outputs that the model has, without names of single layers such as tokens@9."""
        found = ["logits"] if self.classifier is not None else []
        found += ["embedding"] if self.embedding is not None else []
        if self.layers:
            found += [*(["class"] if self.prefix else []), "mean", "tokens"]
        return tuple(found)


def _blocks(names: Iterable[str]) -> list[str]:
    """Return the innermost numbered modules that contain the nodes, in order: layers.0.blocks.1 for layers.0.blocks.1.add2."""
    found: dict[str, None] = {}
    for name in names:
        matched = re.match(r"(?:.*\.)?\d+(?=\.)", name)
        if matched:
            found[matched[0]] = None
    return list(found)


def _is_inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")
