"""Python's loader and the native loader accept and reject the same containers and the same JSON texts.

See also: test_loader_fields.py (fields of ops), tests/robustness/fuzz (mutated files).
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
DEEP = 127  # objects and arrays that the safetensors library accepts inside each other


def accepted(raw: bytes, folder: Path) -> bool:
    """Return the verdict of both loaders, which must agree."""
    path = folder / "x.fqvit"
    path.write_bytes(raw)
    found = verdicts(path)
    assert isinstance(found.python, FqvitError) == isinstance(found.native, FqvitError), found
    return not isinstance(found.native, FqvitError)


def file(head: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(head)) + head + data


class Container:
    """The parts of a valid file, which cases change: its header as a dict or, at the end, as text, and its data."""

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
    """Move every tensor by some bytes, which leaves a gap at the start."""
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
    "a tensor that is given twice, alike": with_text(duplicate(NAME, ENTRY)),
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


# Changes to the text of the program, with a valid fingerprint.
HEADER = json.loads(TEXT)
PLAIN = json.dumps(HEADER)


def replaced(**fields: Any) -> str:
    return json.dumps(HEADER | fields)


def recipe(text: str) -> str:
    return json.dumps({key: value for key, value in HEADER.items() if key != "recipe"})[:-1] + f', "recipe": {text}}}'


ACCEPTED_TEXTS = {
    "unchanged": PLAIN,
    "spaces around": f" \t\r\n{PLAIN}\n",
    "keys in another order": json.dumps(dict(reversed(HEADER.items()))),
    "escaped keys": PLAIN.replace('"model"', r'"\u006dodel"'),
    "a field given twice": PLAIN[:-1] + ', "source": "again"}',
    "an op given twice as field": PLAIN.replace('"op": "permute"', '"op": "permute", "op": "permute"', 1),
    "a version given twice, and the last one is right": '{"version": 2, ' + PLAIN[1:],
    "defaults written out": replaced(others=[], input=None, moves={}),
    "images of 2^62": replaced(images=2**62),
    "negative images": replaced(images=-(2**62)),
    "images of -0": PLAIN.replace(f'"images": {HEADER["images"]}', '"images": -0'),
    "a scale that is an integer": replaced(output=HEADER["output"] | {"scale": 1}),
    "the smallest scale": replaced(output=HEADER["output"] | {"scale": 5e-324}),
    "the largest scale": replaced(output=HEADER["output"] | {"scale": 9.999999999999999e29}),
    "a mean of 10^40": replaced(preprocess=HEADER["preprocess"] | {"mean": [10**40, -(10**40), 0]}),
    "a mean of 1e-400": replaced(preprocess=HEADER["preprocess"] | {"mean": [1, 2, 987654321]}).replace("987654321", "1e-400"),
    "any recipe": recipe('{"a": [null, true, -0, -0.0, 1e5, 1E-5, "\\u0000\\ud83d\\ude00\x7f", {"a": 1, "a": 2}, 1e-999]}'),
    "a recipe of 2^64": recipe('{"a": 18446744073709551616}'),
    "a recipe of 300 digits": recipe('{"a": ' + "9" * 300 + "}"),
    "a recipe that nests 300 deep": recipe('{"a": ' + nested(300) + "}"),
    "names that are not ASCII": json.dumps(HEADER | {"source": "é\U0001f600\0"}, ensure_ascii=False).replace("\0", "\\u0000"),
    "moves of buffers that do not exist": replaced(moves={"none": {"kind": "grid"}, "": {"kind": "second", "of": "none"}}),
    "no sites": replaced(sites={}),
    "the pixels as output": replaced(ops=[], sites={}, output={"buffer": "pixels", "kind": "map", "scale": 1.0}),
}

REJECTED_TEXTS = {
    "nothing": "",
    "null": "null",
    "a list": f"[{PLAIN}]",
    "a byte order mark": "\ufeff" + PLAIN,
    "more after the end": PLAIN + "0",
    "a NUL byte after the end": PLAIN + "\0",
    "a form feed": "\f" + PLAIN,
    "a trailing comma": PLAIN[:-1] + ",}",
    "single quotes": PLAIN.replace('"model"', "'model'"),
    "an unknown field": PLAIN[:-1] + ', "more": 1}',
    "an unknown field in another case": PLAIN[:-1] + ', "Model": "x"}',
    "an op given twice, differently": PLAIN.replace('"op": "permute"', '"op": "permute", "op": "linear"', 1),
    "an op given twice, first as null": PLAIN.replace('"op": "permute"', '"op": null, "op": "permute"', 1),
    "a field given twice, first with a wrong type": '{"source": 1, ' + PLAIN[1:],
    "a version that is a string": replaced(version="1"),
    "a version that is a boolean": replaced(version=True),
    "a version that is a float": replaced(version=1.0),
    "a version of 10^40": replaced(version=10**40),
    "images that are a float": replaced(images=1.0),
    "images in exponential notation": PLAIN.replace(f'"images": {HEADER["images"]}', '"images": 1e2'),
    "images of 2^62 + 1": replaced(images=2**62 + 1),
    "images of 2^63": replaced(images=2**63),
    "images of -2^62 - 1": replaced(images=-(2**62) - 1),
    "images of 5,000 digits": PLAIN.replace(f'"images": {HEADER["images"]}', '"images": ' + "9" * 5000),
    "images that are a boolean": replaced(images=True),
    "a leading zero": PLAIN.replace(f'"images": {HEADER["images"]}', '"images": 01'),
    "a plus sign": PLAIN.replace(f'"images": {HEADER["images"]}', '"images": +1'),
    "a scale of 0": replaced(output=HEADER["output"] | {"scale": 0}),
    "a negative scale": replaced(output=HEADER["output"] | {"scale": -1e-3}),
    "a scale of 1e30": replaced(output=HEADER["output"] | {"scale": 1e30}),
    "a scale of 10^30": replaced(output=HEADER["output"] | {"scale": 10**30}),
    "a scale of 1e-400": replaced(output=HEADER["output"] | {"scale": 987654321}).replace("987654321", "1e-400"),
    "a scale that is a string": replaced(output=HEADER["output"] | {"scale": "1"}),
    "an output with a zero point": replaced(output=HEADER["output"] | {"zero": 1}),
    "an output that is given twice": replaced(others=[HEADER["output"]]),
    "an output that no op writes": replaced(output=HEADER["output"] | {"buffer": "none"}),
    "an output of another kind": replaced(output=HEADER["output"] | {"kind": "tokens"}),
    "an output of an unknown kind": replaced(output=HEADER["output"] | {"kind": "Logits"}),
    "a mean of 1e400": replaced(preprocess=HEADER["preprocess"] | {"mean": [1, 2, 987654321]}).replace("987654321", "1e400"),
    "a std of 0": replaced(preprocess=HEADER["preprocess"] | {"std": [1, 0, 1]}),
    "two means": replaced(preprocess=HEADER["preprocess"] | {"mean": [1, 2]}),
    "two channels": replaced(preprocess=HEADER["preprocess"] | {"channels": 2}),
    "channels that are a float": replaced(preprocess=HEADER["preprocess"] | {"channels": 3.0}),
    "a width of 0": replaced(preprocess=HEADER["preprocess"] | {"width": 0}),
    "a resize of 8193": replaced(preprocess=HEADER["preprocess"] | {"resize": 8193}),
    "an unknown interpolation": replaced(preprocess=HEADER["preprocess"] | {"interpolation": "nearest"}),
    "a recipe that is a list": recipe("[]"),
    "a recipe that is null": recipe("null"),
    "a recipe of NaN": recipe('{"a": NaN}'),
    "a recipe of 1e999": recipe('{"a": 1e999}'),
    "a lone surrogate": recipe('{"a": "\\ud800"}'),
    "a lone low surrogate": recipe('{"a": "\\udc00"}'),
    "a surrogate and a letter": recipe('{"a": "\\ud800\\u0041"}'),
    "an unknown escape": recipe('{"a": "\\x41"}'),
    "a control character": recipe('{"a": "\1"}'),
    "a recipe that nests 3,000 deep": recipe('{"a": ' + nested(3000) + "}"),
    "a move of an unknown kind": replaced(moves={"x": {"kind": "shift"}}),
    "a move with a window of 257": replaced(moves={"x": {"kind": "windows", "window": 257}}),
    "a move without a kind": replaced(moves={"x": {}}),
    "an input of two axes": replaced(input={"shape": [4, 4], "scale": 1.0, "zero": 0}),
    "an input of 2^62 rows": replaced(input={"shape": [2**62, 1, 1], "scale": 1.0, "zero": 0}),
    "an input of another shape": replaced(input={"shape": [1, 1, 1], "scale": 1.0, "zero": 0}),
    "an empty input": replaced(input={"shape": [0, 1, 1], "scale": 1.0, "zero": 0}),
    "8193 ops": replaced(ops=[HEADER["ops"][0]] * 8193),
    "no ops": replaced(ops=[], sites={}),
    "ops that are an object": replaced(ops={}),
    "an op that is null": replaced(ops=[None]),
    "an op that is a list": replaced(ops=[list(HEADER["ops"][0].values())]),
    "a site of a buffer that no op writes": replaced(sites={"none": ["residual", 8, [1.0], [0]]}),
    "a site that is an object": replaced(sites={next(iter(HEADER["sites"])): {"role": "x", "bits": 8}}),
    "a site of one field": replaced(sites={next(iter(HEADER["sites"])): ["x"]}),
    "a site of ten fields": replaced(
        sites={next(iter(HEADER["sites"])): ["x", 8, [1.0], [0], None, False, False, None, [], 1]}
    ),
}


def text_file(text: str) -> bytes:
    return packed(text, fingerprint_of(text, TENSORS), TENSORS)


@pytest.mark.parametrize("case", ACCEPTED_TEXTS)
def test_both_loaders_accept_a_valid_program(case: str, tmp_path: Path) -> None:
    assert accepted(text_file(ACCEPTED_TEXTS[case]), tmp_path)


@pytest.mark.parametrize("case", REJECTED_TEXTS)
def test_both_loaders_reject_a_malformed_program(case: str, tmp_path: Path) -> None:
    assert not accepted(text_file(REJECTED_TEXTS[case]), tmp_path)


@pytest.mark.parametrize("field", HEADER)
@pytest.mark.parametrize("value", [None, True, 1, -1, 1.5, "x", [], {}, [1], [[]], {"x": 1}], ids=str)
def test_both_loaders_agree_on_every_type_of_every_field_of_the_program(field: str, value: Any, tmp_path: Path) -> None:
    accepted(text_file(json.dumps(HEADER | {field: value})), tmp_path)
    assert not accepted(text_file(json.dumps({key: x for key, x in HEADER.items() if key != field})), tmp_path)


@pytest.mark.parametrize("part", ["preprocess", "output", "input", "sites", "moves"])
def test_both_loaders_agree_on_every_type_of_every_field_of_a_part(part: str, tmp_path: Path) -> None:
    site = next(iter(HEADER["sites"]))
    whole: Any = {
        "preprocess": HEADER["preprocess"],
        "output": {"zero": 0, "alpha": None} | HEADER["output"],
        "input": {"shape": [12, 12, 3], "scale": 1.0, "zero": 0, "bits": 8},
        "sites": HEADER["sites"][site],
        "moves": {"kind": "windows", "window": 7, "shift": 3, "of": ""},
    }[part]
    inside = {"sites": lambda x: {site: x}, "moves": lambda x: {"b": x}}.get(part, lambda x: x)
    values = (
        None,
        True,
        0,
        1,
        -1,
        16,
        17,
        255,
        256,
        257,
        65535,
        65536,
        2**62,
        2**63,
        0.5,
        2.0,
        1e30,
        "",
        "x",
        [],
        {},
        [1],
        ["x"],
    )
    keys = list(range(len(whole))) if isinstance(whole, list) else [*whole, "more"]
    both = set()
    for key in keys:
        for value in (*values, "delete"):
            changed = list(whole) if isinstance(whole, list) else dict(whole)
            if value != "delete":
                changed[key] = value
            elif key != "more":
                del changed[key]
            both.add(accepted(text_file(json.dumps(HEADER | {part: inside(changed)})), tmp_path))
    assert both == {True, False}
