"""Adjust observed ranges before scales are computed: level the scores of attention, widen the ranges of V.

See also: leveling.py and values.py (the methods), calibrate.py and detect/calibrate.py (the callers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fqvit.data.preprocess import Preprocess
from fqvit.models.graph import Graph
from fqvit.quant.leveling import level_keys
from fqvit.quant.observers import Observer
from fqvit.quant.recipe import Recipe
from fqvit.quant.values import widen_values

IMAGES = 128  # use at most this many images, evenly spaced; V and keys need no more

Centers = Mapping[str, NDArray[np.float64]]  # constants subtracted from keys, by layer


class Observed(Protocol):
    """A site with its observers, one per group of channels."""

    parts: list[Observer]


def adjust_ranges(
    graph: Graph,
    preprocess: Preprocess,
    recipe: Recipe,
    observers: Sequence[Mapping[str, Observed]],
    centers: Centers,
    images: NDArray[np.uint8],
    where: torch.device,
) -> Centers:
    """Run the methods that need observed ranges and adjust them: level keys (leveling.py), widen values (values.py).

    observers: one mapping {site: observer} per recipe   images: uint8 [n, H, W, C]
    Returns the constants to subtract from keys.
    """
    count = min(len(images), IMAGES)
    images = images[np.arange(count) * len(images) // count]
    parts = [{name: site.parts for name, site in observed.items()} for observed in observers]
    if recipe.keys == "leveled":
        found = level_keys(graph, preprocess, parts, images, where)
        centers = {name: constant + found.get(name, 0.0) for name, constant in centers.items()}
    if recipe.values == "widened":
        widen_values(graph, preprocess, parts, images, where)
    return centers
