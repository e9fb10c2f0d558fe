"""Run the float model and its quantized version in lockstep, node by node, on the same images.

Methods that choose weights or scales node by node use this: compensate.py, bitsplit.py, similarity.py, reparameterize.py and
hessian.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fqvit.data.preprocess import Preprocess
from fqvit.ir.liveness import last_uses
from fqvit.models import layers, maps
from fqvit.models.graph import IMAGES, Graph, Node
from fqvit.models.pixels import normalise
from fqvit.quant.fit import site_shapes
from fqvit.quant.weights import LinearLeaf, pixel_linear, weight_rows
from fqvit.system.progress import Progress

MAX_ELEMENTS = 2**27  # per site, over all images: limits memory use to a few times 512 MB
BATCH = 16
CONV_ROWS = 2048  # positions of a batch whose 3x3 neighbourhoods are used

# One list of batches per input of a node.
InputBatches = Sequence[Sequence[Tensor]]


def fitting_images(graph: Graph, preprocess: Preprocess, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the first images, as many as memory allows."""
    largest = max(math.prod(shape) for shape in site_shapes(graph, preprocess).values())
    return images[: max(1, MAX_ELEMENTS // largest)]


def run_in_lockstep(
    graph: Graph,
    preprocess: Preprocess,
    images: NDArray[np.uint8],
    quantize_node: Callable[[Node, InputBatches, InputBatches], list[Tensor]],
    progress: Progress | None,
    label: str,
) -> None:
    """Call quantize_node(node, float inputs, quantized inputs) for every node, in graph order.

    quantize_node returns the node's outputs in the quantized network, one tensor per batch.
    images: uint8 [n, H, W, C]. If one site would exceed MAX_ELEMENTS, only the first images are used.
    """
    images = fitting_images(graph, preprocess, images)
    batches = [normalise(images[i : i + BATCH], preprocess) for i in range(0, len(images), BATCH)]
    run_batches_in_lockstep(graph, batches, batches, quantize_node, progress, label)


def run_batches_in_lockstep(
    graph: Graph,
    float_inputs: Sequence[Tensor],
    quantized_inputs: Sequence[Tensor],
    quantize_node: Callable[[Node, InputBatches, InputBatches], list[Tensor]],
    progress: Progress | None,
    label: str,
) -> None:
    """Like run_in_lockstep, with batches of the inputs of both networks, which differ if the input itself is quantized."""
    exact: dict[str, list[Tensor]] = {IMAGES: list(float_inputs)}
    quantized: dict[str, list[Tensor]] = {IMAGES: list(quantized_inputs)}
    last_use = last_uses(node.inputs for node in graph.nodes)
    nodes = graph.nodes if progress is None else progress(graph.nodes, len(graph.nodes), label)
    for i, node in enumerate(nodes):
        inputs = [exact[name] for name in node.inputs]
        quantized[node.name] = quantize_node(node, inputs, [quantized[name] for name in node.inputs])
        exact[node.name] = [node.leaf(*xs, *node.params) for xs in zip(*inputs, strict=True)]
        for name in set(node.inputs):
            if last_use[name] == i:
                del exact[name], quantized[name]


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer, convolution or patch embedding as y = x @ weight.T + bias for rows x.

    Rows are the inputs of a linear layer, the 3x3 neighbourhoods of a convolution, or (pixel - zero) / 255 of the patches.
    weight: float64 [O, K]   bias: float64 [O]
    """

    leaf: LinearLeaf | layers.Patches
    preprocess: Preprocess
    weight: NDArray[np.float64]
    bias: NDArray[np.float64]
    zero: int = 0

    @staticmethod
    def of(node: Node, preprocess: Preprocess) -> LinearLayer:
        leaf = node.leaf
        assert isinstance(leaf, LinearLeaf | layers.Patches)
        if not isinstance(leaf, layers.Patches):
            weight, own = weight_rows(leaf)
            return LinearLayer(leaf, preprocess, weight, np.zeros(len(weight)) if own is None else own)
        weight, bias = (part.detach().cpu().double().numpy() for part in (leaf.weight, leaf.bias))
        return LinearLayer(leaf, preprocess, *pixel_linear(weight, bias, preprocess))

    def rows(self, x: Tensor) -> Tensor:
        """Reshape the node's input x to rows [N, T, K], with all tokens or patches of an image in axis 1.

        A convolution has nine times as many values in its rows as in its input, so only some positions become rows.
        """
        if isinstance(self.leaf, maps.Conv2d):
            return _neighbourhoods(x)
        if isinstance(self.leaf, layers.Linear | maps.Deconv):
            return x.reshape(len(x), -1, x.shape[-1])
        p, patch = self.preprocess, self.leaf.patch
        mean, std = torch.tensor(p.mean)[:, None, None], torch.tensor(p.std)[:, None, None]
        codes = ((x * std + mean) * 255).round() - self.zero
        patches = F.unfold(codes, patch, stride=patch).reshape(len(x), p.channels, patch**2, -1)
        return patches.permute(0, 3, 2, 1).flatten(2) / 255


def _neighbourhoods(x: Tensor) -> Tensor:
    """Return the 3x3 neighbourhoods of evenly spaced positions, in the order of weight_rows: [N, H, W, C] -> [N, T, 9 C]."""
    count, height, width, channels = x.shape
    # An odd step does not divide the width, a power of two in most detectors: all columns are used.
    step = max(1, count * height * width // CONV_ROWS) | 1
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    parts = [
        padded[:, a : a + height, b : b + width].reshape(count, -1, channels)[:, ::step] for a in range(3) for b in range(3)
    ]
    return torch.cat(parts, -1)
