"""Read images from Parquet files, as Hugging Face datasets write them. Needs pyarrow.

The images are one column of bytes, or of structs with `bytes` and `path`. Labels are a column `label` of class indices or
names. Besides labels, only the number of rows of each row group is kept in memory, and rows are read in order, a few pages at
a time, so memory hardly grows with the number of images or the size of row groups. See also: images.py, shards.py (tar files).
"""

from __future__ import annotations

import io
import json
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fqvit.data.images import EXTENSIONS, Source, UnreadableImage, class_indices, decode, names_to_indices
from fqvit.data.preprocess import Preprocess
from fqvit.data.shards import LARGEST_IMAGE, expanded
from fqvit.errors import FqvitError

ENDING = ".parquet"
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes")
NAME_COLUMNS = ("path", "file_name", "filename", "name", "__key__")
LABEL_COLUMNS = ("label", "labels", "class", "cls")
ROWS = 16  # read at a time
KEPT = 4  # groups of ROWS rows that stay in memory, because threads ask for rows slightly out of order
OPEN_FILES = 2
DAMAGED = "The file is damaged; copy it again."


@dataclass(frozen=True)
class ParquetFile:
    """A file and what its footer says.

    image, names: the columns of the images and of their names, COLUMN.FIELD inside a struct; names is "" if there is none
    groups: the number of rows of each row group   mark: a text that identifies the images, see Source.marks
    """

    path: Path
    image: str
    names: str
    groups: tuple[int, ...]
    mark: str


class ParquetImages(Source):
    """Images in Parquet files. rows: positions of the chosen images among all rows; None: all of them."""

    def __init__(
        self,
        files: Sequence[ParquetFile],
        labels: Sequence[int] | None,
        preprocess: Preprocess,
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(labels, preprocess)
        self.files, self.rows = list(files), rows
        self._starts = np.cumsum([0, *(sum(file.groups) for file in files)])
        self._images, self._names = _Readers(), _Readers()

    @classmethod
    def unlabelled(cls, place: str | Path, preprocess: Preprocess) -> ParquetImages:
        """Find the images of a Parquet file, of a pattern such as train-{000..063}.parquet, or of a folder of such files."""
        return cls(_files(Path(place)), None, preprocess)

    @classmethod
    def labelled(
        cls, place: str | Path, preprocess: Preprocess, classes: Sequence[str] | int, ids: Sequence[str] = ()
    ) -> ParquetImages:
        """Find labelled images. classes, ids: as in images.class_indices."""
        files = _files(Path(place))
        return cls(files, _labels(Path(place), files, classes, ids), preprocess)

    def __len__(self) -> int:
        return int(self._starts[-1]) if self.rows is None else len(self.rows)

    def take(self, indices: Sequence[int]) -> Self:
        rows = np.asarray(indices, np.int64)
        labels = None if self.labels is None else [self.labels[i] for i in indices]
        return type(self)(self.files, labels, self.preprocess, rows if self.rows is None else self.rows[rows])

    def name(self, index: int) -> str:
        """Return FILE/NAME, or FILE/ROW if the file has no names."""
        file, row = self._place(index)
        name = self._names.value(file, file.names, row) if file.names else None
        return f"{file.path}/{row if name is None or not str(name).strip() else name}"

    def read(self, index: int) -> NDArray[np.uint8]:
        file, row = self._place(index)
        content = self._images.value(file, file.image, row)
        if content is None:
            raise UnreadableImage(self.name(index), "an empty cell, expected the bytes of an image")
        if len(content) > LARGEST_IMAGE:
            raise UnreadableImage(self.name(index), f"{len(content)} bytes, at most {LARGEST_IMAGE} are allowed")
        try:
            return decode(io.BytesIO(content), "", self.preprocess)
        except UnreadableImage as error:
            raise UnreadableImage(self.name(index), error.reason) from None

    def marks(self) -> Iterator[bytes]:
        yield from (file.mark.encode(errors="surrogateescape") for file in self.files)
        if self.rows is not None:
            yield self.rows.tobytes()

    def _place(self, index: int) -> tuple[ParquetFile, int]:
        row = index if self.rows is None else int(self.rows[index])
        number = int(np.searchsorted(self._starts, row, "right")) - 1
        return self.files[number], row - int(self._starts[number])


class _Readers:
    """One reader per file, for the most recently used files. Several threads may share this object."""

    def __init__(self) -> None:
        self._readers: OrderedDict[Path, _Reader] = OrderedDict()
        self._lock = threading.Lock()

    def value(self, file: ParquetFile, column: str, row: int) -> Any:
        with self._lock:
            if file.path not in self._readers:
                self._readers[file.path] = _Reader(file, column)
            self._readers.move_to_end(file.path)
            while len(self._readers) > OPEN_FILES:
                self._readers.popitem(last=False)[1].close()
            return self._readers[file.path].value(row)


class _Reader:
    """One column of a file, read in order from the start of a row group. A jump to a much earlier row restarts at its group."""

    def __init__(self, file: ParquetFile, column: str) -> None:
        self._file, self._column = file, column
        self._opened = _open(file.path)
        self._starts = np.cumsum([0, *file.groups])
        self._window: deque[tuple[int, Any]] = deque()  # (row of the first value, values)
        self._next = -1  # the first row that was not read yet; -1: nothing was read
        self._batches: Iterator[Any] = iter(())

    def value(self, row: int) -> Any:
        group = int(np.searchsorted(self._starts, row, "right")) - 1
        before = not self._window or row < self._window[0][0]
        if before or self._next < self._starts[group]:
            self._start_at(group)
        while row >= self._next:
            self._read_some(row)
        first, values = next(pair for pair in reversed(self._window) if pair[0] <= row)
        return values[row - first].as_py()

    def close(self) -> None:
        self._opened.close()

    def _start_at(self, group: int) -> None:
        groups = list(range(group, len(self._file.groups)))
        self._window.clear()
        self._next = int(self._starts[group])
        self._batches = self._opened.iter_batches(ROWS, groups, [self._column], use_threads=False)

    def _read_some(self, row: int) -> None:
        try:
            values = next(self._batches).column(0)
            for part in self._column.split(".")[1:]:
                values = values.field(part)
        except Exception as error:  # pyarrow raises many kinds of exceptions for damaged pages
            raise FqvitError(f"{self._file.path}: row {row} cannot be read ({_reason(error)}). {DAMAGED}") from None
        self._window.append((self._next, values))
        self._next += len(values)
        if len(self._window) > KEPT:
            self._window.popleft()


def are_parquet(place: Path) -> bool:
    """Return whether a path names Parquet files: one, a pattern with braces, or a folder of them."""
    if place.is_dir():
        return any(entry.name.endswith(ENDING) and not entry.name.startswith(".") for entry in place.iterdir())
    return place.name.endswith(ENDING)


def parquet_paths(place: Path) -> list[Path]:
    """Return the Parquet files of a folder, of a pattern such as val-{000..063}.parquet, or of one path; sorted."""
    if place.is_dir():
        names = sorted(entry.name for entry in place.iterdir() if not entry.name.startswith("."))
        other = next((name for name in names if Path(name).suffix.lower() in EXTENSIONS), None)
        if other is not None:
            raise FqvitError(f"{place}: contains both Parquet files and images ({other}). Pass a folder with only one of them.")
        return [place / name for name in names if name.endswith(ENDING)]
    paths = [place] if place.exists() else [Path(text) for text in expanded(str(place))]
    for path in paths:
        if not path.is_file():
            raise FqvitError(
                f"{path}: no such file. Pass a .parquet file, a pattern such as val-{{000..063}}.parquet, or a folder."
            )
    return sorted(set(paths))


def _files(place: Path) -> list[ParquetFile]:
    files = [_described(path) for path in parquet_paths(place)]
    if not any(sum(file.groups) for file in files):
        raise FqvitError(f"{place}: no rows (Parquet files read: {len(files)}), expected one image per row. Pass other files.")
    return files


def _open(path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile as Opened
    except ModuleNotFoundError:
        said = "Parquet needs pyarrow, which is not installed"
        raise FqvitError(f'{path}: {said}. Run `pip install "fqvit[parquet]"`.') from None
    try:
        # buffer_size: read a column in pieces. Otherwise pyarrow reads whole row groups.
        return Opened(path, buffer_size=1 << 20, pre_buffer=False)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise FqvitError(f"{path}: not a complete Parquet file ({_reason(error)}). {DAMAGED}") from None


def _described(path: Path) -> ParquetFile:
    """Read the footer of a file, and find the columns of images and names."""
    opened = _open(path)
    try:
        schema, metadata = opened.schema_arrow, opened.metadata
        image, inside = _image_column(path, schema)
        names = inside or next(
            (name for name in NAME_COLUMNS if name in schema.names and _is_text(schema.field(name).type)), ""
        )
        groups = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
        sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
        mark = json.dumps([path.name, path.stat().st_size, groups, sizes, image, names])
        return ParquetFile(path, image, names, groups, mark)
    finally:
        opened.close()


def _image_column(path: Path, schema: Any) -> tuple[str, str]:
    """Return the columns of an image's bytes and of the path in the same struct ("" if there is none)."""
    found = {}
    for field in schema:
        if _is_bytes(field.type):
            found[field.name] = (field.name, "")
        elif str(field.type).startswith("struct<"):
            parts = {field.type.field(number).name: field.type.field(number).type for number in range(field.type.num_fields)}
            if "bytes" in parts and _is_bytes(parts["bytes"]):
                named = f"{field.name}.path" if "path" in parts and _is_text(parts["path"]) else ""
                found[field.name] = (f"{field.name}.bytes", named)
    if not found:
        has = ", ".join(f"{field.name} ({str(field.type)[:40]})" for field in schema)
        raise FqvitError(f"{path}: no column of images, expected bytes or structs of bytes and path. It has {has}.")
    chosen = next(iter(found)) if len(found) == 1 else next((name for name in IMAGE_COLUMNS if name in found), None)
    if chosen is None:
        raise FqvitError(f"{path}: several columns of bytes ({', '.join(found)}). Rename the one with the images to `image`.")
    if "." in chosen:
        raise FqvitError(f"{path}: column {chosen!r} has a dot in its name. Rename it to `image`.")
    return found[chosen]


def _labels(place: Path, files: Sequence[ParquetFile], classes: Sequence[str] | int, ids: Sequence[str]) -> list[int]:
    """Return the class index of every row."""
    count = classes if isinstance(classes, int) else len(classes)
    labels: list[Any] = []
    names: list[str] | None = None
    for file in files:
        opened = _open(file.path)
        column = next((name for name in LABEL_COLUMNS if name in opened.schema_arrow.names), None)
        if column is None:
            raise FqvitError(f"{file.path}: no column `label`, expected class indices or names. Pass labelled images.")
        names = names or _hub_names(opened.schema_arrow, column)
        for batch in opened.iter_batches(4096, columns=[column], use_threads=False):
            labels += batch.column(0).to_pylist()
        opened.close()
    for row, label in enumerate(labels):
        if type(label) not in (int, str):
            raise FqvitError(f"{place}: row {row} has label {label!r}, expected a class index or a class name.")
        if type(label) is not type(labels[0]):
            problem = f"row {row} has label {label!r}, but row 0 has {labels[0]!r}"
            raise FqvitError(f"{place}: {problem}. Use class indices only or class names only.")
    if isinstance(labels[0], str):
        indices = class_indices(str(place), sorted(set(labels)), classes, ids, "label")
        return [indices[label] for label in labels]
    # Class names that the Hub stores take precedence over indices: the model may have the same names in another order.
    order = names_to_indices(names, classes, ids) if names else None
    high = max(labels)
    limit = count if order is None else len(order)
    if min(labels) < 0 or high >= limit:
        bad = next(label for label in labels if not 0 <= label < limit)
        raise FqvitError(f"{place}: class {bad}, expected 0 to {limit - 1}. Pass images of the model's dataset.")
    return labels if order is None else [order[label] for label in labels]


def _hub_names(schema: Any, column: str) -> list[str] | None:
    """Return the class names in the metadata that Hugging Face datasets writes, or None."""
    try:
        about = json.loads((schema.metadata or {})[b"huggingface"])
        names = about["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return names if isinstance(names, list) and names and all(isinstance(name, str) for name in names) else None


def _is_bytes(kind: Any) -> bool:
    return str(kind) in ("binary", "large_binary", "binary_view")


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
