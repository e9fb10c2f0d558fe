"""Trace a float model into a flat list of leaf calls, whose outputs are named sites, and run it.

Calibration and simulation run the same graph with different `visit` functions. Models must consist of leaf modules only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx, nn

from fqvit.errors import FqvitError
from fqvit.ir.liveness import last_uses
from fqvit.models.layers import Leaf, Linear

IMAGES = "images"
Features = Literal["logits", "tokens", "pooled"]


@dataclass(frozen=True)
class Node:
    """One call of a leaf. `name` is the leaf's path in the model and the name of its output site.

    inputs: names of earlier nodes, or "images"   params: tensors of the model, passed to the leaf after its inputs
    """

    name: str
    leaf: Leaf
    inputs: tuple[str, ...]
    params: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Graph:
    """The nodes of a model in execution order.

    output: name of the main output, which a traced model returns last and a captured module first
    others: names of the other outputs, in the order in which the model returns them
    """

    nodes: tuple[Node, ...]
    output: str
    others: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*self.others, self.output)

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def ending_at(self, output: str) -> Graph:
        """Return the part of the graph that `output` depends on."""
        return Graph(self.nodes, output).pruned()

    def pruned(self) -> Graph:
        """Return the graph without the nodes that no output depends on."""
        needed, kept = set(self.outputs), []
        for node in reversed(self.nodes):
            if node.name in needed:
                needed.update(node.inputs)
                kept.append(node)
        return Graph(tuple(reversed(kept)), self.output, self.others)

    def run(
        self,
        images: Tensor,
        visit: Callable[[Node, Tensor], Tensor] | None = None,
        call: Callable[[Node, list[Tensor]], Tensor] | None = None,
    ) -> Tensor:
        """Run the nodes in order and return the main output.

        images: float [N, channels, height, width], normalised
        visit(node, y): returns the value that later nodes read instead of y
        call(node, inputs): replaces the computation of the node
        """
        return self.run_all(images, visit, call)[-1]

    def run_all(
        self,
        images: Tensor,
        visit: Callable[[Node, Tensor], Tensor] | None = None,
        call: Callable[[Node, list[Tensor]], Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Run the nodes as `run` does, and return all outputs, the main output last."""
        last_use = last_uses((node.inputs for node in self.nodes), self.outputs)
        values: dict[str, Tensor] = {IMAGES: images}
        for i, node in enumerate(self.nodes):
            inputs = [values[name] for name in node.inputs]
            y = call(node, inputs) if call else node.leaf(*inputs, *node.params)
            values[node.name] = visit(node, y) if visit else y
            for name in node.inputs:
                if last_use[name] == i:
                    values.pop(name, None)
        return tuple(values[name] for name in self.outputs)


class Captured(nn.Module):
    """A model that is already a graph. Its leaves are submodules, so that they move between devices with it.

    parity: the largest difference from the original module's outputs, relative to the largest output
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph, self.parity = graph, 0.0
        self.leaves = nn.ModuleList(node.leaf for node in graph.nodes)

    @property
    def classes(self) -> int | None:
        """The number of logits; None if the main output is not a vector of logits."""
        leaf = self.graph.node(self.graph.output).leaf
        return leaf.weight.shape[0] if leaf.role == "logits" and isinstance(leaf.weight, Tensor) else None

    def use_as_classifier(self, is_classifier: bool) -> None:
        """Set whether the output of the last linear layer is logits or the projection of an embedding."""
        leaf = self.graph.node(self.graph.output).leaf
        if isinstance(leaf, Linear) and leaf.role in ("logits", "pooled"):
            leaf.role = "logits" if is_classifier else "pooled"

    def forward(self, images: Tensor) -> Tensor:
        return self.graph.run(images)


def returned_outputs(module: nn.Module, graph: Graph) -> tuple[str, ...]:
    """Return the model's own outputs in the order in which it returns them.

    A captured module returns its main output first; a traced model, such as a detector's pyramid, returns it last.
    """
    return (graph.output, *graph.others) if isinstance(module, Captured) else graph.outputs


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Leaf)


def trace(model: nn.Module, features: Features = "logits") -> Graph:
    """Trace `model` up to its logits, its normalised tokens or its pooled feature vector.

    A leaf that is called several times (a head shared by the levels of a pyramid) has one site per call: path, path@1, ...
    """
    if isinstance(model, Captured):
        return _captured_features(model.graph, features)
    traced = _Tracer().trace(model)
    names: dict[fx.Node, str] = {}
    params: dict[fx.Node, Tensor] = {}
    nodes: list[Node] = []
    outputs: list[str] = []
    calls: Counter[str] = Counter()
    for n in traced.nodes:
        if n.op == "placeholder":
            names[n] = IMAGES
        elif n.op == "get_attr":
            params[n] = _attribute(model, str(n.target))
        elif n.op == "call_module":
            leaf = model.get_submodule(str(n.target))
            if not isinstance(leaf, Leaf):
                raise FqvitError(
                    f"{n.target}: is a {type(leaf).__name__}, expected a leaf module. Build the model from fqvit.models.layers."
                )
            path = str(n.target)
            names[n] = f"{path}@{calls[path]}" if calls[path] else path
            calls[path] += 1
            nodes.append(
                Node(
                    names[n],
                    leaf,
                    tuple(names[a] for a in n.args if a in names),
                    tuple(params[a].detach() for a in n.args if a in params),
                )
            )
        elif n.op == "output":
            fx.node.map_arg(n.args[0], lambda end: outputs.append(names[end]))
        else:
            raise FqvitError(f"{n.name}: called outside a leaf module. Build the model from fqvit.models.layers.")
    graph = Graph(tuple(nodes), outputs[-1], tuple(outputs[:-1]))
    return graph if features == "logits" else graph.ending_at(_feature_site(graph, features))


def _captured_features(graph: Graph, features: Features) -> Graph:
    if features == "logits":
        return graph
    head = graph.node(graph.output)
    if head.leaf.role != "logits":
        raise FqvitError(
            f"features {features}: this model has no classifier, its output already consists of features. Leave features out."
        )
    if features == "pooled":
        return graph.ending_at(head.inputs[0])
    raise FqvitError(f"features {features}: known only for ViT, DeiT and Swin. Use outputs='tokens' (--output tokens) instead.")


def _feature_site(graph: Graph, features: Features) -> str:
    head = graph.node(graph.output)
    if features == "pooled":
        return head.inputs[0]
    pool: Iterable[Node] = (node for node in graph.nodes if node.name == "pool")
    return next(iter(pool)).inputs[0]


def _attribute(model: nn.Module, path: str) -> Tensor:
    value: object = model
    for part in path.split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value


@torch.no_grad()
def value_shapes(graph: Graph, size: tuple[int, int, int], device: torch.device | str = "cpu") -> dict[str, tuple[int, ...]]:
    """Return the shape of every node's output for one image, without the batch axis, by running the graph on zeros.

    size: shape of the input without the batch axis
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def visit(node: Node, y: Tensor) -> Tensor:
        shapes[node.name] = tuple(y.shape[1:])
        return y

    graph.run(torch.zeros(1, *size, device=device), visit)
    return shapes


@torch.no_grad()
def run_float(graph: Graph, images: Tensor) -> Tensor:
    """Return the logits (or features) of the float model: [N, ...]."""
    return graph.run(images)
