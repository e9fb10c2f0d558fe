"""Read images as batches of uint8 pixels, decoded by threads a few batches ahead.

Images are sorted by relative path and batches are cut by position, so the same images always give the same batches, and each
worker reads only its own. Unreadable images are skipped and listed in `skipped`; if more than 1 % of all images are
unreadable, this is an error.
See also: preprocess.py (transforms one image), shards.py and parquet.py (images in tar and Parquet files).
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fqvit.data.preprocess import Preprocess
from fqvit.distributed.workers import Workers, cores
from fqvit.errors import FqvitError

T = TypeVar("T")
MISSING = "no such file"
EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"})
THREADS = 4  # at most; fewer if workers share a machine
BATCHES_AHEAD = 2
UNREADABLE_SHARE = 0.01


@dataclass(frozen=True)
class Batch:
    """One batch. images: u8 [N, height, width, channels]; labels: i64 [N] class indices, None if unknown; paths: N names."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    paths: list[str]


class Source(ABC):
    """Images in a fixed order, read on demand.

    labels: class indices, None if unknown. skipped: (name, reason) of each image that the latest pass could not read.
    tolerated: number of unreadable images allowed even if it exceeds 1 %; for a small part of a large dataset.
    """

    def __init__(self, labels: Sequence[int] | None, preprocess: Preprocess) -> None:
        self.labels = None if labels is None else list(labels)
        self.preprocess = preprocess
        self.skipped: list[tuple[str, str]] = []
        self.tolerated = 0

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images, including unreadable ones."""

    @abstractmethod
    def take(self, indices: Sequence[int]) -> Self:
        """Select the images at these positions, in this order."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of an image for messages."""

    @abstractmethod
    def read(self, index: int) -> NDArray[np.uint8]:
        """Decode one image: u8 [height, width, channels]. Raises UnreadableImage. Called by several threads."""

    def limit(self, count: int) -> Self:
        """Select at most `count` images, evenly spaced: paths are sorted by class, so the first ones may share one class."""
        return self.take(spread(len(self), count))

    def batches(self, size: int = 16, share: range | None = None) -> Iterator[Batch]:
        """Read the images once. Batch k holds the readable ones of images k*size .. (k+1)*size - 1.

        share: the batches to read; None: all of them.
        """
        numbers = range(-(-len(self) // size)) if share is None else share
        ranges = (range(number * size, min((number + 1) * size, len(self))) for number in numbers)
        return (batch for batch in self.batches_of(ranges) if batch.paths)

    def batches_of(self, ranges: Iterable[range]) -> Iterator[Batch]:
        """Yield one batch per range of positions: the readable images among them, possibly none."""
        self.skipped.clear()
        for indices, decoded in decode_ahead(self.read, ranges):
            yield self._collect(indices, decoded)

    @abstractmethod
    def marks(self) -> Iterator[bytes]:
        """Yield bytes that identify the images: names and file sizes, or pixels."""

    def digest(self) -> str:
        """Return a SHA-256 of the labels and of `marks`, without reading image files."""
        digest = hashlib.sha256(f"{self.labels}\n".encode())
        for mark in self.marks():
            digest.update(mark + b"\n")
        return digest.hexdigest()

    def merge_skipped(self, workers: Workers) -> None:
        """Collect `skipped` of all workers after each has read its share. Raises FqvitError if there are too many."""
        parts = workers.gather(self.skipped)
        self.skipped = [(name, reason) for part in parts for name, reason in part]
        self.check_skipped(self.skipped)

    def settle(self, workers: Workers) -> None:
        """Deprecated: the name of `merge_skipped` in version 0.1.0."""
        warnings.warn("settle is now called merge_skipped", DeprecationWarning, stacklevel=2)
        self.merge_skipped(workers)

    def _collect(self, indices: range, decoded: list[Future[NDArray[np.uint8]]]) -> Batch:
        images, kept = [], []
        for index, future in zip(indices, decoded, strict=True):
            try:
                images.append(future.result())
                kept.append(index)
            except UnreadableImage as error:
                self.skipped.append((error.name, error.reason))
                self.check_skipped(self.skipped)
        shape = (0, self.preprocess.height, self.preprocess.width, self.preprocess.channels)
        pixels = np.stack(images) if images else np.zeros(shape, np.uint8)
        labels = None if self.labels is None else np.array([self.labels[i] for i in kept], np.int64)
        return Batch(pixels, labels, [self.name(i) for i in kept])

    def check_skipped(self, skipped: Sequence[tuple[str, str]]) -> None:
        """Raise FqvitError if `skipped` lists more unreadable images than this source allows."""
        if len(skipped) > self.tolerated:
            check_not_too_many_skipped(skipped, len(self))


def decode_ahead(read: Callable[[int], T], ranges: Iterable[range]) -> Iterator[tuple[range, list[Future[T]]]]:
    """Call read(index) in threads for the positions of each range, up to BATCHES_AHEAD ranges ahead of the caller."""
    pool = ThreadPoolExecutor(min(THREADS, cores()), thread_name_prefix="fqvit-decode")
    try:
        waiting: deque[tuple[range, list[Future[T]]]] = deque()
        remaining = iter(ranges)
        while True:
            while len(waiting) <= BATCHES_AHEAD and (indices := next(remaining, None)) is not None:
                waiting.append((indices, [pool.submit(read, index) for index in indices]))
            if not waiting:
                return
            yield waiting.popleft()
    finally:
        pool.shutdown(cancel_futures=True)


def check_not_too_many_skipped(skipped: Sequence[tuple[str, str]], total: int) -> None:
    """Raise FqvitError if more than 1 % of the images are unreadable.

    skipped: (name, reason) of each unreadable image so far. total: the number of all images, not only of those read so far;
    otherwise one unreadable image at the beginning would always be too many.
    """
    if len(skipped) > UNREADABLE_SHARE * total:
        name, reason = skipped[0]
        raise FqvitError(
            f"{name}: {reason}. {len(skipped)} of {total} images cannot be read, at most 1 % may be unreadable."
            " Repair or remove them."
        )


class ImageArray(Source):
    """Images in memory: u8 [N, height, width, channels]."""

    def __init__(self, pixels: NDArray[np.uint8], labels: Sequence[int] | None, preprocess: Preprocess) -> None:
        super().__init__(labels, preprocess)
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, indices: Sequence[int]) -> Self:
        labels = None if self.labels is None else [self.labels[i] for i in indices]
        return type(self)(self.pixels[list(indices)], labels, self.preprocess)

    def name(self, index: int) -> str:
        return f"image {index}"

    def read(self, index: int) -> NDArray[np.uint8]:
        image: NDArray[np.uint8] = self.pixels[index]
        return image

    def marks(self) -> Iterator[bytes]:
        yield self.pixels.tobytes()


class ImageFolder(Source):
    """Image files of a folder."""

    def __init__(self, paths: Sequence[Path], labels: Sequence[int] | None, preprocess: Preprocess) -> None:
        super().__init__(labels, preprocess)
        self.paths = list(paths)

    @classmethod
    def unlabelled(cls, folder: str | Path, preprocess: Preprocess) -> ImageFolder:
        """Find every image in the folder, at any depth."""
        root = existing_folder(folder)
        return cls([root / name for name in image_names(root)], None, preprocess)

    @classmethod
    def labelled(
        cls, folder: str | Path, preprocess: Preprocess, classes: Sequence[str] | int, ids: Sequence[str] = ()
    ) -> ImageFolder:
        """Find labelled images in one sub-folder per class.

        classes: the model's class names, or their number. ids: the class ids, if known. See `class_indices`.
        """
        root = existing_folder(folder)
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        names = image_names(root)
        loose = [name for name in names if "/" not in name]
        if not folders or len(loose) == len(names):
            raise FqvitError(f"{root}: no class sub-folders with images. Expected {root}/CLASS/image.jpg.")
        if loose:
            raise FqvitError(
                f"{root}: images outside the class sub-folders: {len(loose)} ({loose[0]} first). Move or remove them."
            )
        indices = class_indices(str(root), folders, classes, ids)
        return cls([root / name for name in names], [indices[name.split("/", 1)[0]] for name in names], preprocess)

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, indices: Sequence[int]) -> Self:
        labels = None if self.labels is None else [self.labels[i] for i in indices]
        return type(self)([self.paths[i] for i in indices], labels, self.preprocess)

    def name(self, index: int) -> str:
        return str(self.paths[index])

    def read(self, index: int) -> NDArray[np.uint8]:
        return read_image(self.paths[index], self.preprocess)

    def marks(self) -> Iterator[bytes]:
        root = os.path.commonpath([path.parent for path in self.paths])  # the same after the folder is moved
        for path in self.paths:
            size = path.stat().st_size if path.exists() else -1
            yield f"{os.path.relpath(path, root)}\0{size}".encode(errors="surrogateescape")


class UnreadableImage(FqvitError):
    """An image that cannot be decoded. A source skips a few of them."""

    def __init__(self, name: str, reason: str) -> None:
        remedy = "Check the path." if reason == MISSING else "Expected an image file; repair or remove it."
        super().__init__(f"{name}: {reason}. {remedy}")
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple[type[UnreadableImage], tuple[str, str]]:
        return UnreadableImage, (self.name, self.reason)  # so that it can be sent to another process


def read_image(path: str | Path, preprocess: Preprocess) -> NDArray[np.uint8]:
    """Read and preprocess one file: u8 [height, width, channels]. Raises UnreadableImage."""
    return decode(path, str(path), preprocess)


def decode(file: str | Path | IO[bytes], name: str, preprocess: Preprocess) -> NDArray[np.uint8]:
    """Decode and preprocess a path or an open file: u8 [height, width, channels]. name: for messages."""
    return decode_as(preprocess.apply, file, name)


def decode_as(make: Callable[[Image.Image], T], file: str | Path | IO[bytes], name: str) -> T:
    """Return make(image) for the image in a file. Raises UnreadableImage."""
    try:
        with Image.open(file) as image:
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and image.width * image.height > limit:
                raise UnreadableImage(name, f"{image.width} x {image.height} pixels, at most {limit} are allowed")
            return make(image)
    except (UnreadableImage, MemoryError):
        raise
    except FileNotFoundError as error:
        raise UnreadableImage(name, MISSING) from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(name, "not an image") from error
    except Exception as error:  # Pillow's decoders raise almost any exception for damaged files
        if isinstance(error, OSError) and error.strerror:  # from the operating system: a folder, no permission
            raise UnreadableImage(name, error.strerror.lower()) from error
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise UnreadableImage(name, f"cannot be decoded ({reason})") from error


def spread(total: int, count: int) -> Sequence[int]:
    """Return at most `count` evenly spaced positions of 0 .. total - 1."""
    if count < 1:
        raise FqvitError(f"image limit: {count}, expected at least 1.")
    return range(total) if count >= total else [i * total // count for i in range(count)]


def existing_folder(folder: str | Path) -> Path:
    """Return the path of a folder. Raises FqvitError if there is none."""
    root = Path(folder)
    if not root.exists():
        raise FqvitError(f"{root}: no such folder. Pass a folder of images.")
    if not root.is_dir():
        raise FqvitError(f"{root}: a file, expected a folder of images. Pass the folder that holds it.")
    return root


def image_names(root: Path) -> list[str]:
    """Return the relative paths of the images in a folder, sorted, with "/" as separator. Hidden files are skipped."""
    names: list[str] = []

    def visit(prefix: str, above: frozenset[str]) -> None:
        here = os.path.realpath(root / prefix)
        if here in above:  # a symbolic link to a parent folder
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
        raise FqvitError(f"{error.filename}: permission denied, expected a readable folder. Change its permissions.") from error
    if not names:
        kinds = " ".join(sorted(EXTENSIONS))
        raise FqvitError(f"{root}: no images found. Expected files ending in {kinds}.")
    return sorted(names)


def class_indices(
    where: str, folders: Sequence[str], classes: Sequence[str] | int, ids: Sequence[str] = (), what: str = "sub-folder"
) -> dict[str, int]:
    """Return {sub-folder: class index} by the first of these rules that applies to all folders:

    1. every folder is the id of one class, or every folder is the name of one class (ignoring case and punctuation);
    2. every folder is a class index, written as a number;
    3. there are as many folders as classes: the index is the position in the sorted list, as with ImageNet's wnids.

    folders: sorted. ids: in the order of the classes. With rules 1 and 2, some classes may have no folder.
    what: what the folders are called in an error message.
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

    # Folders 1, 10, 2, ... sort as text, so their positions are not the class indices that their names suggest.
    ambiguous = min(numbers) >= 0 and numbers != sorted(numbers)
    if len(folders) == count and not ambiguous:
        return {folder: rank for rank, folder in enumerate(folders)}

    kind, hint = ("id or name", "") if ids else ("name", ", or pass class ids (--classes with [id, name] pairs)")
    stray = next((folder for folder, *found in zip(folders, *named, strict=True) if found == [None, None]), folders[0])
    raise FqvitError(
        f"{where}: {len(folders)} class {what}s for a model of {count} classes, and '{stray}' is neither a class {kind} "
        f"nor a number below {count}. Use one {what} per class, or name them by class name or by number from 0{hint}."
    )


def names_to_indices(names: Sequence[str], classes: Sequence[str] | int, ids: Sequence[str] = ()) -> list[int] | None:
    """Return the class index of each name if all are ids, or all are names, of different classes; otherwise None."""
    for known in (ids, () if isinstance(classes, int) else classes):
        found = [index for index in _indices_of(names, known) if index is not None]
        if len(found) == len(set(found)) == len(names):
            return found
    return None


def _indices_of(folders: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Return the class that each folder names, or None if it names none or several."""
    indices: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        indices.setdefault(plain(name), []).append(index)
    found = [indices.get(plain(folder), []) for folder in folders]
    return [at[0] if len(at) == 1 else None for at in found]


def plain(name: str) -> str:
    """Normalize a class name, so that "T-shirt/top" equals the folder name "t_shirt_top"."""
    return re.sub(r"[\W_]+", " ", name.casefold()).strip()
