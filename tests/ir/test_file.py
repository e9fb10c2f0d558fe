"""Tests of saving and loading programs: ops, constants, fingerprint and output bits stay the same."""

from __future__ import annotations

import dataclasses
import errno
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save as serialize

from fqvit.errors import FqvitError
from fqvit.ir.file import DETECTOR, PROGRAM, FileConstants, container, kind_of, read_metadata, write_container
from fqvit.ir.ops import Linear
from fqvit.ir.program import Program
from fqvit.lowering.lower import lower
from fqvit.quant.recipe import Recipe
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import run
from tests.factories import GROUPED, MODELS, assert_same, calibration_of, float_model, images_for


@pytest.fixture(scope="module")
def tiny() -> Program:
    model = float_model("distilled", classes=("a", "b", "é", "d", "e f"))
    return lower(model, calibration_of(model))


@pytest.mark.parametrize("kind", MODELS)
def test_a_loaded_program_equals_the_saved_one(kind: str, tmp_path: Path) -> None:
    model = float_model(kind)
    program = lower(model, calibration_of(model))
    program.save(tmp_path / "p.fqvit")
    loaded = Program.load(tmp_path / "p.fqvit")
    assert loaded.header == program.header
    assert loaded.constants.keys() == program.constants.keys()
    for name, array in program.constants.items():
        assert loaded.constants[name].dtype == array.dtype
        assert_same(loaded.constants[name], array, name)
    assert loaded.fingerprint() == program.fingerprint()
    images = images_for(model.preprocess, 4, 3)
    assert_same(run(loaded, images), run(program, images), "logits")


@pytest.mark.parametrize("kind", ["vit", "padded swin"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_files_with_4_bit_weights_are_smaller_and_give_the_same_logits(kind: str, library: Any, tmp_path: Path) -> None:
    model = float_model(kind)
    calibration = calibration_of(model, GROUPED)
    program = lower(model, calibration)
    plain = lower(model, dataclasses.replace(calibration, recipe=msgspec.structs.replace(GROUPED, weight_bits=8)))
    for name, made in (("packed", program), ("plain", plain), ("unpacked", program.unpacked())):
        made.save(tmp_path / name)
    loaded = Program.load(tmp_path / "packed")
    assert loaded.header == program.header and loaded.fingerprint() == program.fingerprint()
    images = images_for(model.preprocess, 4, 3)
    assert_same(run(loaded, images, library), run(program, images), "logits")
    assert_same(run(Program.load(tmp_path / "unpacked"), images, library), run(program, images), "logits, unpacked")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    stored = [sum(array.nbytes for array in made.constants.values()) for made in (program, plain)]
    # The layers of the small Swin have so few weights that the names of their codebooks take more space than packing saves.
    assert stored[0] < stored[1] and (kind != "vit" or sizes["packed"] < sizes["plain"])
    packed = {op.y for op in program.ops if isinstance(op, Linear) and op.group}
    others = {op.y for op in program.ops if isinstance(op, Linear) and not op.group}
    assert others == {"patch_embed.proj", "head" if kind == "vit" else "head.fc"} and len(packed) > 4
    for name in packed:
        assert 2 * program.constants[f"{name}.w"].nbytes == plain.constants[f"{name}.w"].nbytes


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
def test_weights_without_groups_are_stored_in_their_own_width(bits: int, tmp_path: Path) -> None:
    model = float_model("vit")
    calibration = calibration_of(model, Recipe(name="narrow", weight_bits=bits))
    program = lower(model, calibration)
    program.save(tmp_path / "narrow.fqvit")
    loaded = Program.load(tmp_path / "narrow.fqvit")
    assert loaded.fingerprint() == program.fingerprint()
    packed = bits <= 6
    assert loaded.header.version == (2 if packed else 1)
    for op in (op for op in loaded.ops if isinstance(op, Linear)):
        w = program.unpacked().constants[f"{op.y}.w"]
        assert op.width == (bits if packed else 0) and int(np.abs(w).max()) < 2 ** (bits - 1)
        assert loaded.constants[f"{op.y}.w"].nbytes == len(w) * -(-w.shape[1] * (bits if packed else 8) // 8)
    images = images_for(model.preprocess, 4, 3)
    assert_same(Engine(tmp_path / "narrow.fqvit").run(images), run(program, images), "logits")


def test_class_names_are_saved(tiny: Program, tmp_path: Path) -> None:
    tiny.save(tmp_path / "p.fqvit")
    assert Program.load(tmp_path / "p.fqvit").classes == ("a", "b", "é", "d", "e f")


def test_saving_twice_gives_the_same_bytes(tiny: Program, tmp_path: Path) -> None:
    tiny.save(tmp_path / "a.fqvit")
    Program.load(tmp_path / "a.fqvit").save(tmp_path / "b.fqvit")
    shuffled = dataclasses.replace(tiny, constants=dict(reversed(list(tiny.constants.items()))))
    shuffled.save(tmp_path / "c.fqvit")
    first = (tmp_path / "a.fqvit").read_bytes()
    assert first == (tmp_path / "b.fqvit").read_bytes() == (tmp_path / "c.fqvit").read_bytes()


def test_a_loaded_program_does_not_depend_on_its_file(tiny: Program, tmp_path: Path) -> None:
    path = tmp_path / "p.fqvit"
    tiny.save(path)
    loaded = Program.load(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert loaded.fingerprint() == tiny.fingerprint()


def test_an_opened_file_reads_constants_on_access(tiny: Program, tmp_path: Path) -> None:
    tiny.save(tmp_path / "p.fqvit")
    with FileConstants(tmp_path / "p.fqvit") as constants:
        (tmp_path / "p.fqvit").unlink()  # the open file remains readable
        assert set(constants) == set(tiny.constants) and len(constants) == len(tiny.constants)
        for name, array in tiny.constants.items():
            assert constants[name].dtype == array.dtype
            assert_same(constants[name], array, name)
        with pytest.raises(KeyError):
            constants["nothing"]


@pytest.mark.parametrize("text", ["", "short", "# Notes\nThis is a text file.\n", '{"version": 1, "model": "deit_tiny"}'])
def test_a_file_of_another_format_is_not_called_damaged(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.fqvit"
    path.write_text(text)
    for kind, command in ((PROGRAM, "fqvit quantize"), (DETECTOR, "fqvit detect quantize")):
        with pytest.raises(FqvitError) as caught:
            read_metadata(path, kind)
        assert str(caught.value) == f"{path}: not a .fqvit file, expected one written by `{command}`. Check the path."


def test_a_truncated_file_is_called_truncated(tiny: Program, tmp_path: Path) -> None:
    path = tmp_path / "p.fqvit"
    tiny.save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FqvitError) as caught:
        Program.load(path)
    assert str(caught.value) == f"{path}: damaged or truncated, expected a complete .fqvit file. Quantize again."


@pytest.mark.parametrize("broken", ["fqvit.ir.file.safe_open", "pathlib.Path.open"])
def test_an_io_error_is_not_called_damage(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.fqvit").write_text("not a program")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(broken, fail)
    with pytest.raises(FqvitError, match=r"p\.fqvit: cannot be read \(Input/output error\)\. Check the disk"):
        read_metadata(tmp_path / "p.fqvit", PROGRAM)


def test_truncating_an_open_file_raises_an_error(tiny: Program, tmp_path: Path) -> None:
    path = tmp_path / "p.fqvit"
    tiny.save(path)
    with FileConstants(path) as constants, path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)
        with pytest.raises(FqvitError, match="is truncated"):
            dict(constants.items())


def test_the_fingerprint_covers_every_constant(tiny: Program) -> None:
    seen = {tiny.fingerprint()}
    for name, array in tiny.constants.items():
        changed = array.copy()
        changed.flat[-1] ^= 1
        seen.add(Program(tiny.header, {**tiny.constants, name: changed}).fingerprint())
        seen.add(Program(tiny.header, {**tiny.constants, name: array[None]}).fingerprint())
    seen.add(Program(tiny.header, {**tiny.constants, "more": np.zeros(1, np.uint8)}).fingerprint())
    assert len(seen) == 2 * len(tiny.constants) + 2


def changed_fields(value: Any) -> list[Any]:
    """Return copies of a struct, each with one number, flag or string changed."""
    copies = []
    for name in value.__struct_fields__:
        old = getattr(value, name)
        if isinstance(old, bool):
            copies.append(msgspec.structs.replace(value, **{name: not old}))
        elif isinstance(old, int | float):
            copies.append(msgspec.structs.replace(value, **{name: old + 1}))
        elif isinstance(old, str) and name not in ("out", "kind", "interpolation"):
            copies.append(msgspec.structs.replace(value, **{name: old + "x"}))
    return copies


def test_the_fingerprint_covers_every_field(tiny: Program) -> None:
    header = tiny.header
    headers = changed_fields(header)
    headers += [msgspec.structs.replace(header, output=output) for output in changed_fields(header.output)]
    headers += [msgspec.structs.replace(header, recipe={}), msgspec.structs.replace(header, sites={})]
    for i, op in enumerate(header.ops):
        for other in changed_fields(op):
            headers.append(msgspec.structs.replace(header, ops=(*header.ops[:i], other, *header.ops[i + 1 :])))
    fingerprints = {Program(h, tiny.constants).fingerprint() for h in (header, *headers)}
    assert len(headers) > 50 and len(fingerprints) == len(headers) + 1


def test_the_file_is_safetensors_with_the_program_in_its_metadata(tiny: Program, tmp_path: Path) -> None:
    path = tmp_path / "p.fqvit"
    tiny.save(path)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    table = json.loads(raw[8 : 8 + length])
    metadata = table.pop("__metadata__")
    assert set(metadata) == {"fqvit", "fingerprint"} and metadata["fingerprint"] == tiny.fingerprint()
    header = json.loads(metadata["fqvit"])
    assert header["version"] == 1 and header["images"] == 12 and header["recipe"]["name"] == "fq-vit"
    assert set(table) == set(tiny.constants)
    assert {entry["dtype"] for entry in table.values()} <= {"U8", "I8", "U16", "I16", "I32"}


def test_no_op_of_a_saved_program_holds_a_float(tiny: Program) -> None:
    def numbers(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [n for v in value.values() for n in numbers(v)]
        return [n for v in value for n in numbers(v)] if isinstance(value, list) else [value]

    ops = json.loads(msgspec.json.encode(tiny.ops))
    assert not [n for n in numbers(ops) if isinstance(n, float)]


def test_a_program_that_does_not_verify_is_not_saved(tiny: Program, tmp_path: Path) -> None:
    constants = {**tiny.constants, "stray": np.ones(2, np.float32)}
    with pytest.raises(FqvitError, match="'stray' is float32"):
        Program(tiny.header, constants).save(tmp_path / "p.fqvit")
    assert not list(tmp_path.iterdir())


def test_loading_a_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match=r"nothing\.fqvit: no such file"):
        Program.load(tmp_path / "nothing.fqvit")
    with pytest.raises(FqvitError, match="no such file"):
        Program.load(tmp_path)


def test_data_is_aligned_to_8_bytes_with_minimal_padding() -> None:
    for length in range(1, 10):
        raw = container(PROGRAM, b"x" * length, "", {"c": np.zeros(1, np.int32)})
        (size,) = struct.unpack("<Q", raw[:8])
        header = raw[8 : 8 + size]
        assert size % 8 == 0 and size - len(header.rstrip(b" ")) < 8 and len(raw) == 8 + size + 4
        json.loads(header)


def test_text_is_written_as_utf_8_without_escapes() -> None:
    assert "é".encode() in container(PROGRAM, '{"source":"é"}'.encode(), "", {})


def test_kind_of_distinguishes_programs_and_detectors(tiny: Program, tmp_path: Path) -> None:
    program, detector, weights, nothing = (tmp_path / name for name in ("p.fqvit", "d.fqvit", "w.safetensors", "none"))
    tiny.save(program)
    write_container(detector, DETECTOR, b"{}", "", {})
    weights.write_bytes(serialize({"w": np.zeros(2, np.int8)}))  # has no metadata
    assert [kind_of(path) for path in (program, detector, weights, nothing)] == [PROGRAM, DETECTOR, PROGRAM, PROGRAM]
    with pytest.raises(FqvitError, match=r"d\.fqvit: holds a detector"):
        Program.load(detector)
    with pytest.raises(FqvitError, match=r"p\.fqvit: holds a classifier"):
        read_metadata(program, DETECTOR)
    with pytest.raises(FqvitError, match=r"w\.safetensors: safetensors, but not a quantized program"):
        Program.load(weights)


def test_an_opened_file_caches_one_constant_and_closes(tiny: Program, tmp_path: Path) -> None:
    tiny.save(tmp_path / "p.fqvit")
    with FileConstants(tmp_path / "p.fqvit") as constants:
        first, second = list(constants)[:2]
        found = constants[first]
        assert constants[first] is found
        constants[second]
        assert constants[first] is not found
    with pytest.raises(ValueError, match="closed"):
        constants[second]
