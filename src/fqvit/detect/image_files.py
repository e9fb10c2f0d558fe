"""Read image files for a detector, one at a time in a fixed order.

Unreadable files are skipped and recorded; if more than 1 % of all files are unreadable, this is an error.
See also: data/images.py (batches of one size, for classifiers), images.py (the network's input).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from PIL import Image

from fqvit.data.images import UnreadableImage, check_not_too_many_skipped, decode_as, existing_folder, image_names, spread
from fqvit.data.preprocess import to_eight_bit, upright


def read_rgb(path: str | Path) -> Image.Image:
    """Decode an image to 8-bit RGB, upright and in memory; raises UnreadableImage."""
    return decode_as(_to_rgb, path, str(path))


def _to_rgb(image: Image.Image) -> Image.Image:
    return to_eight_bit(upright(image), "RGB").copy()


class ImageFiles:
    """A list of image files to iterate over. skipped: (name, reason) of each file that the latest pass could not read"""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.skipped: list[tuple[str, str]] = []

    @staticmethod
    def in_folder(folder: str | Path) -> ImageFiles:
        """List every image in the folder and its subfolders, sorted by name."""
        root = existing_folder(folder)
        return ImageFiles([root / name for name in image_names(root)])

    def __len__(self) -> int:
        return len(self.paths)

    def limit(self, count: int) -> ImageFiles:
        """Return at most `count` of the files, evenly spaced."""
        return ImageFiles([self.paths[i] for i in spread(len(self), count)])

    def digest(self) -> str:
        """Return a SHA-256 of the names and sizes of the files, without reading them."""
        marks = [[path.name, path.stat().st_size if path.exists() else -1] for path in self.paths]
        return hashlib.sha256(json.dumps(marks).encode()).hexdigest()

    def __iter__(self) -> Iterator[tuple[int, Image.Image]]:
        """Yield the index and the image of each readable file."""
        self.skipped.clear()
        yield from self.read(range(len(self)))

    def read(self, indices: Iterable[int]) -> Iterator[tuple[int, Image.Image]]:
        """Yield the files with these indices. Several calls make one pass: `skipped` accumulates their unreadable files."""
        for index in indices:
            try:
                image = read_rgb(self.paths[index])
            except UnreadableImage as error:
                self.skipped.append((error.name, error.reason))
                check_not_too_many_skipped(self.skipped, len(self))
                continue
            yield index, image


def expand_folders(given: Sequence[Path]) -> list[Path]:
    """Replace each folder by the images in it."""
    return [one for path in given for one in (ImageFiles.in_folder(path).paths if os.path.isdir(path) else [path])]
