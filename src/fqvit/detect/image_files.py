"""Image files for detectors, one at a time in a fixed order. Unreadable ones are skipped and remembered, 1 % of them at most.

Neighbours: fqvit.data.images (batches of one size, for classifiers), images.py (what the network sees of an image).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from fqvit.data.images import UnreadableImage, decode_as, existing_folder, image_names, refuse_too_many, spread
from fqvit.data.preprocess import to_eight_bit, upright


def read_rgb(path: str | Path) -> Image.Image:
    """Upright, 8-bit RGB, in memory; UnreadableImage if that cannot be done."""
    return decode_as(_whole, path, str(path))


def _whole(image: Image.Image) -> Image.Image:
    return to_eight_bit(upright(image), "RGB").copy()


class ImageFiles:
    """skipped: (name, reason) of those that the latest pass could not read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.skipped: list[tuple[str, str]] = []

    @staticmethod
    def in_folder(folder: str | Path) -> ImageFiles:
        """Every image under the folder, at any depth, sorted by name."""
        root = existing_folder(folder)
        return ImageFiles([root / name for name in image_names(root)])

    def __len__(self) -> int:
        return len(self.paths)

    def limit(self, count: int) -> ImageFiles:
        """At most `count`, spread evenly."""
        return ImageFiles([self.paths[i] for i in spread(len(self), count)])

    def __iter__(self) -> Iterator[tuple[int, Image.Image]]:
        """Each readable picture and its place."""
        self.skipped.clear()
        for place, path in enumerate(self.paths):
            try:
                image = read_rgb(path)
            except UnreadableImage as error:
                self.skipped.append((error.name, error.reason))
                refuse_too_many(self.skipped, len(self))
                continue
            yield place, image


def expand_folders(given: Sequence[Path]) -> list[Path]:
    """Files as they are, folders as the images in them."""
    return [one for path in given for one in (ImageFiles.in_folder(path).paths if os.path.isdir(path) else [path])]
