"""Folders of images as fixed batches of uint8 pixels, decoded a little ahead of whoever consumes them.

Order is the sorted relative path and batches are cut by position, so the same folder always gives the same batches.
An unreadable image is skipped and remembered; more than 1 % of them stops the pass. It prints nothing: the command line
reports `.skipped`. What happens to one image is preprocess.py's business.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fqvit.errors import FqvitError
from fqvit.preprocess import Preprocess

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"})
THREADS = min(4, os.cpu_count() or 1)
BATCHES_AHEAD = 2
UNREADABLE_SHARE = 0.01


@dataclass(frozen=True)
class Batch:
    """images: u8 [N, height, width, channels]; labels: i64 [N] class indices, None in unlabelled folders; paths: N files."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    paths: list[str]


class ImageFolder:
    """The images of a folder. `skipped` lists (path, reason) of those the latest pass could not read."""

    def __init__(self, paths: Sequence[Path], labels: Sequence[int] | None, preprocess: Preprocess) -> None:
        self.paths = list(paths)
        self.labels = None if labels is None else list(labels)
        self.preprocess = preprocess
        self.skipped: list[tuple[str, str]] = []

    @classmethod
    def unlabelled(cls, folder: str | Path, preprocess: Preprocess) -> ImageFolder:
        """Every image under the folder, at any depth."""
        root = existing_folder(folder)
        return cls([root / name for name in image_names(root)], None, preprocess)

    @classmethod
    def labelled(
        cls, folder: str | Path, preprocess: Preprocess, classes: Sequence[str] | int, ids: Sequence[str] = ()
    ) -> ImageFolder:
        """A sub-folder a class; `classes` are the model's class names, or their number; `ids` theirs. See `class_indices`."""
        root = existing_folder(folder)
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        names = image_names(root)
        loose = [name for name in names if "/" not in name]
        if not folders or len(loose) == len(names):
            raise FqvitError(f"{root}: no class sub-folders with images. Expected {root}/CLASS/image.jpg.")
        if loose:
            raise FqvitError(
                f"{root}: {len(loose)} images outside the class sub-folders ({loose[0]} first). Move or remove them."
            )
        indices = class_indices(str(root), folders, classes, ids)
        return cls([root / name for name in names], [indices[name.split("/", 1)[0]] for name in names], preprocess)

    def limit(self, count: int) -> ImageFolder:
        """At most `count` images, spread evenly over the folder: paths sort by class, so the first ones would be one class."""
        if count < 1:
            raise FqvitError(f"image limit is {count}: expected at least 1.")
        total = len(self.paths)
        kept = range(total) if count >= total else [i * total // count for i in range(count)]
        labels = None if self.labels is None else [self.labels[i] for i in kept]
        return ImageFolder([self.paths[i] for i in kept], labels, self.preprocess)

    def __len__(self) -> int:
        """Images found, the unreadable ones included: what one pass sees."""
        return len(self.paths)

    def batches(self, size: int = 16) -> Iterator[Batch]:
        """One pass. Batch k holds the readable ones of images k*size .. (k+1)*size - 1."""
        self.skipped.clear()
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fqvit-decode")
        try:
            waiting: deque[tuple[int, list[Future[NDArray[np.uint8]]]]] = deque()
            starts = iter(range(0, len(self.paths), size))
            while True:
                while len(waiting) <= BATCHES_AHEAD and (start := next(starts, None)) is not None:
                    chosen = self.paths[start : start + size]
                    waiting.append((start, [pool.submit(read_image, path, self.preprocess) for path in chosen]))
                if not waiting:
                    return
                batch = self._collect(*waiting.popleft())
                if batch.paths:
                    yield batch
        finally:
            pool.shutdown(cancel_futures=True)

    def _collect(self, start: int, decoded: list[Future[NDArray[np.uint8]]]) -> Batch:
        images, kept = [], []
        for index, future in enumerate(decoded, start):
            try:
                images.append(future.result())
                kept.append(index)
            except UnreadableImage as error:
                self.skipped.append((str(self.paths[index]), error.reason))
                self._refuse_too_many_skipped()
        shape = (0, self.preprocess.height, self.preprocess.width, self.preprocess.channels)
        pixels = np.stack(images) if images else np.zeros(shape, np.uint8)
        labels = None if self.labels is None else np.array([self.labels[i] for i in kept], np.int64)
        return Batch(pixels, labels, [str(self.paths[i]) for i in kept])

    def _refuse_too_many_skipped(self) -> None:
        # Against all images of the pass, not those seen so far, or one bad image at the front would always be too many.
        if len(self.skipped) > UNREADABLE_SHARE * len(self.paths):
            path, reason = self.skipped[0]
            raise FqvitError(
                f"{path}: {reason}. {len(self.skipped)} of {len(self.paths)} images cannot be read, "
                f"at most 1 % may be. Repair or remove them."
            )


class UnreadableImage(FqvitError):
    """One image that cannot be decoded; a folder skips a few of these."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}. Expected an image file; repair or remove it.")
        self.reason = reason


def read_image(path: str | Path, preprocess: Preprocess) -> NDArray[np.uint8]:
    """One file as the model sees it, u8 [height, width, channels]; UnreadableImage if that cannot be done."""
    path = Path(path)
    try:
        with Image.open(path) as image:
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and image.width * image.height > limit:
                raise UnreadableImage(path, f"{image.width} x {image.height} pixels is over the limit of {limit}")
            return preprocess.apply(image)
    except (UnreadableImage, MemoryError):
        raise
    except FileNotFoundError as error:
        raise UnreadableImage(path, "no such file") from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(path, "not an image") from error
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UnreadableImage(path, f"cannot be decoded ({reason})") from error


def existing_folder(folder: str | Path) -> Path:
    root = Path(folder)
    if not root.exists():
        raise FqvitError(f"{root}: no such folder. Pass a folder of images.")
    if not root.is_dir():
        raise FqvitError(f"{root}: a file, expected a folder of images. Pass the folder that holds it.")
    return root


def image_names(root: Path) -> list[str]:
    """Relative paths ("/" between parts) of the images under root, sorted; hidden files and folders are left out."""
    names: list[str] = []

    def visit(prefix: str, above: frozenset[str]) -> None:
        here = os.path.realpath(root / prefix)
        if here in above:  # a link back to a folder that we are in
            return
        for entry in os.scandir(root / prefix):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                visit(f"{prefix}{entry.name}/", above | {here})
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                names.append(prefix + entry.name)

    try:
        visit("", frozenset())
    except PermissionError as error:
        raise FqvitError(f"{error.filename}: this folder may not be read. Change its permissions.") from error
    if not names:
        kinds = " ".join(sorted(EXTENSIONS))
        raise FqvitError(f"{root}: no images found. Expected files ending in {kinds}.")
    return sorted(names)


def class_indices(where: str, folders: Sequence[str], classes: Sequence[str] | int, ids: Sequence[str] = ()) -> dict[str, int]:
    """{sub-folder: class index}. The first of these rules that fits all of the sorted folders:

    1. each is the id of one class, or else each is the name of one (case and punctuation do not matter);
    2. each is a class index written as a number;
    3. there are as many as classes: the index is the folder's rank, as ImageNet's wnids have it.

    `ids` are in the order of the classes; by rules 1 and 2 some classes may have no folder.
    """
    count = classes if isinstance(classes, int) else len(classes)
    known = (ids, () if isinstance(classes, int) else classes)
    named = [_indices_of(folders, names) for names in known]
    for found in named:
        if len({index for index in found if index is not None}) == len(folders):
            return {folder: index for folder, index in zip(folders, found, strict=True) if index is not None}

    numbers = [int(folder) if folder.isascii() and folder.isdigit() else -1 for folder in folders]
    if all(0 <= number < count for number in numbers):
        return dict(zip(folders, numbers, strict=True))

    # Folders 1, 10, 2, ... would be ranked as text, which nobody means.
    ambiguous = min(numbers) >= 0 and numbers != sorted(numbers)
    if len(folders) == count and not ambiguous:
        return {folder: rank for rank, folder in enumerate(folders)}

    kind, hint = ("id or name", "") if ids else ("name", ", or pass class ids (--classes with [id, name] pairs)")
    stray = next((folder for folder, *found in zip(folders, *named, strict=True) if found == [None, None]), folders[0])
    raise FqvitError(
        f"{where}: {len(folders)} class sub-folders for a model of {count} classes, and '{stray}' is neither a class {kind} "
        f"nor a number below {count}. Have one sub-folder a class, or name them by class name or by number from 0{hint}."
    )


def _indices_of(folders: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Which class each folder names; None where it names none or several."""
    indices: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        indices.setdefault(plain(name), []).append(index)
    found = [indices.get(plain(folder), []) for folder in folders]
    return [at[0] if len(at) == 1 else None for at in found]


def plain(name: str) -> str:
    """A class name as a folder might spell it: "T-shirt/top" and "t_shirt_top" are one."""
    return re.sub(r"[\W_]+", " ", name.casefold()).strip()
