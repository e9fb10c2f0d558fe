"""Fuse each ReLU into the linear map or convolution before it.

A fused map requantizes its accumulator straight to the codes of the ReLU. Their zero point is 0, so that clamping to the first
code is the ReLU. Calibration then plans no site for the map, simulation and lowering make it write the ReLU's site.
"""

from __future__ import annotations

from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Linear
from fqvit.models.maps import Conv2d, Deconv, Relu


def fuse_relus(graph: Graph) -> dict[str, str]:
    """Return {map: ReLU} for every linear map or convolution that a ReLU can be fused into.

    The ReLU must be the only reader of the map, and the map must not be an output of the graph.
    """
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    maps = [node.name for node in graph.nodes if isinstance(node.leaf, Linear | Conv2d | Deconv)]
    return {
        name: readers[name][0].name
        for name in maps
        if name not in graph.outputs and len(readers[name]) == 1 and isinstance(readers[name][0].leaf, Relu)
    }
