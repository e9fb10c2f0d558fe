"""List the layers of any float model with their cost, from its graph, for counting bit operations. Needs torch.

See also: bitops.py (counts bit operations, and lists the layers of a ViT or Swin from its config, without torch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fqvit.models import general, layers
from fqvit.models.graph import Node, trace
from fqvit.models.load import FloatModel
from fqvit.quant.fit import site_shapes
from fqvit.study.bitops import Layer


def layers_of_model(model: FloatModel) -> list[Layer]:
    """List all counted layers in model order.

    Products of two activations (gates), and of activations with the tables of rotary embeddings, count like attention scores.
    """
    graph = trace(model.module)
    shapes = site_shapes(graph, model.preprocess)
    return [layer for node in graph.nodes if (layer := _layer(node, shapes)) is not None]


def _layer(node: Node, shapes: Mapping[str, tuple[int, ...]]) -> Layer | None:
    leaf, shape = node.leaf, shapes[node.name]
    size = math.prod(shape)
    if isinstance(leaf, layers.Linear):
        return Layer(node.name, "linear", macs=size * leaf.weight.shape[1])
    if isinstance(leaf, layers.Patches | general.Stem):
        return Layer(node.name, "patch", macs=size * leaf.weight[0].numel())
    if isinstance(leaf, general.Depthwise):
        return Layer(node.name, "linear", macs=size * leaf.weight.shape[0])
    if isinstance(leaf, layers.Scores):
        return Layer(node.name, "scores", macs=size * shapes[node.inputs[0]][-1])
    if isinstance(leaf, layers.Context):
        return Layer(node.name, "context", macs=size * shapes[node.inputs[0]][-1])
    if isinstance(leaf, general.Multiply | general.Rotary):
        return Layer(node.name, "scores", macs=size * (2 if isinstance(leaf, general.Rotary) else 1))
    if isinstance(leaf, layers.Softmax):
        return Layer(node.name, "softmax", elements=size)
    if isinstance(leaf, layers.LayerNorm):
        return Layer(node.name, "norm", elements=size)
    if isinstance(leaf, layers.Gelu | general.Activation):
        return Layer(node.name, "gelu", elements=size)
    return None
