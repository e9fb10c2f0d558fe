"""Cut calibration images into batches, shuffle them, and choose a random sample of them.

Batches and samples depend only on the sequence of images, not on how it is cut into arrays or distributed over workers.
See also: calibrate.py (images given as an iterable), distribute.py (images read by several workers).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError
from fqvit.quant.recipe import Recipe

Batch = TypeVar("Batch")


def rebatch(
    images: Iterable[NDArray[np.uint8]], shape: tuple[int, int, int], size: int, limit: int
) -> Iterator[NDArray[np.uint8]]:
    """Cut single images of `shape` [H, W, C] or batches [n, H, W, C] into batches of `size`, using at most `limit` images."""
    held: list[NDArray[np.uint8]] = []
    total = 0
    for item in images:
        if not isinstance(item, np.ndarray) or item.dtype != np.uint8 or item.shape[-3:] != shape or item.ndim not in (3, 4):
            found = f"{item.dtype} {list(item.shape)}" if isinstance(item, np.ndarray) else type(item).__name__
            raise FqvitError(f"calibration image: {found}, expected uint8 {list(shape)}. Use preprocess.apply on each image.")
        for image in item[None] if item.ndim == 3 else item:
            if total == limit:
                break
            held.append(image)
            total += 1
            if len(held) == size:
                yield np.stack(held)
                held = []
        if total == limit:
            break
    if held:
        yield np.stack(held)


def shuffle_batches(batches: Iterable[NDArray[np.uint8]], size: int, seed: int) -> Iterator[NDArray[np.uint8]]:
    """Shuffle all images of `batches` and cut them into batches of `size`. Their count and the seed determine the order."""
    images = [image for batch in batches for image in batch]
    order = np.random.default_rng(seed).permutation(len(images))
    for start in range(0, len(images), size):
        yield np.stack([images[i] for i in order[start : start + size]])


def mark_last(batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield each batch and whether it is the last one."""
    held = None
    for batch in batches:
        if held is not None:
            yield held, False
        held = batch
    if held is not None:
        yield held, True


class Reservoir:
    """Reservoir sampling: choose at most `size` items of a sequence of unknown length, each with the same probability.

    The generator has a fixed seed, so that the same length gives the same choice.
    """

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
        self.random = np.random.default_rng(0)

    def slot(self) -> int | None:
        """Return the slot 0 .. size-1 that the next item is put into, replacing an earlier item; None if it is not chosen."""
        self.seen += 1
        if self.seen <= self.size:
            return self.seen - 1
        slot = int(self.random.integers(self.seen))
        return slot if slot < self.size else None


class ImageSample(Reservoir):
    """A random sample of at most `size` of the images added."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.kept: dict[int, NDArray[Any]] = {}

    def add(self, batch: NDArray[Any]) -> None:
        """Add a batch [n, ...] of images, or of RoI features of a detector; the sample keeps some of them."""
        for image in batch:
            slot = self.slot()
            if slot is not None:
                self.kept[slot] = image.copy()  # a view would keep the whole batch in memory

    def images(self) -> NDArray[Any]:
        """Return the sample: [n, ...]"""
        return np.stack(list(self.kept.values()))


def sample_positions(total: int, size: int) -> list[int]:
    """Return the positions of the images that an ImageSample of `size` keeps of `total` images, in the order of the sample."""
    reservoir, kept = Reservoir(size), {}
    for position in range(total):
        slot = reservoir.slot()
        if slot is not None:
            kept[slot] = position
    return list(kept.values())


def sample_size(recipe: Recipe) -> int:
    """Return the number of images that a recipe reads again once ranges are known; 0 if it reads none again."""
    refined = recipe.rounding != "nearest" or recipe.intervals != "observed" or recipe.max_loss is not None
    return recipe.refine_images if refined or recipe.keys == "leveled" or recipe.values == "widened" else 0
