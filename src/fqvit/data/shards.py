"""Images inside tar files ("shards", as WebDataset writes them), read where they lie: nothing is unpacked.

One look at the headers of all shards gives an index, about 30 bytes an image; workers share that look. A picture is then one
read at a known place, so that limits, shuffling and dealing work as with folders. Shards come in sorted order, members in that
of their shard. A sample is a picture and what has the same name up to its first dot, side by side: NAME.jpg, NAME.cls (its
class index), NAME.json ({"label": index}). Without these the folder of a member is its class. Neighbours: tars.py, images.py.
"""

from __future__ import annotations

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

LARGEST_IMAGE = 64 << 20  # bytes; ImageNet's largest has 15 MB
LARGEST_LABEL = 1 << 16
MOST_SHARDS = 100_000
ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")  # all but the first are refused, by name
NO_FILE = -1  # as the size of a link or device

Ints = NDArray[np.int64]


class TarShards(Source):
    """at: i64 [N, 3], the shard, offset and size of each picture."""

    def __init__(self, paths: Sequence[Path], at: Ints, labels: Sequence[int] | None, preprocess: Preprocess) -> None:
        super().__init__(labels, preprocess)
        self.paths, self.at = list(paths), at

    @classmethod
    def unlabelled(cls, place: str | Path, preprocess: Preprocess, workers: Workers = SINGLE_PROCESS) -> TarShards:
        """Every picture of the shards: a tar file, a pattern such as train-{0000..1023}.tar, or a folder of tar files.

        workers: those who share the look at headers; every one of them must call this.
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
        """With the class of each; `classes` and `ids` as images.class_indices takes them."""
        paths = shard_paths(Path(place))
        found = _index(Path(place), paths, True, workers)
        count = classes if isinstance(classes, int) else len(classes)
        indices = class_indices(str(place), found.folders, classes, ids) if found.folders else {}
        by_folder = np.array([indices[name] for name in found.folders], np.int64)
        labels, named = found.labels.copy(), found.labels < 0
        labels[named] = by_folder[-1 - labels[named]]
        for wrong in np.flatnonzero(labels >= count)[:1]:
            name = cls(paths, found.at, None, preprocess).name(int(wrong))
            raise FqvitError(f"{name}: has class {labels[wrong]}, expected below {count}. Are these shards of another dataset?")
        return cls(paths, found.at, labels.tolist(), preprocess)

    def __len__(self) -> int:
        return len(self.at)

    def take(self, places: Sequence[int]) -> Self:
        labels = None if self.labels is None else [self.labels[i] for i in places]
        return type(self)(self.paths, self.at[np.asarray(places, np.int64)], labels, self.preprocess)

    def name(self, place: int) -> str:
        """The header says it again, so that the index need not."""
        shard, offset, _ = self.at[place].tolist()
        try:
            with self.paths[shard].open("rb") as file:
                file.seek(offset - BLOCK)
                return self._name(shard, offset, file.read(BLOCK))
        except OSError:
            return self._name(shard, offset, b"")

    def read(self, place: int) -> NDArray[np.uint8]:
        shard, offset, size = self.at[place].tolist()
        if size == NO_FILE:
            raise UnreadableImage(self.name(place), "a link or device, not a file")
        if size > LARGEST_IMAGE:
            raise UnreadableImage(self.name(place), f"claims {size} bytes, over the limit of {LARGEST_IMAGE}")
        try:
            with self.paths[shard].open("rb") as file:
                file.seek(offset - BLOCK)
                name = self._name(shard, offset, file.read(BLOCK))
                return decode(io.BytesIO(file.read(size)), name, self.preprocess)
        except OSError as error:
            raise UnreadableImage(self.name(place), str(error.strerror or error).lower()) from error

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
    """Whether this names tar files: one, several with braces, or a folder of them."""
    if place.is_dir():
        return any(name.endswith(ENDINGS) and not name.startswith(".") for name in os.listdir(place))
    return place.name.endswith(ENDINGS)


def shard_paths(place: Path) -> list[Path]:
    """The tar files of a folder, of a pattern such as val-{000..063}.tar, or the one that is named; sorted."""
    if place.is_dir():
        names = [name for name in os.listdir(place) if not name.startswith(".")]
        paths = [place / name for name in names if name.endswith(ENDINGS)]
        other = next((name for name in sorted(names) if os.path.splitext(name)[1].lower() in EXTENSIONS), None)
        if other is not None:
            raise FqvitError(f"{place}: has tar shards and images ({other}). Pass a folder of one or the other.")
    else:
        paths = [place] if place.exists() else [Path(text) for text in expanded(str(place))]
    for path in sorted(paths):
        if not path.name.endswith(".tar"):
            raise FqvitError(f"{path}: compressed shards are not read. Unpack it to .tar once: pictures gain nothing from it.")
        if not path.is_file():
            raise FqvitError(f"{path}: no such file. Pass a tar file, a pattern such as val-{{000..063}}.tar, or a folder.")
    return sorted(set(paths))


def expanded(pattern: str) -> list[str]:
    """Braces as a shell has them: {000..063} counts, {a,b} lists."""
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
            # Before anything is spelled out: {0..999999999} would fill the memory.
            choice = [f"{n:0{width}}" for n in range(first, min(last, first + MOST_SHARDS) + 1)]
        else:
            choice = piece.split(",")
        total *= len(choice)
        if total > MOST_SHARDS:
            raise FqvitError(f"{pattern}: names over {MOST_SHARDS} files. Join shards to fewer.")
        choices.append(choice)
    return ["".join(parts) for parts in itertools.product(*choices)]


@dataclass
class _Index:
    """at: i64 [N, 3]; labels: i64 [N], class indices, or -1 - the number of a folder."""

    at: Ints
    labels: Ints
    folders: list[str]


def _index(place: Path, paths: list[Path], labels: bool, workers: Workers) -> _Index:
    """Each worker looks at some shards, and all get the whole."""
    mine = workers.share(len(paths))
    look = _Look(labels)
    for number in mine:
        look.shard(number, paths[number])
    parts = workers.gather([np.array(look.at).reshape(-1, 3), np.array(look.labels), list(look.folders)])
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
    pictures: list[Member] = field(default_factory=list)
    label: int | None = None
    label_file: str = ""


class _Look:
    """What one worker finds in its shards."""

    def __init__(self, labels: bool) -> None:
        self.wanted = labels
        self.at, self.labels = array("q"), array("q")  # not lists, which would take ten times the memory
        self.folders: dict[str, int] = {}

    def shard(self, number: int, path: Path) -> None:
        seen: set[str] = set()
        for sample in _samples(path, self.wanted):
            for picture in sample.pictures:
                if picture.name in seen:
                    raise FqvitError(f"{path}: {picture.name} is there twice. Pack the shard again.")
                seen.add(picture.name)
                self.at.extend((number, picture.offset, picture.size if picture.regular else NO_FILE))
                if self.wanted:
                    self.labels.append(self._label(path, sample, picture))
            if sample.label is None:
                continue
            if len(sample.pictures) > 1:
                names = " and ".join(picture.name for picture in sample.pictures[:2])
                raise FqvitError(f"{path}: {names} share the label {sample.label_file}. Expected one picture a sample.")
            if not sample.pictures:
                raise FqvitError(
                    f"{path}: {sample.label_file} has no picture beside it. Pack the members of a sample one after the other."
                )

    def _label(self, path: Path, sample: _Sample, picture: Member) -> int:
        if sample.label is not None:
            return sample.label
        folder = picture.name.rpartition("/")[0].rpartition("/")[2]
        if not folder:
            raise FqvitError(
                f"{path}: {picture.name} has no label. Expected {sample.key}.cls beside it, or CLASS/{picture.name}."
            )
        return -1 - self.folders.setdefault(folder, len(self.folders))


def _samples(path: Path, labels: bool) -> Iterator[_Sample]:
    sample = _Sample("")
    with path.open("rb") as file:
        for member in members(path):
            name = _plain(path, member.name)
            if any(part.startswith(".") for part in name.split("/")):  # hidden, as in folders
                continue
            folder, slash, base = name.rpartition("/")
            stem, _, kind = base.partition(".")
            key = folder + slash + stem
            if key != sample.key:
                yield sample
                sample = _Sample(key)
            if f".{kind.lower().rpartition('.')[2]}" in EXTENSIONS:
                sample.pictures.append(member._replace(name=name))
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
        raise FqvitError(f"{path}: member {name!r} leads out of its folder. No tool packs pictures so; do not trust this file.")
    return name


def _text(path: Path, file: io.BufferedReader, member: Member) -> bytes:
    if not member.regular or member.size > LARGEST_LABEL:
        raise FqvitError(f"{path}: {member.name} is no small file, expected a label. Pack the shard again.")
    file.seek(member.offset)
    return file.read(member.size)


def _class(path: Path, name: str, text: bytes) -> int:
    digits = text.strip()
    if not digits.isdigit() or len(digits) > 9:
        raise FqvitError(f"{path}: {name} has {text[:20]!r}, expected a class index. Pack the shard again.")
    return int(digits)


def _json_label(path: Path, name: str, text: bytes) -> int | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise FqvitError(f"{path}: {name} is not JSON. Pack the shard again.") from None
    label = found.get("label") if isinstance(found, dict) else None
    if label is None:
        return None
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < 10**9:
        raise FqvitError(f"{path}: {name} has label {str(label)[:20]!r}, expected a class index. Pack the shard again.")
    return label
