"""Show the patch tokens of an image as colours: their first three principal components, in float and in integers.

Tokens are scaled to unit length, because in some models a few are far longer than the others. The projection is fitted to the
float tokens of the image and applied to its float and integer tokens, so that equal tokens have equal colours.
See also: attention.py (maps of attention), embedding_plots.py (draws the colours), evaluate/compare.py (computes the tokens).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fqvit.data.preprocess import Preprocess
from fqvit.evaluate.similarity import Vectors, cosines
from fqvit.ir.program import Program
from fqvit.models import layers
from fqvit.models.graph import Graph

ROLES = ("residual", "norm")  # roles of token sites, best first: the last norm may clip patches that no output uses
FEWEST = 4  # minimum number of patches: fewer make no picture
EDGES = (0.01, 0.99)  # quantiles of a component that become the darkest and the brightest value


@dataclass(frozen=True)
class TokenLayout:
    """Where the patch tokens are: `site`, after `prefix` other tokens, in a grid of rows and columns."""

    site: str
    prefix: int
    grid: tuple[int, int]


@dataclass(frozen=True)
class TokenColours:
    """The patch tokens of one image as colours: u8 [rows, columns, 3], in float and in integers.

    pixels: u8 [H, W, C]   cosines: f64 [rows, columns], between the float and the integer token of each patch
    explained: share of the variance of the float tokens that the three components explain
    """

    path: str
    pixels: NDArray[np.uint8]
    float_colours: NDArray[np.uint8]
    integer_colours: NDArray[np.uint8]
    cosines: NDArray[np.float64]
    explained: float


def patch_grid(tokens: int, prefix: int, preprocess: Preprocess) -> tuple[int, int] | None:
    """Return rows and columns of the tokens after `prefix`; None if no grid has the aspect ratio of the images."""
    patches, height, width = tokens - prefix, preprocess.height, preprocess.width
    rows = math.isqrt(patches * height // width) if patches > 0 else 0
    if rows == 0 or patches % rows or abs(rows / height * width - patches // rows) >= 1:
        return None
    return rows, patches // rows


def prefix_tokens(graph: Graph) -> int:
    """Return the number of tokens before the patches: class token and registers."""
    embed = next((node for node in graph.nodes if isinstance(node.leaf, layers.Embed)), None)
    return 0 if embed is None else int(embed.params[0].shape[1])


def token_layout(
    program: Program, graph: Graph, shapes: Mapping[str, Sequence[int]], preprocess: Preprocess
) -> TokenLayout | None:
    """Choose the tokens to show: those that the program outputs, or else those of the last site that has a grid of patches."""
    outputs = zip(program.header.outputs, graph.outputs, strict=True)
    sites = program.header.sites
    names = [node for output, node in outputs if output.kind == "tokens"]
    for role in ROLES:
        names += [node.name for node in reversed(graph.nodes) if node.name in sites and sites[node.name].role == role]
    known = prefix_tokens(graph)
    for name in names:
        if len(shapes[name]) != 2:
            continue
        for prefix in (known, 0):
            grid = patch_grid(shapes[name][0], prefix, preprocess)
            if grid is not None and math.prod(grid) >= FEWEST:
                return TokenLayout(name, prefix, grid)
    return None


def token_colours(
    layout: TokenLayout, path: str, pixels: NDArray[np.uint8], floats: Vectors, integers: Vectors
) -> TokenColours:
    """Project the tokens of one image to colours. floats, integers: [T, C], including the tokens before the patches."""
    exact, found = (_unit(tokens[layout.prefix :].astype(np.float64)) for tokens in (floats, integers))
    middle = exact.mean(0)
    _, lengths, directions = np.linalg.svd(exact - middle, full_matrices=False)
    axes = np.zeros((3, exact.shape[1]))
    axes[: len(directions[:3])] = directions[:3]
    # The sign of a component is arbitrary: make its largest element positive.
    axes *= np.where(np.take_along_axis(axes, np.abs(axes).argmax(1)[:, None], 1) < 0, -1, 1)
    projected = (exact - middle) @ axes.T
    low, high = np.quantile(projected, EDGES, axis=0)
    width = np.where(high > low, high - low, 1)

    def coloured(values: NDArray[np.float64]) -> NDArray[np.uint8]:
        scaled = np.clip((values - low) / width, 0, 1)
        colours: NDArray[np.uint8] = np.round(255 * scaled).astype(np.uint8).reshape(*layout.grid, 3)
        return colours

    squares = lengths**2
    explained = float(squares[:3].sum() / squares.sum()) if squares.sum() > 0 else 1.0
    return TokenColours(
        path=path,
        pixels=pixels,
        float_colours=coloured(projected),
        integer_colours=coloured((found - middle) @ axes.T),
        cosines=cosines(exact, found).reshape(layout.grid),
        explained=explained,
    )


def _unit(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    unit: NDArray[np.float64] = tokens / np.maximum(np.linalg.norm(tokens, axis=-1, keepdims=True), 1e-300)
    return unit
