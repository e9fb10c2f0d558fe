"""Fuse each ReLU into the linear layer or convolution before it.

A fused layer requantizes its accumulator straight to the codes of the ReLU. Their zero point is 0, so clamping to the first
code computes the ReLU. Calibration plans no site for a fused layer; simulation and lowering make it write the ReLU's site.
"""

from __future__ import annotations

from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Linear
from fqvit.models.maps import Conv2d, Deconv, Relu


def fuse_relus(graph: Graph) -> dict[str, str]:
    """Return {layer: ReLU} for every linear layer or convolution that a ReLU can be fused into.

    The ReLU must be the only reader of the layer, and the layer must not be an output of the graph.
    """
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    linear = [node.name for node in graph.nodes if isinstance(node.leaf, Linear | Conv2d | Deconv)]
    return {
        name: readers[name][0].name
        for name in linear
        if name not in graph.outputs and len(readers[name]) == 1 and isinstance(readers[name][0].leaf, Relu)
    }
