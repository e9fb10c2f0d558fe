"""Damaged and malicious .fqvit files: each gives a one-line error that names the file, without allocating much memory.

The fingerprint has no secret key, so an attacker can always make it valid; `rewritten` recomputes it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.ir.program import Program
from fqvit.lowering.lower import lower
from fqvit.runtime.native import Engine
from tests.factories import calibration_of, float_model
from tests.robustness.hostile.allocated import at_most
from tests.robustness.hostile.containers import Change, Json, Tensors, fingerprint_of, packed, rewritten, unpacked


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("hostile") / "tiny.fqvit"
    model = float_model("distilled", classes=("a", "b", "c", "d", "e"))
    lower(model, calibration_of(model)).save(path)
    return path.read_bytes()


def assert_rejected(raw: bytes, folder: Path, match: str = ".") -> str:
    """Assert that both loaders give a one-line error and that Python's matches. Return Python's error without the path."""
    path = folder / "bad.fqvit"
    path.write_bytes(raw)
    with pytest.raises(FqvitError, match=match) as caught:
        Program.load(path)
    with pytest.raises(FqvitError) as natively:
        Engine(path, 1)
    for line in (str(natively.value), str(caught.value)):
        assert line.startswith(str(path)) and "\n" not in line and len(line) < 1000 and line.endswith(".")
    return line.removeprefix(f"{path}: ")


def first(header: Json, op: str) -> Json:
    return next(o for o in header["ops"] if o["op"] == op)


def set_op(op: str, **fields: Any) -> Change:
    return lambda header, _: first(header, op).update(fields)


def set_header(**fields: Any) -> Change:
    return lambda header, _: header.update(fields)


def set_preprocess(**fields: Any) -> Change:
    return lambda header, _: header["preprocess"].update(fields)


def add_op(**fields: Any) -> Change:
    return lambda header, _: header["ops"].append(fields)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def drop_tensor(part: str) -> Change:
    def change(_: Json, tensors: Tensors) -> None:
        del tensors[next(name for name in tensors if name.endswith(part))]

    return change


def retype(part: str, dtype: str, width: int) -> Change:
    def change(_: Json, tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith(part))
        shape = tensors[name][1]
        tensors[name] = (dtype, shape, b"\0" * width * int(np.prod(shape)))

    return change


def packed_weights(code: int, exponent: int | None) -> Change:
    """Pack the weights of the first linear layer in groups of 8. code, exponent: the value of all their bytes; None: omitted"""

    def change(header: Json, tensors: Tensors) -> None:
        op = first(header, "linear")
        outputs, inputs = tensors[f"{op['y']}.w"][1]
        op["group"] = 8
        for part, value, columns in (("w", code, inputs // 2), ("exponent", exponent, inputs // 16)):
            if value is not None:
                tensors[f"{op['y']}.{part}"] = ("U8", [outputs, columns], bytes([value]) * outputs * columns)

    return change


def in_version_2(*changes: Change) -> Change:
    def change(header: Json, tensors: Tensors) -> None:
        for one in (set_header(version=2), *changes):
            one(header, tensors)

    return change


HOSTILE: dict[str, tuple[Change, str]] = {
    "a newer version": (set_header(version=3), "format version 3, this fqvit reads 1 to 2. Install a newer fqvit"),
    "a width in version 1": (set_op("linear", width=6), "format version 1, but linear ops with a width or codebooks need 2"),
    "codebooks in version 1": (
        set_op("linear", codebooks=1, group=8),
        "format version 1, but linear ops with a width or codebooks need 2",
    ),
    "version 0": (set_header(version=0), "format version 0"),
    "a version that is a string": (set_header(version="1"), "format version '1'"),
    "a boolean version": (set_header(version=True), "version"),
    "a float version": (set_header(version=1.0), "version"),
    "no version": (lambda header, _: header.pop("version"), "format version None"),
    "an unknown op": (add_op(op="exec", y="z", x="x"), r"ops\[\d+\]\S*: invalid value 'exec'"),
    "an op without a tag": (add_op(y="z", x="x"), r"ops\[\d+\]"),
    "an op that is a list": (lambda header, _: header["ops"].append([1]), r"ops\[\d+\]: expected object, got array"),
    "ops that are an object": (set_header(ops={}), "ops: expected array, got object"),
    "a string for a shift": (set_op("matmul", shift="41"), r"ops\[\d+\]\.shift: expected int, got str"),
    "null for a shift": (set_op("matmul", shift=None), r"ops\[\d+\]\.shift: expected int, got null"),
    "a boolean for a shift": (set_op("matmul", shift=True), r"ops\[\d+\]\.shift: expected int, got bool"),
    "a float shift": (set_op("matmul", shift=41.5), r"ops\[\d+\]\.shift: expected int, got float"),
    "a float shift without a fraction": (set_op("matmul", shift=41.0), r"ops\[\d+\]\.shift: expected int, got float"),
    "a float multiplier without a fraction": (
        set_op("matmul", mult=1073741824.0),
        r"ops\[\d+\]\.mult: expected int \| str, got float",
    ),
    "a float zero point": (set_op("matmul", y_zero=1.5), r"ops\[\d+\]\.y_zero: expected int, got float"),
    "a float zero point where a name is allowed": (set_op("linear", y_zero=1.0), r"ops\[\d+\]\.y_zero: expected .*, got float"),
    "a float in a tuple": (
        set_op("permute", perm=[0, 2.0, 1, 3, 4]),
        r"ops\[\d+\]\.perm\[(1|\.\.\.)\]: expected int, got float",
    ),
    "a missing field": (lambda header, _: first(header, "matmul").pop("mult"), r"ops\[\d+\]: .*missing required field mult"),
    "an unknown field in an op": (set_op("matmul", alpha="x"), r"ops\[\d+\]: .*unknown field alpha"),
    "an unknown field in the program": (set_header(command="rm"), "unknown field command"),
    "an unknown field in the output": (lambda header, _: header["output"].update(more=1), "output: .*unknown field more"),
    "an unknown field in a term": (
        lambda header, _: first(header, "add")["terms"][0].update(more=1),
        r"ops\[\d+\]\.terms\[0\]: .*unknown field more",
    ),
    "an unknown field in preprocess": (set_preprocess(more=1), "preprocess: .*unknown field more"),
    "three terms": (lambda header, _: first(header, "add")["terms"].append({"x": "x", "mult": 1}), r"ops\[\d+\]\.terms"),
    "an unknown kind of output": (lambda header, _: header["output"].update(kind="boxes"), "output.kind"),
    "a height of 0": (set_preprocess(height=0), r"preprocess\.height: expected int >= 1"),
    "a height of a million": (set_preprocess(height=10**6), r"preprocess\.height: expected int <= 8192"),
    "a height of 8192 that does not match the ops": (set_preprocess(height=8192, width=8192), "view"),
    "two channels": (set_preprocess(channels=2), "preprocess.channels"),
    "a mean of two values": (set_preprocess(mean=[0.5, 0.5]), "preprocess"),
    "a std of 0": (set_preprocess(std=[0, 1, 1]), "preprocess"),
    "a name with a lone surrogate": (set_header(model="\ud800"), "."),
    "shift 0": (set_op("matmul", shift=0), "shift must be in 1..62"),
    "shift 63": (set_op("matmul", shift=63), "shift must be in 1..62"),
    "shift -1": (set_op("matmul", shift=-1), "shift must be in 1..62"),
    "a shift of 10^40": (set_op("matmul", shift=10**40), "."),
    "a multiplier of 2^31": (set_op("matmul", mult=2**31), "mult must be in"),
    "a zero point of 10^30": (set_op("matmul", y_zero=10**30), "."),
    "a zero point of 2^62": (set_op("matmul", y_zero=2**62), "."),
    "a permutation to a huge shape": (set_op("permute", shape=[2**40, 2**40]), "shape"),
    "a view of many axes": (
        add_op(op="permute", y="z", x="pixels", view=[1] * 100 + [8, 12, 3], perm=list(range(103))),
        "z: ",
    ),
    "a view with a negative size": (add_op(op="permute", y="z", x="pixels", view=[-1, -288], perm=[0, 1]), "z: view"),
    "a buffer that nothing writes": (set_op("layernorm", x="nowhere"), "reads 'nowhere' before any op writes it"),
    "a buffer written twice": (lambda header, _: header["ops"].append(header["ops"][0]), "written twice"),
    "an index that names another constant": (set_op("take", index="classes"), "'classes' is uint8"),
    "no weights": (drop_tensor(".w"), r"constant '\S+\.w' is missing"),
    "no table": (drop_tensor(".table"), r"constant '\S+\.table' is missing"),
    "float weights": (retype(".w", "F32", 4), "is F32: only integers"),
    "float16 weights": (retype(".w", "F16", 2), "is F16: only integers"),
    "bfloat16 weights": (retype(".w", "BF16", 2), "is BF16: only integers"),
    "boolean weights": (retype(".w", "BOOL", 1), "is BOOL: only integers"),
    "int64 weights": (retype(".w", "I64", 8), "is int64"),
    "unsigned weights": (retype(".w", "U8", 1), "is uint8"),
    "int8 weights with a group": (set_op("linear", group=16), "is int8, expected u8"),
    "a group of 1": (set_op("linear", group=1), "group is 1"),
    "a negative group": (set_op("linear", group=-16), "group is -16"),
    "a group of 10^18": (set_op("linear", group=10**18), "group is 10+, expected 0 or 2 to 65536"),
    "a group that is a string": (set_op("linear", group="16"), r"ops\[\d+\]\.group: expected int, got str"),
    "a float group": (set_op("linear", group=16.0), r"ops\[\d+\]\.group: expected int, got float"),
    "17 codebooks": (in_version_2(set_op("linear", codebooks=17, group=8)), "codebooks is 17, expected 0 to 16"),
    "10^18 codebooks": (in_version_2(set_op("linear", codebooks=10**18, group=8)), "codebooks is 10+, expected 0 to 16"),
    "codebooks without groups": (in_version_2(set_op("linear", codebooks=2)), "codebooks is 2, but group is 0, expected 2 to"),
    "codebooks that are a string": (set_op("linear", codebooks="2"), r"ops\[\d+\]\.codebooks: expected int, got str"),
    "codebooks that are missing": (
        in_version_2(packed_weights(0x00, 0x00), set_op("linear", codebooks=2)),
        r"constant '\S+\.codebooks' is missing",
    ),
    "packed weights without exponents": (packed_weights(0x00, None), r"constant '\S+\.exponent' is missing"),
    "packed weights with an exponent of 5": (packed_weights(0x00, 0x50), "exponent 5, expected 0 to 4"),
    "uint64 multipliers": (retype(".mult", "U64", 8), "is U64: only integers"),
    "an output that nothing writes": (lambda header, _: header["output"].update(buffer="none"), "output: no op writes 'none'"),
    "nested lists in the recipe": (set_header(recipe={"x": nested(900)}), "."),
    "a matrix product with a huge output": (
        lambda header, _: header.update(
            preprocess={**header["preprocess"], "height": 8192, "width": 8192},
            ops=[
                {"op": "permute", "y": "rows", "x": "pixels", "view": [8192 * 8192, 3], "perm": [0, 1]},
                {"op": "matmul", "y": "z", "a": "rows", "b": "rows", "mult": 1, "shift": 1},
            ],
            output={"buffer": "z", "kind": "tokens", "scale": 1.0},
        ),
        "z: shape .* is too large",
    ),
    "a concatenation with a huge output": (
        lambda header, _: header.update(
            preprocess={**header["preprocess"], "height": 8192, "width": 8192},
            ops=[
                {"op": "permute", "y": "rows", "x": "pixels", "view": [8192 * 8192, 3], "perm": [0, 1]},
                {"op": "concat", "y": "z", "xs": ["rows"] * 40},
            ],
            output={"buffer": "z", "kind": "tokens", "scale": 1.0},
        ),
        "z: shape .* is too large",
    ),
}
MAY_LOAD = {"nested lists in the recipe"}  # harmless: accepted, and must not crash the loader


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_program_is_rejected_with_a_one_line_error(case: str, original: bytes, tmp_path: Path) -> None:
    change, match = HOSTILE[case]
    raw = rewritten(original, change)
    if case in MAY_LOAD:
        (tmp_path / "p.fqvit").write_bytes(raw)
        Program.load(tmp_path / "p.fqvit")
        return
    with at_most(50e6):
        assert_rejected(raw, tmp_path, match)


def test_rewritten_files_load_if_the_change_is_valid(original: bytes, tmp_path: Path) -> None:
    path = tmp_path / "good.fqvit"
    path.write_bytes(rewritten(original, set_header(source="somewhere else")))
    assert Program.load(path).header.source == "somewhere else"
    path.write_bytes(rewritten(original, packed_weights(0x8F, 0x40)))
    assert first({"ops": json.loads(unpacked(path.read_bytes())[0])["ops"]}, "linear")["group"] == 8
    Program.load(path)


TEXTS = {
    "nothing": "",
    "a word": "hello",
    "a list": "[1]",
    "a number": "1",
    "truncated JSON": '{"version": 1, "model": ',
    "NaN": '{"version": 1, "model": NaN}',
    "an integer of 10,000 digits": '{"version": ' + "9" * 10_000 + "}",
    "100,000 open brackets": "[" * 100_000,
    "a recipe of 100,000 open brackets": '{"version": 1, "recipe": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    "a recipe of 3,000 open brackets": '{"version": 1, "recipe": {"x": ' + "[" * 3_000 + "]" * 3_000 + "}}",
    "only a version": '{"version": 1}',
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_header_that_is_not_a_program_is_rejected(name: str, original: bytes, tmp_path: Path) -> None:
    _, _, tensors = unpacked(original)
    assert_rejected(packed(TEXTS[name], fingerprint_of(TEXTS[name], tensors), tensors), tmp_path)


@pytest.mark.parametrize("depth", [300, 600, 800, 900, 950, 980, 1000, 1500])
def test_nesting_of_any_depth_loads_or_is_rejected(depth: int, original: bytes, tmp_path: Path) -> None:
    text, _, tensors = unpacked(original)
    recipe = '"recipe":{"x":' + "[" * depth + "]" * depth + "}"
    header = json.loads(text)
    del header["recipe"]
    text = json.dumps(header)[:-1] + "," + recipe + "}"
    path = tmp_path / "p.fqvit"
    path.write_bytes(packed(text, fingerprint_of(text, tensors), tensors))
    try:
        Program.load(path)
    except FqvitError as error:
        assert "\n" not in str(error)


def test_a_truncated_file_is_rejected_at_any_length(original: bytes, tmp_path: Path) -> None:
    lengths = {*range(64), *range(64, len(original), max(len(original) // 60, 1)), len(original) - 1}
    for length in sorted(lengths):
        assert_rejected(original[:length], tmp_path)


def test_a_flipped_bit_is_rejected_at_any_position(original: bytes, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for position in [*range(16), *rng.integers(16, len(original), 250).tolist(), len(original) - 1]:
        raw = bytearray(original)
        raw[position] ^= 1 << int(rng.integers(8))
        assert_rejected(bytes(raw), tmp_path)


def test_garbage_is_rejected(original: bytes, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for raw in (
        b"",
        b"\0",
        b"\0" * 8,
        b"\xff" * 64,
        b"PK\x03\x04" + bytes(60),
        rng.bytes(1000),
        struct.pack("<Q", 2**62) + bytes(100),
        struct.pack("<Q", 2) + b"{}",
        original + b"\0",
        original * 2,
    ):
        assert_rejected(raw, tmp_path)


def test_a_safetensors_file_without_a_program_is_recognized(tmp_path: Path) -> None:
    head = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    head += b" " * (-len(head) % 8)
    assert "not a quantized program" in assert_rejected(struct.pack("<Q", len(head)) + head + bytes(4), tmp_path)


def test_a_tensor_larger_than_the_file_is_rejected(original: bytes, tmp_path: Path) -> None:
    text, fingerprint, tensors = unpacked(original)
    raw = packed(text, fingerprint, tensors)
    name = next(name for name in tensors if name.endswith(".w"))
    shape = json.dumps(tensors[name][1]).encode()
    for huge in (b"[1000000000, 1000000000]", b"[4294967296, 4294967296]", b"[0, 18446744073709551615]"):
        (length,) = struct.unpack("<Q", raw[:8])
        head = raw[8 : 8 + length].replace(b'"dtype": "I8", "shape": ' + shape, b'"dtype": "I8", "shape": ' + huge)
        head = head.rstrip() + b" " * (-len(head.rstrip()) % 8)
        assert_rejected(struct.pack("<Q", len(head)) + head + raw[8 + length :], tmp_path)


def test_a_wrong_fingerprint_is_rejected(original: bytes, tmp_path: Path) -> None:
    text, _, tensors = unpacked(original)
    for wrong in ("", "0" * 64, "é"):
        assert "fingerprint" in assert_rejected(packed(text, wrong, tensors), tmp_path)
