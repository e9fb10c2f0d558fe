"""Add the outputs that a user asks for to the graph of a model: embeddings, tokens and layers, normalised or as sign bits.

Each output is a site of its own with one scale and one zero point, so a new output does not change the codes of another. Norms
and means are recomputed for each output, from the selected tokens of the residual stream; all outputs share the blocks.
See also: requests.py (the names), streams.py (finds the values), docs/how-to/extract-features.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import nn

from fqvit.errors import FqvitError
from fqvit.models.general import Activation, Depthwise, MeanRows, Multiply, Narrow, Signs
from fqvit.models.graph import Features, Graph, Node, trace, value_shapes
from fqvit.models.layers import LayerNorm, Leaf, Linear, Mean, Take
from fqvit.models.requests import LAYERED, Request, check_different, parse_outputs
from fqvit.models.streams import Shapes, Streams

WIDE = 16  # bits of values read from the residual stream, and of values that are normalised or reduced to signs afterwards
# Leaves that are computed a second time as an output. An output from any other leaf reads the codes that the leaf writes.
COPIED = (LayerNorm, Linear, Mean, MeanRows, Activation, Depthwise, Multiply)


def output_graph(
    module: nn.Module, size: tuple[int, int, int], features: Features = "logits", outputs: Sequence[str] = ()
) -> Graph:
    """Trace a model up to the wanted outputs, in their order; without any, up to the outputs of the model itself.

    size: channels, height and width of its images   features: deprecated, see graph.trace
    """
    if not outputs:
        return trace(module, features)
    graph = trace(module)
    device = next(iter(module.parameters())).device
    return with_outputs(graph, parse_outputs(outputs), value_shapes(graph, size, device))


def resolve_outputs(module: nn.Module, size: tuple[int, int, int], wanted: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of outputs in normal form (layers counted from 0); an empty tuple for the model's own outputs.

    Raises FqvitError for an output that the model does not have; the message names the available outputs.
    """
    requests = parse_outputs(wanted)
    graph = trace(module)
    streams = Streams(graph, value_shapes(graph, size, next(iter(module.parameters())).device))
    resolved = tuple(_resolve(streams, request) for request in requests)
    check_different(resolved)
    if not graph.others and [request.label for request in resolved] == _own(streams):
        return ()
    with_outputs(graph, resolved, streams.shapes)
    return tuple(request.label for request in resolved)


def available(module: nn.Module, size: tuple[int, int, int]) -> tuple[tuple[str, ...], int]:
    """Return the names of the outputs that a model has, and its number of layers."""
    graph = trace(module)
    streams = Streams(graph, value_shapes(graph, size, next(iter(module.parameters())).device))
    return streams.names(), len(streams.layers)


def _own(streams: Streams) -> list[str]:
    """Return the name of the only output of a model, as a list; empty if it has no name."""
    if streams.classifier is not None:
        return ["logits"]
    own = streams.nodes[streams.graph.output]
    # A sum may have one shift per channel, which an embedding does not have.
    return ["embedding"] if streams.embedding == own.name and own.leaf.role != "residual" else []


def with_outputs(graph: Graph, requests: Sequence[Request], shapes: Shapes) -> Graph:
    """Return the graph with the requested outputs instead of its own, without the nodes that none of them needs."""
    builder = _Builder(Streams(graph, shapes))
    names = [builder.build(_resolve(builder.streams, request)) for request in requests]
    return Graph((*graph.nodes, *builder.added), names[-1], tuple(names[:-1])).pruned()


def _resolve(streams: Streams, request: Request) -> Request:
    """Return the request with its layer counted from 0, after checking that the model has this output."""
    names, depth = streams.names(), len(streams.layers)
    if request.name not in names:
        layers = f"; {', '.join(n for n in LAYERED if n in names)} also at layers @0 to @{depth - 1}" if depth else ""
        missing = {"logits": "classifier", "class": "class token", "embedding": "pooled vector"}
        problem = f"output {request.label}: this model has no {missing.get(request.name, 'numbered blocks of tokens')}"
        raise FqvitError(f"{problem}. It has {', '.join(names) or 'none of the named outputs'}{layers}.")
    if request.layer is None:
        return request
    if not -depth <= request.layer < depth:
        raise FqvitError(
            f"output {request.label}: this model has {depth} layers, expected @0 to @{depth - 1}, or @-1 for the last."
        )
    return Request(request.name, request.layer % depth, request.modifiers)


class _Builder:
    """Appends the nodes of outputs to those of a graph."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.shapes = streams, dict(streams.shapes)
        self.added: list[Node] = []

    def build(self, request: Request) -> str:
        """Append the nodes of one output and return the name of the last one."""
        if request.name == "logits":
            assert self.streams.classifier is not None
            return self.streams.classifier
        label = f"outputs.{request.label}"
        if "sign" in request.modifiers:
            x = self._value(request, f"{label}.value", WIDE)
            return self._add(label, Signs(self.shapes[x][-1]), x, (-(-self.shapes[x][-1] // 8),))
        if "l2" in request.modifiers:
            x = self._value(request, f"{label}.value", WIDE)
            return self._add(label, self._length_norm(self.shapes[x][-1], request.bits), x)
        return self._value(request, label, request.bits)

    def _length_norm(self, channels: int, bits: int | None) -> Leaf:
        """Return a leaf for y = x / |x|: RMS normalisation with weight 1 / sqrt(C) divides by the length of x."""
        leaf = LayerNorm(channels, 1e-24, center=False)  # eps only keeps the zero vector at 0
        device = next((p.device for node in self.streams.graph.nodes for p in node.leaf.parameters()), torch.device("cpu"))
        leaf.weight = nn.Parameter(torch.full((channels,), 1 / math.sqrt(channels), device=device))
        leaf.bias = nn.Parameter(torch.zeros(channels, device=device))
        return _as_output(leaf, bits, symmetric=True)

    def _value(self, request: Request, name: str, bits: int | None) -> str:
        """Append the nodes of a value without l2 and sign. bits: bits per code; None: as in the recipe"""
        if "i32" in request.modifiers:
            return self._accumulator(request, name)
        if request.name == "embedding":
            return self._embedding(name, bits)
        if request.layer is None:
            return self._after_last_norm(request.name, name, bits)
        stream = self.streams.layers[request.layer]
        if request.name == "mean":
            return self._mean(name, stream, bits or WIDE)
        if request.name == "tokens" and request.bits is None and "l2" not in request.modifiers:
            return self._patches(name, stream)  # the codes of the residual stream itself
        rows = self._select(request.name, f"{name}.selected", stream)
        return self._add(name, _as_output(Narrow(), bits or WIDE), rows)

    def _accumulator(self, request: Request, name: str) -> str:
        """Append a linear layer whose accumulators are the output."""
        source = self.streams.embedding
        node = None if request.name != "embedding" or source is None else self.streams.nodes[source]
        if node is None or not isinstance(node.leaf, Linear):
            raise FqvitError(f"output {request.label}: not from a linear layer, so it has no accumulator. Leave out i32.")
        leaf = copy.copy(node.leaf)
        leaf.role = "logits"
        return self._add(name, leaf, node.inputs[0], self.shapes[node.name])

    def _embedding(self, name: str, bits: int | None) -> str:
        """Append a copy of the nodes that compute the model's own pooled vector from the residual stream."""
        source = self.streams.embedding
        assert source is not None
        node = self.streams.nodes[source]
        before = self.streams.nodes.get(node.inputs[0])
        if isinstance(node.leaf, Take) and before is not None and isinstance(before.leaf, LayerNorm):
            return self._selected_norm(name, node, before, bits)
        if isinstance(node.leaf, COPIED):
            self.shapes[name] = self.shapes[source]
            self.added.append(Node(name, _as_output(copy.copy(node.leaf), bits), node.inputs, node.params))
            return name
        return self._add(name, _as_output(Narrow(), bits), source)

    def _selected_norm(self, name: str, take: Node, norm: Node, bits: int | None) -> str:
        """Append `take`'s selection, then a copy of `norm`; the model applies the norm first. Several tokens are joined."""
        assert isinstance(take.leaf, Take)
        index = take.leaf.index
        one = take.leaf.join and index.numel() == 1
        x = self._add(
            f"{name}.selected", Take(index.flatten(), join=one), norm.inputs[0], self._rows(norm.inputs[0], index.numel(), one)
        )
        if one:
            return self._add(name, _as_output(copy.copy(norm.leaf), bits), x)
        y = self._add(f"{name}.norm", _as_output(copy.copy(norm.leaf), bits), x)
        leaf = Take(torch.arange(index.numel()).view(index.shape), take.leaf.join)
        return self._add(name, leaf, y, self.shapes[take.name])

    def _rows(self, name: str, count: int, join: bool) -> tuple[int, ...]:
        channels = self.shapes[name][-1]
        return (channels,) if join else (count, channels)

    def _after_last_norm(self, kind: str, name: str, bits: int | None) -> str:
        """Append the class token, the mean or the patches after the last block, normalised as in the model."""
        stream, pooling = self.streams.layers[-1], self.streams.last_norm
        if kind == "mean":
            if pooling is None:
                return self._mean(name, stream, bits or WIDE)
            if pooling.first:
                normalised = self._add(f"{name}.norm", _as_output(copy.copy(pooling.norm.leaf), None), stream)
                return self._mean(name, normalised, bits)
            x = self._mean(f"{name}.mean", stream, WIDE)
            return self._add(name, _as_output(copy.copy(pooling.norm.leaf), bits), x)
        rows = self._select(kind, f"{name}.selected", stream)
        # A norm after pooling is for the pooled vector, not for each patch.
        if pooling is None or (kind == "tokens" and not pooling.first):
            return self._add(name, _as_output(Narrow(), bits or WIDE), rows)
        return self._add(name, _as_output(copy.copy(pooling.norm.leaf), bits), rows)

    def _select(self, kind: str, name: str, x: str) -> str:
        return self._class(name, x) if kind == "class" else self._patches(name, x)

    def _class(self, name: str, x: str) -> str:
        return self._add(name, Take(torch.tensor([0]), join=True), x, (self.shapes[x][-1],))

    def _patches(self, name: str, x: str) -> str:
        first, rows = self.streams.prefix, math.prod(self.shapes[x][:-1])
        return self._add(name, Take(torch.arange(first, rows)), x, (rows - first, self.shapes[x][-1]))

    def _mean(self, name: str, x: str, bits: int | None) -> str:
        skip = self.streams.prefix
        if len(self.shapes[x]) != 2:
            x, skip = self._patches(f"{name}.selected", x), 0
        return self._add(name, _as_output(Mean(skip), bits), x, (self.shapes[x][-1],))

    def _add(self, name: str, leaf: Leaf, x: str, shape: tuple[int, ...] | None = None) -> str:
        """Append a node and return its name. shape: shape of its output, by default that of its input"""
        self.shapes[name] = self.shapes[x] if shape is None else shape
        self.added.append(Node(name, leaf.eval(), (x,)))
        return name


def _as_output(leaf: Leaf, bits: int | None, symmetric: bool = False) -> Leaf:
    """Return the leaf with the role of an output."""
    leaf.role, leaf.bits, leaf.symmetric = "output", bits, symmetric
    return leaf
