"""Compute attention maps: the last attention layer of a float model, per patch, in float and integer formats. Needs torch.

A map needs the grid of the patches and the number of tokens before them. They come from the config of a ViT or Swin, or from
the leaf modules of a captured graph. See also: collect.py (counts of attention values), maps.py (draws the maps), gather.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.models import layers
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.graph import Captured, Graph, Node
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.quant.fit import site_shapes
from fqvit.quant.qparams import QParams, affine, log2, relative
from fqvit.report.data import AttentionMaps, QuantizedMap
from fqvit.report.tokens import patch_grid, prefix_tokens

WIDTHS = (8, 6, 4)  # bit widths of the quantized maps
NO_MAPS = "attention maps: left out, because this model has no attention, or the grid of its patches is not known."


@dataclass(frozen=True)
class AttentionLayout:
    """How the attention values of `site` become a map of patches.

    kind: see AttentionMaps   values: [1, H, T, T] or [1, W, H, T, T] -> one value per patch
    """

    site: str
    kind: str
    grid: tuple[int, int]
    values: Callable[[Tensor], Tensor]

    def as_map(self, p: Tensor) -> NDArray[np.float32]:
        patches: NDArray[np.float32] = self.values(p).reshape(self.grid).float().numpy()
        return patches


def attention_layout(model: FloatModel, graph: Graph) -> AttentionLayout | None:
    """Return the layout of the last attention layer; None if the model has none, or if its grid is not known."""
    last = next((node for node in reversed(graph.nodes) if isinstance(node.leaf, layers.Softmax)), None)
    if last is None:
        return None
    if isinstance(model.module, Captured):
        return _captured(model, graph, last)
    config = model.module.config
    if isinstance(config, SwinConfig):
        to_tokens = model.module.get_submodule(last.name.rpartition(".")[0]).tokens
        assert isinstance(to_tokens, layers.Take)
        index = to_tokens.index
        grid = config.grid(int(last.name.split(".")[1]))
        # Compute one value per position of each window, then put the values in the order of the tokens.
        return AttentionLayout(last.name, "received", grid, lambda p: (p[0].mean((1, 2)) * p.shape[-1]).flatten()[index])
    assert isinstance(config, ViTConfig)
    grid = (config.image[0] // config.patch, config.image[1] // config.patch)
    return _tokens(last.name, grid, config.prefix, "class token")


def _captured(model: FloatModel, graph: Graph, last: Node) -> AttentionLayout | None:
    """Return the layout of a captured model with attention between all tokens, [H, T, T]: a prefix, then a grid of patches.

    The grid is assumed to have the aspect ratio of the images.
    """
    shape = site_shapes(graph.ending_at(last.name), model.preprocess)[last.name]
    if len(shape) != 3 or shape[1] != shape[2]:
        return None
    prefix = prefix_tokens(graph)
    grid = patch_grid(shape[2], prefix, model.preprocess)
    if grid is None:
        return None
    return _tokens(last.name, grid, prefix, "first token")


def _tokens(site: str, grid: tuple[int, int], prefix: int, kind: str) -> AttentionLayout:
    """Return the layout for attention [1, H, T, T]: attention of the first token, or received attention if there is no prefix.

    Both are averaged over heads. Received attention is also averaged over queries and multiplied by T, so that its mean is 1.
    """
    if prefix:
        return AttentionLayout(site, kind, grid, lambda p: p[0].mean(0)[0, prefix:])
    return AttentionLayout(site, "received", grid, lambda p: p[0].mean((0, 1)) * p.shape[-1])


@torch.no_grad()
def attention_maps(model: FloatModel, graph: Graph, layout: AttentionLayout, pixels: NDArray[np.uint8]) -> AttentionMaps:
    """Return the maps of the last attention layer for one image u8 [H, W, C].

    Formats of p: uniform, code = round((2^b - 1) * p); log2, value 2^-code with 0 for the last code; relative with 4 bits, as
    in the default recipe. Masked positions are 0 in all of them.
    """
    p = graph.ending_at(layout.site).run(normalise(pixels[None], model.preprocess))
    formats: list[tuple[str, QParams]] = []
    formats += [("uniform", affine(0, 1, bits)) for bits in WIDTHS]
    formats += [("log2", log2(bits, zero_code=True)) for bits in WIDTHS]
    formats.append(("relative", relative(4, p.shape[-1])))
    stored = []
    for method, q in formats:
        found = q.decode(q.encode(p))
        noise = float((found - p).double().square().sum())
        decibels = 10 * math.log10(float(p.double().square().sum()) / noise) if noise else math.inf
        stored.append(QuantizedMap(method, q.bits, layout.as_map(found), decibels))
    return AttentionMaps(layout.site, layout.kind, pixels, layout.as_map(p), stored)
