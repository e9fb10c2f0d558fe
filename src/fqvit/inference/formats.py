"""Store one name and one or more integer vectors per image as .npy, .safetensors or .parquet, with a JSON text about them.

.npy: [N, *shape], exactly one output; names and JSON are in a second file, NAME.json.
.safetensors: one tensor per output, the names as UTF-8 bytes joined by newlines, the JSON in the metadata.
.parquet: column `name`, one fixed-size list per output, the JSON in the schema metadata.

Files are written part by part, so memory does not grow with the number of images. Files in .npy and
.safetensors format are memory-mapped for reading. Nothing is unpickled. See also: embeddings.py, which interprets the JSON.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.lib import format as npy
from safetensors import SafetensorError, safe_open

from fqvit.errors import FqvitError
from fqvit.system.files import replacing

Integers: TypeAlias = "np.ndarray[Any, Any]"
KEY = "fqvit_embeddings"  # key of the JSON in the metadata
NAMES = "names"  # the tensor with the names in a .safetensors file
NAME = "name"  # the column with the names in a .parquet file
DTYPES: dict[str, np.dtype[Any]] = {"u8": np.dtype("u1"), "u16": np.dtype("<u2"), "i32": np.dtype("<i4")}
SAFETENSORS = {"u8": "U8", "u16": "U16", "i32": "I32"}
ROWS_PER_GROUP = 4096  # rows per row group of a .parquet file; a reader holds at least one row group in memory
INSTALL = 'Run `pip install "fqvit[parquet]"`.'
DAMAGED = "The file is damaged or was not written by fqvit."


@dataclass(frozen=True)
class Column:
    """One output. dtype: a key of DTYPES. shape: without the axis of the images."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Rows:
    """Consecutive images. names: one per image. vectors: [N, *shape] by output."""

    names: Sequence[str]
    vectors: Mapping[str, Integers]


@dataclass(frozen=True)
class Content:
    """What a file holds. text: the JSON about the outputs."""

    text: str
    rows: Rows


def write_npy(path: Path, text: str, columns: Sequence[Column], count: int, parts: Iterable[Rows]) -> None:
    """Write NAME.npy and NAME.json. If the process is killed, both files are old, both are new, or there is no .json file."""
    if len(columns) != 1:
        names = ", ".join(column.name for column in columns)
        raise FqvitError(f"{path}: a .npy file holds one output, got {names}. Choose one, or write .safetensors or .parquet.")
    column, beside = columns[0], path.with_suffix(".json")
    with replacing(beside) as about, replacing(path) as temporary:
        with temporary.open("wb") as file:
            shape = (count, *column.shape)
            npy.write_array_header_1_0(file, {"descr": DTYPES[column.dtype].str, "fortran_order": False, "shape": shape})
            for rows in parts:
                _write_array(file, rows.vectors[column.name], column)
        with about.open("w", encoding="utf-8") as described:
            described.write(f"{text[:-1]},{json.dumps(NAMES)}:[")
            for number, name in enumerate(name for rows in parts for name in rows.names):
                described.write((",\n" if number else "\n") + json.dumps(name, ensure_ascii=False))
            described.write("]}\n")
        beside.unlink(missing_ok=True)  # a .npy file without .json is rejected; with an old .json, names would be wrong


def read_npy(path: Path) -> Content:
    """Memory-map a .npy file and read the .json file beside it."""
    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise FqvitError(f"{path}: no {beside.name} beside it, expected the names of the images. Write it with `fqvit embed`.")
    try:
        about = json.loads(beside.read_bytes())
        names = about.pop(NAMES)
        text = json.dumps(about)
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        raise FqvitError(f"{beside}: not the description of an embedding file. {DAMAGED}") from None
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # the parser of the header raises almost any exception for damaged files
        raise FqvitError(f"{path}: not a .npy file of integers ({_first_line(error)}). {DAMAGED}") from None
    if not isinstance(array, np.ndarray):
        raise FqvitError(f"{path}: an archive, expected one .npy array. {DAMAGED}")
    return Content(text, Rows(_checked_names(beside, names), {"": array}))  # embeddings.py knows the output's name


def write_safetensors(path: Path, text: str, columns: Sequence[Column], count: int, parts: Iterable[Rows]) -> None:
    """Write a .safetensors file. Equal contents give equal bytes."""
    taken = next((column.name for column in columns if column.name == NAMES), None)
    if taken is not None:
        raise FqvitError(f"{path}: an output is called {taken}, but that tensor holds the image names. Choose another name.")
    columns = sorted(columns, key=lambda column: -DTYPES[column.dtype].itemsize)  # aligns all tensors, as safetensors does
    entries: dict[str, object] = {"__metadata__": {KEY: text}}
    offset = 0
    for column in columns:
        end = offset + count * column.row_bytes
        dtype, shape = SAFETENSORS[column.dtype], [count, *column.shape]
        entries[column.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    length = max(0, sum(len(name.encode()) + 1 for rows in parts for name in rows.names) - 1)
    entries[NAMES] = {"dtype": "U8", "shape": [length], "data_offsets": [offset, offset + length]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for column in columns:
            for rows in parts:
                _write_array(file, rows.vectors[column.name], column)
        between = b""
        for rows in parts:
            if rows.names:
                file.write(between + "\n".join(rows.names).encode())
                between = b"\n"


def read_safetensors(path: Path) -> Content:
    """Memory-map a .safetensors file that write_safetensors wrote."""
    try:
        with safe_open(path, framework="numpy") as opened:  # validates the container
            metadata: dict[str, str] = opened.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise FqvitError(f"{path}: not a complete .safetensors file ({_first_line(error)}). {DAMAGED}") from None
    if KEY not in metadata:
        raise FqvitError(f"{path}: holds no embeddings, expected a file written by `fqvit embed`. Check the path.")
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    try:
        entries = json.loads(data[8:start].tobytes())
        tensors = {name: _tensor(data, start, entry) for name, entry in entries.items() if name != "__metadata__"}
        names = tensors.pop(NAMES).tobytes().decode()
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise FqvitError(f"{path}: not the tensors of an embedding file. {DAMAGED}") from None
    rows = max((len(tensor) for tensor in tensors.values() if tensor.ndim), default=0)
    return Content(metadata[KEY], Rows(names.split("\n") if names or rows else [], tensors))


def _tensor(data: Integers, start: int, entry: dict[str, Any]) -> Integers:
    dtype = next(DTYPES[ours] for ours, theirs in SAFETENSORS.items() if theirs == entry["dtype"])
    first, last = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    if not 0 <= first <= last <= len(data) - start or min(shape, default=0) < 0:
        raise ValueError("outside the file")
    return data[start + first : start + last].view(dtype).reshape(shape)


def write_parquet(path: Path, text: str, columns: Sequence[Column], count: int, parts: Iterable[Rows]) -> None:
    """Write a .parquet file, one row group per ROWS_PER_GROUP images or per part."""
    arrow, parquet = _pyarrow(path)
    taken = next((column.name for column in columns if column.name == NAME), None)
    if taken is not None:
        raise FqvitError(f"{path}: an output is called {taken}, but that column holds the image names. Choose another name.")
    kinds = {"u8": arrow.uint8(), "u16": arrow.uint16(), "i32": arrow.int32()}
    lists = {column.name: arrow.list_(kinds[column.dtype], math.prod(column.shape)) for column in columns}
    schema = arrow.schema([(NAME, arrow.string()), *lists.items()], metadata={KEY: text})
    # Compression hardly shrinks codes, so only names are compressed; names hardly repeat, so dictionaries are of no use.
    with replacing(path) as temporary, temporary.open("wb") as file:
        writer = parquet.ParquetWriter(file, schema, compression={NAME: "zstd"}, use_dictionary=False)
        try:
            for rows in parts:
                for begin in range(0, len(rows.names), ROWS_PER_GROUP):
                    names = rows.names[begin : begin + ROWS_PER_GROUP]
                    arrays = [arrow.array(names, arrow.string())]
                    for column in columns:
                        some = _little(rows.vectors[column.name][begin : begin + ROWS_PER_GROUP], column)
                        values = arrow.array(some.reshape(-1), kinds[column.dtype])
                        arrays.append(arrow.FixedSizeListArray.from_arrays(values, type=lists[column.name]))
                    writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
            writer.close()
        except BaseException:
            with suppress(Exception):  # closing writes again, which fails again on a full disk
                writer.close()
            raise


def read_parquet(path: Path) -> Content:
    """Read a .parquet file into memory."""
    arrow, parquet = _pyarrow(path)
    try:
        with path.open("rb") as file:
            opened = parquet.ParquetFile(file)
            text = (opened.schema_arrow.metadata or {}).get(KEY.encode())
            if text is None:
                raise FqvitError(f"{path}: holds no embeddings, expected a file written by `fqvit embed`. Check the path.")
            table = opened.read()
        if any(column.null_count for column in table.columns):
            raise FqvitError(f"{path}: has empty cells, expected a name and codes in every row. {DAMAGED}")
        names = table.column(NAME).to_pylist()
        vectors = {}
        for name in table.column_names:
            if name != NAME:
                values = table.column(name).combine_chunks().flatten()
                width = table.schema.field(name).type.list_size
                vectors[name] = values.to_numpy(zero_copy_only=False).reshape(len(names), width)
        return Content(text.decode(), Rows(_checked_names(path, names), vectors))
    except (arrow.ArrowException, OSError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise FqvitError(f"{path}: not an embedding file ({_first_line(error)}). {DAMAGED}") from None


def text_of(path: Path) -> str | None:
    """Return the JSON of a .safetensors or .parquet file without reading its vectors; None if it has no such JSON."""
    if path.suffix.lower() == ".parquet":
        arrow, parquet = _pyarrow(path)
        try:
            found: bytes | None = (parquet.read_schema(path).metadata or {}).get(KEY.encode())
        except (arrow.ArrowException, ValueError):
            return None
        return None if found is None else found.decode("utf-8", "replace")
    try:
        with safe_open(path, framework="numpy") as opened:
            return (opened.metadata() or {}).get(KEY)
    except (SafetensorError, ValueError):
        return None


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise FqvitError(f"{path}: Parquet needs pyarrow, which is not installed. {INSTALL}") from None
    return pyarrow, pyarrow.parquet


def _little(array: Integers, column: Column) -> Integers:
    return np.ascontiguousarray(array, DTYPES[column.dtype])


def _write_array(file: IO[bytes], array: Integers, column: Column) -> None:
    file.write(_little(array, column).reshape(-1).view(np.uint8).data)


def _checked_names(path: Path, names: object) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FqvitError(f"{path}: the names of the images are not a list of strings. {DAMAGED}")
    return names


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
