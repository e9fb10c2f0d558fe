"""Python's loader and the native loader accept and reject the same containers.

See also: test_loader_programs.py (the JSON inside), test_loader_fields.py (fields of ops), tests/robustness/fuzz.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fqvit.errors import FqvitError
from tests.robustness.fuzz.oracle import verdicts
from tests.robustness.fuzz.seeds import golden
from tests.robustness.hostile.containers import Tensors, fingerprint_of, packed, unpacked

TEXT, _, TENSORS = unpacked(golden()["tiny_v1.fqvit"])
SMALL: Tensors = {"z.small": ("U8", [2], b"\1\2")}
DEEP = 127  # nesting depth of objects and arrays that the safetensors library accepts


def accepted(raw: bytes, folder: Path) -> bool:
    """Return whether the loaders accept a file. Both must agree."""
    path = folder / "x.fqvit"
    path.write_bytes(raw)
    found = verdicts(path)
    assert isinstance(found.python, FqvitError) == isinstance(found.native, FqvitError), found
    return not isinstance(found.native, FqvitError)


def file(head: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(head)) + head + data


class Container:
    """A valid file in parts that test cases modify: the header (as the dict `table`, or as text in file()) and the data."""

    def __init__(self, text: str = TEXT, tensors: Tensors = TENSORS) -> None:
        raw = packed(text, fingerprint_of(text, tensors), tensors)
        (length,) = struct.unpack("<Q", raw[:8])
        self.table: dict[str, Any] = json.loads(raw[8 : 8 + length])
        self.data = raw[8 + length :]
        self.name = next(iter(tensors))

    @property
    def entry(self) -> dict[str, Any]:
        return self.table[self.name]

    def file(self, change: Callable[[str], str] = str) -> bytes:
        """Return the file. change: applied to the text of the header."""
        return file(change(json.dumps(self.table)).encode("utf-8", "surrogatepass"), self.data)


def with_entry(**fields: Any) -> bytes:
    one = Container()
    one.entry.update(fields)
    return one.file()


def without_entry(field: str) -> bytes:
    one = Container()
    del one.entry[field]
    return one.file()


def with_text(change: Callable[[str], str]) -> bytes:
    return Container().file(change)


def with_metadata(**fields: Any) -> bytes:
    one = Container()
    one.table["__metadata__"].update(fields)
    return one.file()


def with_tensor(dtype: str, shape: list[int], data: bytes, name: str = "extra") -> bytes:
    tensors = TENSORS | {name: (dtype, shape, data)}
    return packed(TEXT, fingerprint_of(TEXT, tensors), tensors)


def shifted(by: int, more: bytes) -> bytes:
    """Add `by` to the offsets of all tensors, and put the bytes `more` before their data."""
    one = Container()
    for name, entry in one.table.items():
        if name != "__metadata__":
            entry["data_offsets"] = [at + by for at in entry["data_offsets"]]
    one.data = more + one.data
    return one.file()


def overlapping() -> bytes:
    tensors = TENSORS | SMALL
    one = Container(TEXT, tensors)
    one.table["z.small"]["data_offsets"] = [at - 1 for at in one.table["z.small"]["data_offsets"]]
    one.data = one.data[:-1]
    return one.file()


def reordered() -> bytes:
    """Store the tensors in the opposite order, so that most are not aligned to their size."""
    tensors = dict(reversed((SMALL | {"y.odd": ("U8", [1], b"\7")} | TENSORS).items()))
    return packed(TEXT, fingerprint_of(TEXT, tensors), tensors)


def unaligned_header() -> bytes:
    one = Container()
    return one.file(lambda text: text + " " * (1 - len(text) % 8 + 8))


def duplicate(name: str, value: Any) -> Callable[[str], str]:
    return lambda text: f"{text[:-1]}, {json.dumps(name)}: {json.dumps(value)}}}"


def first_entry(change: Callable[[str], str]) -> bytes:
    """Change the JSON text of the first tensor's entry."""
    one = Container()
    before = json.dumps(one.entry)
    return one.file(lambda text: text.replace(before, change(before), 1))


def offsets(text: str) -> bytes:
    one = Container()
    end = one.entry["data_offsets"][1]
    return first_entry(lambda entry: entry.replace(f"[0, {end}]", text.replace("END", str(end))))


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


ENTRY = Container().entry
NAME = Container().name
FINGERPRINT = Container().table["__metadata__"]["fingerprint"]

ACCEPTED: dict[str, bytes] = {
    "unchanged": Container().file(),
    "a header that ends with spaces": with_text(lambda text: text + " " * 9),
    "a header of a length that is not a multiple of 8": unaligned_header(),
    "a header that starts with a space": with_text(lambda text: " " + text),
    "a header that starts with a newline": with_text(lambda text: "\n" + text),
    "tensors in another order, not aligned": reordered(),
    "an unused constant": with_tensor("I64", [2], bytes(16)),
    "an unused constant of 0 elements": with_tensor("U8", [0, 3], b""),
    "an unused constant of 0 rows of 2^28 elements": with_tensor("U8", [0, 2**28], b""),
    "an unused constant without axes": with_tensor("I32", [], bytes(4)),
    "an unused constant of 8 axes": with_tensor("U8", [1] * 8, b"\1"),
    "a constant without a name": with_tensor("U8", [1], b"\1", ""),
    "a constant whose name is not ASCII": with_tensor("U8", [1], b"\1", "\0é\U0001f600"),
    "unknown metadata": with_metadata(more="x"),
    "the metadata of a detector, too": with_metadata(fqvit_detector="{}"),
    "an unknown field of a tensor": with_entry(more=[1, {"a": None}]),
    f"an unknown field that nests {DEEP - 2} deep": first_entry(lambda text: f'{text[:-1]}, "more": {nested(DEEP - 2)}}}'),
    "an unknown field of 10^40": with_entry(more=10**40),
    "a tensor that is given twice with equal entries": with_text(duplicate(NAME, ENTRY)),
    "a tensor that is given twice, and the last one is right": with_text(
        lambda text: "{" + json.dumps(NAME) + ': {"dtype": "I64", "shape": [9], "data_offsets": [0, 72]}, ' + text[1:]
    ),
    "escapes in names of fields": first_entry(lambda text: text.replace('"dtype"', r'"\u0064type"')),
    "a surrogate pair": with_tensor("U8", [1], b"\1", "\U0001f600"),
}


REJECTED: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "a length and nothing else": struct.pack("<Q", 0),
    "a length of 1 byte less": file(json.dumps(Container().table).encode()[:-1], Container().data),
    "a length of 1 byte more": struct.pack("<Q", len(json.dumps(Container().table)) + 1) + Container().file()[8:],
    "a length of 2^63": struct.pack("<Q", 2**63) + Container().file()[8:],
    "a length of 2^64 - 1": struct.pack("<Q", 2**64 - 1) + Container().file()[8:],
    "a header that is a list": file(b"[]", b""),
    "a header without metadata": file(b"{}", b""),
    "a header of NUL bytes": file(bytes(16), b""),
    "a header that ends with NUL bytes": with_text(lambda text: text + "\0" * 8),
    "a byte order mark": with_text(lambda text: "\ufeff" + text),
    "a comment": with_text(lambda text: "/* */" + text),
    "two objects": with_text(lambda text: text + text),
    "invalid UTF-8": file(json.dumps(Container().table).encode().replace(b"dtype", b"dtyp\xff", 1), Container().data),
    "an encoded surrogate": with_text(lambda text: text.replace("dtype", "dtyp\ud800", 1)),
    "an escaped lone surrogate": with_text(lambda text: text.replace("dtype", r"dtyp\ud800", 1)),
    "an escaped low surrogate": with_text(lambda text: text.replace("dtype", r"dtyp\udc00", 1)),
    "a control character in a string": with_text(lambda text: text.replace("dtype", "dtyp\1", 1)),
    "a trailing comma": with_text(lambda text: text[:-1] + ",}"),
    "NaN": first_entry(lambda text: text[:-1] + ', "more": NaN}'),
    "1e999": first_entry(lambda text: text[:-1] + ', "more": 1e999}'),
    "400 digits": first_entry(lambda text: text[:-1] + ', "more": ' + "9" * 400 + "}"),
    "a byte more": Container().file() + b"\0",
    "a byte less": Container().file()[:-1],
    "a gap at the start": shifted(8, bytes(8)),
    "offsets beyond the data": shifted(1, b""),
    "overlapping tensors": overlapping(),
    "offsets in the wrong order": offsets("[END, 0]"),
    "negative offsets": offsets("[-1, END]"),
    "an offset of -0": offsets("[-0, END]"),
    "an offset that is a float": offsets("[0.0, END]"),
    "an offset of 2^64": offsets("[0, 18446744073709551616]"),
    "an offset of 2^63": offsets("[0, 9223372036854775808]"),
    "one offset": offsets("[END]"),
    "three offsets": offsets("[0, END, END]"),
    "a tensor that is null": with_text(duplicate("more", None)),
    "a tensor that is a list": with_text(duplicate(NAME, list(ENTRY.values()))),
    "a dtype that is an object": with_entry(dtype={ENTRY["dtype"]: None}),
    "a dtype in lower case": with_entry(dtype=ENTRY["dtype"].lower()),
    "an unknown dtype": with_entry(dtype="X8"),
    "another dtype of the same size": with_entry(dtype="F16" if ENTRY["dtype"] == "I16" else "F32"),
    "booleans": with_tensor("BOOL", [1], b"\1"),
    "unsigned 32-bit integers": with_tensor("U32", [1], bytes(4)),
    "a dtype of half a byte": with_tensor("F4", [2], b"\1"),
    "a shape that is a number": with_entry(shape=4),
    "a shape with a negative axis": with_entry(shape=[-1, -1]),
    "a shape with an axis of -0": with_tensor("U8", [0], b"").replace(b'"shape": [0]', b'"shape":[-0]'),
    "a shape with a float": with_entry(shape=[float(size) for size in ENTRY["shape"]]),
    "a shape of more elements": with_entry(shape=[*ENTRY["shape"], 2]),
    "a shape of 2^80 elements and an empty axis": with_tensor("U8", [2**40, 2**40, 0], b""),
    "a shape of 2^62 elements of 8 bytes and an empty axis": with_tensor("I64", [2**31, 2**31, 0], b""),
    "an empty axis and one of 2^29": with_tensor("U8", [0, 2**29], b""),
    "an empty axis and one of 2^64 - 1": with_tensor("U8", [0, 2**64 - 1], b""),
    "9 axes": with_tensor("U8", [1] * 9, b"\1"),
    "100 axes": with_tensor("U8", [1] * 100, b"\1"),
    "no dtype": without_entry("dtype"),
    "no shape": without_entry("shape"),
    "no offsets": without_entry("data_offsets"),
    "a dtype given twice": first_entry(lambda text: text[:-1] + f', "dtype": "{ENTRY["dtype"]}"}}'),
    f"an unknown field that nests {DEEP - 1} deep": first_entry(lambda text: f'{text[:-1]}, "more": {nested(DEEP - 1)}}}'),
    "metadata given twice": with_text(duplicate("__metadata__", Container().table["__metadata__"])),
    "metadata that is a list": with_text(lambda text: text.replace('"__metadata__": {', '"__metadata__": [], "m": {', 1)),
    "metadata that is not a string": with_metadata(more=1),
    "metadata that is null": with_text(lambda text: text.replace('"__metadata__": {', '"__metadata__": null, "m": {', 1)),
    "a program that is an object": with_metadata(fqvit={}),
    "no fingerprint": with_text(lambda text: text.replace('"fingerprint"', '"fingerprints"', 1)),
    "an empty fingerprint": with_metadata(fingerprint=""),
    "a fingerprint in upper case": with_metadata(fingerprint=FINGERPRINT.upper()),
    "a fingerprint with a space": with_metadata(fingerprint=FINGERPRINT + " "),
    "only a detector": with_text(lambda text: text.replace('"fqvit"', '"fqvit_detector"', 1)),
    "neither a program nor a detector": with_text(lambda text: text.replace('"fqvit"', '"program"', 1)),
    "a constant with the name of a buffer": with_tensor("U8", [1], b"\1", "pixels"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_both_loaders_accept_a_valid_container(case: str, tmp_path: Path) -> None:
    assert accepted(ACCEPTED[case], tmp_path)


@pytest.mark.parametrize("case", REJECTED)
def test_both_loaders_reject_a_malformed_container(case: str, tmp_path: Path) -> None:
    assert not accepted(REJECTED[case], tmp_path)
