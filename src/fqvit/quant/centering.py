"""Center the keys of attention: subtract one constant per channel of K, through the bias of the layer that computes K.

A softmax does not change if the same number is added to a whole row of scores, and q . (k - c) = q . k - q . c differs from
q . k by the same number for every key. The float model therefore computes the same function with any c. Keys often share a
large common part. Without it, K and the scores span a much smaller range, so their codes are much finer.

c is the mean key over an image that has the mean color everywhere. It depends only on the model, so no calibration image is
needed before the ranges are observed.
See also: calibrate.py (computes c), leveling.py (improves it), calibration.py (stores it).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Heads, Linear, Scores

KEY = 1  # Q, K and V are the parts 0, 1 and 2 of a joint layer


def key_layers(graph: Graph) -> list[str]:
    """Return the linear layers that compute Q, K and V together and whose keys are read only by scores.

    Keys of a separate layer are not found, nor are rotated keys: rotation does not commute with subtracting a constant.
    """
    found = []
    for node in graph.nodes:
        if isinstance(node.leaf, Linear) and node.leaf.role == "qkv" and node.name not in graph.outputs:
            readers = [reader for reader in graph.nodes if node.name in reader.inputs]
            keys = {reader.name for reader in readers if isinstance(reader.leaf, Heads) and reader.leaf.part == KEY}
            if keys and all(isinstance(reader.leaf, Heads) for reader in readers) and _only_keys(graph, keys):
                found.append(node.name)
    return found


def _only_keys(graph: Graph, names: set[str]) -> bool:
    """Return whether these sites are read as the second operand of scores, and as nothing else."""
    readers = [node for node in graph.nodes if names & set(node.inputs)]
    return not names & set(graph.outputs) and all(
        isinstance(node.leaf, Scores) and node.inputs[0] not in names and node.inputs[1] in names for node in readers
    )


@torch.no_grad()
def key_centers(graph: Graph, preprocess: Preprocess, where: torch.device | None = None) -> dict[str, NDArray[np.float64]]:
    """Return the mean key per channel, float64 [C], of every layer in `key_layers`, for an image of the mean color."""
    layers = set(key_layers(graph))
    centers: dict[str, NDArray[np.float64]] = {}

    def visit(node: Node, y: Tensor) -> Tensor:
        if node.name in layers:
            key = y.chunk(3, -1)[KEY]
            centers[node.name] = key.reshape(-1, key.shape[-1]).cpu().double().mean(0).numpy()
        return y

    graph.run_all(torch.zeros(1, preprocess.channels, preprocess.height, preprocess.width, device=where), visit)
    return centers


def center(graph: Graph, centers: Mapping[str, NDArray[np.float64]]) -> Graph:
    """Return the graph with these constants subtracted from its keys. The leaves of the given graph are not modified."""
    if not centers:
        return graph
    strays = set(centers) - set(key_layers(graph))
    if strays:
        raise FqvitError(f"{min(strays)}: calibrated with centered keys, but this layer has none. Calibrate this model again.")
    nodes = tuple(_centered(node, centers[node.name]) if node.name in centers else node for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def _centered(node: Node, constant: NDArray[np.float64]) -> Node:
    leaf = copy.copy(node.leaf)
    assert isinstance(leaf, Linear)
    outputs = leaf.weight.shape[0]
    if len(constant) * 3 != outputs:
        raise FqvitError(
            f"{node.name}: centers of {len(constant)} key channels, expected {outputs // 3}. Calibrate this model again."
        )
    bias = torch.zeros(outputs, dtype=torch.float64) if leaf.bias is None else leaf.bias.detach().double().cpu()
    bias = bias.clone()
    bias[outputs // 3 : 2 * outputs // 3] -= torch.from_numpy(constant)
    # A shallow copy shares the weight; the dictionary of parameters is copied, so that only the copy gets the new bias.
    leaf._parameters = dict(leaf._parameters)
    leaf.bias = nn.Parameter(bias.to(leaf.weight.device, leaf.weight.dtype), requires_grad=False)
    return dataclasses.replace(node, leaf=leaf)
