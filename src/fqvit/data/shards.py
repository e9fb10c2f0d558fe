"""Read images from tar shards, as WebDataset writes them, without unpacking.

The headers of all shards are read once into an index of at most 32 bytes per image; workers share this task. Reading an
image then takes one read at a known offset, so limits, shuffling and assignment to workers work as with folders. Shards are
sorted by path; members keep their order. A sample is an image and the members next to it with the same name up to the first
dot: NAME.jpg, NAME.cls (class index), NAME.json ({"label": index}). Without a label, the folder of the image is its class.
See also: tars.py, images.py.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fqvit.data.images import EXTENSIONS, Source, UnreadableImage, class_indices, decode
from fqvit.data.preprocess import Preprocess
from fqvit.data.tars import BLOCK, Member, members
from fqvit.distributed.workers import SINGLE_PROCESS, Workers
from fqvit.errors import FqvitError

LARGEST_IMAGE = 64 << 20  # bytes; the largest image of ImageNet has 15 MB
LARGEST_LABEL = 1 << 16
MOST_SHARDS = 100_000
ENDINGS = (
    ".tar",
    ".tar.gz",
    ".tgz",
    ".tar.bz2",
    ".tar.xz",
    ".tar.zst",
)  # all but .tar are rejected with a message
NO_FILE = -1  # stored in the index as the size of a link or device

Ints = NDArray[np.int64]


class TarShards(Source):
    """Images in tar files. at: i64 [N, 3], the shard, offset and size of each image."""

    def __init__(self, paths: Sequence[Path], at: Ints, labels: Sequence[int] | None, preprocess: Preprocess) -> None:
        super().__init__(labels, preprocess)
        self.paths, self.at = list(paths), at

    @classmethod
    def unlabelled(cls, place: str | Path, preprocess: Preprocess, workers: Workers = SINGLE_PROCESS) -> TarShards:
        """Find every image in a tar file, a pattern such as train-{0000..1023}.tar, or a folder of tar files.

        workers: share the reading of headers; every worker must make this call.
        """
        paths = shard_paths(Path(place))
        return cls(paths, _index(Path(place), paths, False, workers).at, None, preprocess)

    @classmethod
    def labelled(
        cls,
        place: str | Path,
        preprocess: Preprocess,
        classes: Sequence[str] | int,
        ids: Sequence[str] = (),
        workers: Workers = SINGLE_PROCESS,
    ) -> TarShards:
        """Find labelled images. classes, ids: as in images.class_indices."""
        paths = shard_paths(Path(place))
        found = _index(Path(place), paths, True, workers)
        count = classes if isinstance(classes, int) else len(classes)
        indices = class_indices(str(place), found.folders, classes, ids) if found.folders else {}
        by_folder = np.array([indices[name] for name in found.folders], np.int64)
        labels, named = found.labels.copy(), found.labels < 0
        labels[named] = by_folder[-1 - labels[named]]
        for wrong in np.flatnonzero(labels >= count)[:1]:
            name = cls(paths, found.at, None, preprocess).name(int(wrong))
            raise FqvitError(f"{name}: class {labels[wrong]}, expected less than {count}. Pass shards of the model's dataset.")
        return cls(paths, found.at, labels.tolist(), preprocess)

    def __len__(self) -> int:
        return len(self.at)

    def take(self, indices: Sequence[int]) -> Self:
        labels = None if self.labels is None else [self.labels[i] for i in indices]
        return type(self)(self.paths, self.at[np.asarray(indices, np.int64)], labels, self.preprocess)

    def name(self, index: int) -> str:
        """Return SHARD/MEMBER. The member's name is read from its header, to keep the index small."""
        shard, offset, _ = self.at[index].tolist()
        try:
            with self.paths[shard].open("rb") as file:
                file.seek(offset - BLOCK)
                return self._name(shard, offset, file.read(BLOCK))
        except OSError:
            return self._name(shard, offset, b"")

    def read(self, index: int) -> NDArray[np.uint8]:
        shard, offset, size = self.at[index].tolist()
        if size == NO_FILE:
            raise UnreadableImage(self.name(index), "a link or device, not a file")
        if size > LARGEST_IMAGE:
            raise UnreadableImage(self.name(index), f"{size} bytes, at most {LARGEST_IMAGE} are allowed")
        try:
            with self.paths[shard].open("rb") as file:
                file.seek(offset - BLOCK)
                name = self._name(shard, offset, file.read(BLOCK))
                return decode(io.BytesIO(file.read(size)), name, self.preprocess)
        except OSError as error:
            raise UnreadableImage(self.name(index), str(error.strerror or error).lower()) from error

    def marks(self) -> Iterator[bytes]:
        yield "\n".join(path.name for path in self.paths).encode(errors="surrogateescape")
        yield self.at.tobytes()

    def _name(self, shard: int, offset: int, header: bytes) -> str:
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "replace").name
        except tarfile.HeaderError:
            member = f"byte {offset}"
        return f"{self.paths[shard]}/{member}"


def are_shards(place: Path) -> bool:
    """Return whether a path names tar files: one, a pattern with braces, or a folder of them."""
    if place.is_dir():
        return any(name.endswith(ENDINGS) and not name.startswith(".") for name in os.listdir(place))
    return place.name.endswith(ENDINGS)


def shard_paths(place: Path) -> list[Path]:
    """Return the tar files of a folder, of a pattern such as val-{000..063}.tar, or of one path; sorted."""
    if place.is_dir():
        names = [name for name in os.listdir(place) if not name.startswith(".")]
        paths = [place / name for name in names if name.endswith(ENDINGS)]
        other = next((name for name in sorted(names) if os.path.splitext(name)[1].lower() in EXTENSIONS), None)
        if other is not None:
            raise FqvitError(f"{place}: contains both tar shards and images ({other}). Pass a folder with only one of them.")
    else:
        paths = [place] if place.exists() else [Path(text) for text in expanded(str(place))]
    for path in sorted(paths):
        if not path.name.endswith(".tar"):
            raise FqvitError(f"{path}: a compressed shard, expected .tar. Decompress it; compression saves little on images.")
        if not path.is_file():
            raise FqvitError(f"{path}: no such file. Pass a tar file, a pattern such as val-{{000..063}}.tar, or a folder.")
    return sorted(set(paths))


def expanded(pattern: str) -> list[str]:
    """Expand braces as a shell does: {000..063} counts, {a,b} lists."""
    pieces = re.split(r"\{([^{}]*)\}", pattern)
    choices: list[Sequence[str]] = []
    total = 1
    for i, piece in enumerate(pieces):
        counted = re.fullmatch(r"([0-9]{1,9})\.\.([0-9]{1,9})", piece)
        if i % 2 == 0:
            choice: Sequence[str] = [piece]
        elif counted:
            first, last = int(counted[1]), int(counted[2])
            width = max(map(len, counted.groups())) if counted[1].startswith("0") or counted[2].startswith("0") else 0
            # Limit before expanding: {0..999999999} would exhaust the memory.
            choice = [f"{n:0{width}}" for n in range(first, min(last, first + MOST_SHARDS) + 1)]
        else:
            choice = piece.split(",")
        total *= len(choice)
        if total > MOST_SHARDS:
            raise FqvitError(f"{pattern}: more than {MOST_SHARDS} files. Merge shards into fewer files.")
        choices.append(choice)
    return ["".join(parts) for parts in itertools.product(*choices)]


@dataclass
class _Index:
    """The index of all shards.

    at: i64 [N, 3], as in TarShards. labels: i64 [N], a class index, or -1 - f for the class folder folders[f].
    """

    at: Ints
    labels: Ints
    folders: list[str]


def _index(place: Path, paths: list[Path], labels: bool, workers: Workers) -> _Index:
    """Read the headers of this worker's shards, and return the index of all shards."""
    names = hashlib.sha256("\n".join(path.name for path in paths).encode(errors="surrogateescape")).hexdigest()[:8]
    workers.agree(str(place), f"{len(paths)} shards (names {names})", "Every machine needs the same files.")
    mine = workers.share(len(paths))
    reader = _HeaderReader(labels)
    for number in mine:
        reader.shard(number, paths[number])
    parts = workers.gather([np.array(reader.at).reshape(-1, 3), np.array(reader.labels), list(reader.folders)])
    folders = sorted({name for _, _, names in parts for name in names})
    rank = {name: i for i, name in enumerate(folders)}
    found = []
    for _, values, names in parts:
        moved = np.array([-1 - rank[name] for name in names], np.int64)
        values = values.copy()
        values[values < 0] = moved[-1 - values[values < 0]]
        found.append(values)
    everything = np.concatenate([part[0] for part in parts])
    if not len(everything):
        kinds = " ".join(sorted(EXTENSIONS))
        raise FqvitError(f"{place}: no images in {len(paths)} tar files. Expected members ending in {kinds}.")
    return _Index(everything, np.concatenate(found), folders)


@dataclass
class _Sample:
    key: str
    images: list[Member] = field(default_factory=list)
    label: int | None = None
    label_file: str = ""


class _HeaderReader:
    """Build the index of one worker's shards."""

    def __init__(self, labels: bool) -> None:
        self.wanted = labels
        self.at, self.labels = array("q"), array("q")  # arrays take a fifth of the memory of lists
        self.folders: dict[str, int] = {}

    def shard(self, number: int, path: Path) -> None:
        seen: set[str] = set()
        for sample in _samples(path, self.wanted):
            for image in sample.images:
                if image.name in seen:
                    raise FqvitError(f"{path}: duplicate member {image.name}. Pack the shard again.")
                seen.add(image.name)
                self.at.extend((number, image.offset, image.size if image.regular else NO_FILE))
                if self.wanted:
                    self.labels.append(self._label(path, sample, image))
            if sample.label is None:
                continue
            if len(sample.images) > 1:
                names = " and ".join(image.name for image in sample.images[:2])
                raise FqvitError(f"{path}: {names} share the label {sample.label_file}, expected one image per sample.")
            if not sample.images:
                raise FqvitError(
                    f"{path}: {sample.label_file} has no image next to it. Pack the members of a sample one after the other."
                )

    def _label(self, path: Path, sample: _Sample, image: Member) -> int:
        if sample.label is not None:
            return sample.label
        folder = image.name.rpartition("/")[0].rpartition("/")[2]
        if not folder:
            raise FqvitError(f"{path}: {image.name} has no label, expected {sample.key}.cls next to it or CLASS/{image.name}.")
        return -1 - self.folders.setdefault(folder, len(self.folders))


def _samples(path: Path, labels: bool) -> Iterator[_Sample]:
    sample = _Sample("")
    with path.open("rb") as file:
        for member in members(path):
            name = _plain(path, member.name)
            if any(part.startswith(".") for part in name.split("/")):  # skip hidden files, as in folders
                continue
            folder, slash, base = name.rpartition("/")
            stem, _, kind = base.partition(".")
            key = folder + slash + stem
            if key != sample.key:
                yield sample
                sample = _Sample(key)
            if f".{kind.lower().rpartition('.')[2]}" in EXTENSIONS:
                sample.images.append(member._replace(name=name))
            elif labels and kind == "cls":
                sample.label, sample.label_file = _class(path, name, _text(path, file, member)), name
            elif labels and kind == "json" and sample.label is None:
                found = _json_label(path, name, _text(path, file, member))
                if found is not None:
                    sample.label, sample.label_file = found, name
    yield sample


def _plain(path: Path, name: str) -> str:
    while name.startswith("./"):
        name = name[2:]
    if name.startswith("/") or ".." in name.split("/"):
        raise FqvitError(f"{path}: member {name!r} points outside the archive. Do not trust this file.")
    return name


def _text(path: Path, file: io.BufferedReader, member: Member) -> bytes:
    if not member.regular or member.size > LARGEST_LABEL:
        raise FqvitError(f"{path}: {member.name} is not a small regular file, expected a label. Pack the shard again.")
    file.seek(member.offset)
    return file.read(member.size)


def _class(path: Path, name: str, text: bytes) -> int:
    digits = text.strip()
    if not digits.isdigit() or len(digits) > 9:
        raise FqvitError(f"{path}: {name} contains {text[:20]!r}, expected a class index. Pack the shard again.")
    return int(digits)


def _json_label(path: Path, name: str, text: bytes) -> int | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise FqvitError(f"{path}: {name} is not valid JSON. Pack the shard again.") from None
    label = found.get("label") if isinstance(found, dict) else None
    if label is None:
        return None
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < 10**9:
        raise FqvitError(f"{path}: {name} has label {str(label)[:20]!r}, expected a class index. Pack the shard again.")
    return label
