"""Rotate the channels of every head of Q and K by an orthogonal matrix R, which is folded into the weights.

    (R q) . (R k) = q . k
so the float model computes the same function. R is a Hadamard matrix: every rotated channel is a sum of all channels of the
head with equal weights and different signs. A few channels of Q and K are much larger than the others, and Q and K have one
scale each; after the rotation, all channels have similar ranges, so that the codes are finer. It costs nothing at run time.
See also: centering.py (finds the layers that compute Q, K and V together), calibration.py (applies the rotation).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Heads, Linear, Scores
from fqvit.quant.centering import KEY, key_layers
from fqvit.quant.recipe import Recipe
from fqvit.quant.splitting import weight_of, with_weight

QUERY = 0  # Q is part 0 of a joint layer


def rotate(graph: Graph, recipe: Recipe) -> Graph:
    """Return the graph with rotated heads, if the recipe has them. The leaves of the given graph are not modified."""
    if recipe.heads == "plain":
        return graph
    layers = {name: heads for name in key_layers(graph) if (heads := _heads(graph, name))}
    nodes = tuple(_rotated(node, layers[node.name]) if node.name in layers else node for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def _heads(graph: Graph, layer: str) -> int:
    """Return the number of heads of a layer in key_layers; 0 if its Q and K are read by anything but scores of both."""
    split = [node for node in graph.nodes if layer in node.inputs and isinstance(node.leaf, Heads)]
    queries = {node.name for node in split if isinstance(node.leaf, Heads) and node.leaf.part == QUERY}
    keys = {node.name for node in split if isinstance(node.leaf, Heads) and node.leaf.part == KEY}
    readers = [node for node in graph.nodes if (queries | keys) & set(node.inputs)]
    only_scores = all(
        isinstance(node.leaf, Scores) and node.inputs[0] in queries and node.inputs[1] in keys for node in readers
    )
    counts = {node.leaf.heads for node in split if isinstance(node.leaf, Heads) and node.leaf.part in (QUERY, KEY)}
    return counts.pop() if readers and only_scores and len(counts) == 1 and not queries & set(graph.outputs) else 0


def _rotated(node: Node, heads: int) -> Node:
    assert isinstance(node.leaf, Linear)
    weight, bias = weight_of(node), node.leaf.bias
    new_bias = None if bias is None else _rotate_rows(bias.detach()[:, None], heads)[:, 0]
    return dataclasses.replace(node, leaf=with_weight(node.leaf, _rotate_rows(weight.detach(), heads), new_bias))


def _rotate_rows(rows: Tensor, heads: int) -> Tensor:
    """Multiply the channels of every head of Q and K by R: rows [3 C, n] -> [3 C, n]; those of V do not change."""
    channels = len(rows) // 3
    parts = rows[: 2 * channels].reshape(2 * heads, channels // heads, -1)
    rotated = (rotation(channels // heads) @ parts.cpu().double()).reshape(2 * channels, -1)  # some devices have no float64
    return torch.cat([rotated.to(rows.dtype).to(rows.device), rows[2 * channels :]])


def rotation(size: int) -> Tensor:
    """Return R [size, size], float64: Hadamard matrices on the diagonal, of the largest power of two that divides the size."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while size % (2 * len(block)) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)]) / 2**0.5
    return torch.kron(torch.eye(size // len(block), dtype=torch.float64), block)
