"""Measure how much each token of each layer influences the outputs of the float model.

An error at one output of a linear layer changes the outputs of the model in proportion to the gradient. The weight of a
position is the mean square of this gradient over images and channels: in the last block of a model whose output is the class
token, only that token matters. The gradients are those of random projections of all outputs: every row of an output (such as a
patch token) is first divided by its norm, and all outputs of the model have equal weight. The weights of a layer have mean 1.
They are at least EQUAL, so that statistics over tokens have enough samples even if only one token of an image matters.
See also: methods/compensate.py (rounds weights for a small weighted error).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.data.preprocess import Preprocess
from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Linear, Patches
from fqvit.models.pixels import normalise

IMAGES = 16  # compute the gradients of at most this many images, evenly spaced,
SHARE = 8  # and of every SHARE-th image if there are few
PROJECTIONS = 2  # random projections per batch
BATCH = 4
SEED = 0
EQUAL = 0.1  # share of the total weight that is distributed equally over all positions


def token_weights(graph: Graph, preprocess: Preprocess, images: NDArray[np.uint8]) -> dict[str, Tensor]:
    """Return the weight of each position of the outputs [N, ..., C] of linear layers and patch embeddings: {layer: [...]}.

    Empty if no output has a gradient.
    """
    count = min(IMAGES, -(-len(images) // SHARE))
    chosen = images[np.arange(count) * len(images) // count]
    generator = torch.Generator().manual_seed(SEED)
    squares: dict[str, Tensor] = {}
    with torch.enable_grad():
        for first in range(0, len(chosen), BATCH):
            outputs: dict[str, Tensor] = {}

            def visit(node: Node, y: Tensor, outputs: dict[str, Tensor] = outputs) -> Tensor:
                if isinstance(node.leaf, Linear | Patches):
                    y = y if y.requires_grad else y.detach().requires_grad_()
                    outputs[node.name] = y
                return y

            results = graph.run_all(normalise(chosen[first : first + BATCH], preprocess), visit)
            results = tuple(y for y in results if y.requires_grad)  # sign bits have no gradient
            if not results:
                return {}
            for _ in range(PROJECTIONS):
                _add_squares(
                    squares,
                    outputs,
                    torch.autograd.grad(
                        _project(results, generator), list(outputs.values()), allow_unused=True, retain_graph=True
                    ),
                )
    used = {name: square for name, square in squares.items() if float(square.mean()) > 0}
    return {name: EQUAL + (1 - EQUAL) * square / square.mean() for name, square in used.items()}


def _project(results: Iterable[Tensor], generator: torch.Generator) -> Tensor:
    """Return the sum of random projections of all outputs, whose rows have norm 1. Each output has the same variance."""
    total = torch.zeros(())
    for y in results:
        rows = torch.nn.functional.normalize(y, dim=-1)
        noise = torch.randn(y.shape, generator=generator)
        total = total + (rows * noise).sum() / (rows.numel() / len(y) / y.shape[-1]) ** 0.5
    return total


def _add_squares(squares: dict[str, Tensor], outputs: dict[str, Tensor], gradients: Iterable[Tensor | None]) -> None:
    for name, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None:
            square = gradient.double().square().mean(-1).sum(0)
            squares[name] = squares[name] + square if name in squares else square
