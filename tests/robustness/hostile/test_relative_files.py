"""Hostile files with the ops and fields of the recipe `fqvit`: relative attention codes, per-channel scales, 16-bit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fqvit.ir.program import Program
from fqvit.lowering.lower import lower
from tests.factories import calibration_of, float_model
from tests.robustness.hostile.allocated import at_most
from tests.robustness.hostile.test_fqvit_files import Change, Json, Tensors, add_op, assert_rejected, first, rewritten, set_op


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A program of a Swin with masks and padding."""
    path = tmp_path_factory.mktemp("hostile") / "swin.fqvit"
    model = float_model("padded swin")
    lower(model, calibration_of(model, "fqvit")).save(path)
    return path.read_bytes()


def masked(header: Json, op: str = "row_codes") -> Json:
    return next(o for o in header["ops"] if o["op"] == op and "region" in o)


def reader_of(header: Json, name: str) -> Json:
    return next(o for o in header["ops"] if name in (o.get("a"), o.get("x")))


def set_tensor(find: Callable[[Json], str], dtype: str, shape: list[int], value: int = 0) -> Change:
    """Replace a constant with one whose elements are all `value`."""

    def change(header: Json, tensors: Tensors) -> None:
        kind = {"U8": np.uint8, "U16": np.uint16, "I8": np.int8, "I16": np.int16, "I32": np.int32}[dtype]
        tensors[find(header)] = (dtype, shape, np.full(shape, value, kind).tobytes())

    return change


def set_site(role: str, at: int, value: Any) -> Change:
    """Set one field of the first site with that role; sites are stored as arrays."""

    def change(header: Json, _: Tensors) -> None:
        site = next(s for s in header["sites"].values() if s[0] == role)
        site.extend([None, False, False, None, []][len(site) - 4 :])
        site[at] = value

    return change


def unmasked_levels(header: Json, _: Tensors) -> None:
    op = reader_of(header, masked(header)["y"])
    op["levels"] = [level or 1 for level in op["levels"]]


def table_of(op: str) -> Callable[[Json], str]:
    return lambda header: f"{first(header, op)['y']}.table"


def alpha_of(header: Json) -> str:
    return str(next(o for o in header["ops"] if o["op"] == "lookup" and "alpha" in o)["alpha"])


ATTEND = r"\S+\.context\.heads: "
HOSTILE: dict[str, tuple[Change, str]] = {
    "levels that are a string": (set_op("attend", levels="16"), r"ops\[\d+\]\.levels: expected array, got str"),
    "float levels": (set_op("attend", levels=[1.0] * 16), r"ops\[\d+\]\.levels\[\S+\]: expected int, got float"),
    "boolean levels": (set_op("attend", levels=[True] * 16), r"ops\[\d+\]\.levels\[\S+\]: expected int, got bool"),
    "null levels": (set_op("attend", levels=None), r"ops\[\d+\]\.levels: expected array, got null"),
    "no levels": (set_op("attend", levels=[]), ATTEND + "a row of .* may lack the largest weight"),
    "one level": (set_op("attend", levels=[1]), ATTEND + "1 levels for codes up to 15"),
    "100,000 levels": (set_op("attend", levels=[1] * 100_000), ATTEND + "100000 levels for codes up to 15"),
    "levels of 10^40": (set_op("attend", levels=[10**40] * 16), "levels"),
    "levels of 2^62": (set_op("attend", levels=[2**62] * 16), ATTEND + "levels must be in"),
    "negative levels": (set_op("attend", levels=[-1] * 16), ATTEND + "levels must be in"),
    "levels of 0": (set_op("attend", levels=[0] * 16), ATTEND + "levels must be in"),
    "increasing levels": (set_op("attend", levels=list(range(16))), ATTEND + "a row of .* may lack the largest weight"),
    "a masked code with a weight": (unmasked_levels, ATTEND + ".* is masked by a code whose weight is not 0"),
    "an attend of pixels": (set_op("attend", a="pixels", v="pixels"), ATTEND),
    "an attend of itself": (
        add_op(op="attend", y="z", a="z", v="z", mult=1, shift=1),
        "z: reads 'z' before any op writes it",
    ),
    "a mult of 2^29": (set_op("attend", mult=2**29), ATTEND + "mult must be in"),
    "a mult of 2^63": (set_op("attend", mult=2**63), r"ops\[\d+\]\.mult: expected int <= "),
    "shift 63": (set_op("attend", shift=63), ATTEND + "shift must be in"),
    "a zero point of 10^30": (set_op("attend", v_zero=10**30), "."),
    "a zero point of V that is a string": (set_op("attend", v_zero="zero.0"), r"ops\[\d+\]\.v_zero: expected int, got str"),
    "an unknown field in attend": (set_op("attend", a_bits=4), r"ops\[\d+\]: .*unknown field a_bits"),
    "an unknown field in row_codes": (set_op("row_codes", bits=4), r"ops\[\d+\]: .*unknown field bits"),
    "attention codes beyond the levels": (
        set_tensor(table_of("row_codes"), "U8", [4], 16),
        ATTEND + "16 levels for codes up to 16",
    ),
    "rows without the code of largest weight": (
        set_tensor(table_of("row_codes"), "U8", [4], 3),
        ATTEND + "a row of .* may lack",
    ),
    "a table of 32 bits": (set_tensor(table_of("row_codes"), "I32", [4]), r"softmax: constant '\S+\.table' is int32"),
    "regions with one axis": (
        lambda header, tensors: tensors.update({masked(header)["region"]: ("U8", [4], bytes(4))}),
        r"constant 'region\.0' has shape",
    ),
    "more shifts than zero points": (set_tensor(alpha_of, "U8", [16], 15), "zero points, expected 16: one per value of alpha"),
    "shifts above 15": (set_tensor(alpha_of, "U8", [16], 255), "has a shift above 15"),
    "shifts for another number of channels": (set_tensor(alpha_of, "U8", [15]), r"constant 'alpha\.0' has shape"),
    "shifts of 16 bits": (set_tensor(alpha_of, "U16", [16]), r"constant 'alpha\.0' is uint16"),
    "a number instead of the name of the shifts": (set_op("lookup", alpha=0), r"ops\[\d+\]\.alpha: expected .*, got int"),
    "missing shifts": (set_op("lookup", alpha="none"), "constant 'none' is missing"),
    "a table for codes of fewer bits": (set_tensor(table_of("lookup"), "I16", [256]), r"constant '\S+\.table' has shape"),
    "codes of 17 bits": (set_op("add", bits=17), "bits is 17"),
    "a site of 17 bits": (set_site("residual", 1, 17), r"sites\S*: expected int <= 16"),
    "a site of fewer bits than its codes": (set_site("residual", 1, 8), r"site \S+: 8 bits for codes up to 65535"),
    "missing per-channel scales of a site": (set_site("norm", 7, "none"), r"site \S+: constant 'none' is missing"),
    "8-bit per-channel scales of a site": (set_site("norm", 7, "alpha.0"), r"site \S+: constant 'alpha\.0' "),
    "missing zero points of a site": (set_site("norm", 3, "none"), r"site \S+: constant 'none' is missing"),
    "zero points of a site given by name without per-channel scales": (
        set_site("scores", 3, "z"),
        r"site \S+: zero names a constant, but there are no steps",
    ),
    "a site with per-channel scales and levels": (
        set_site("norm", 8, [1] * 256),
        r"site \S+: more than one of log2, steps and levels",
    ),
    "a site's levels of 0": (set_site("attention", 8, [0] * 16), r"site \S+: no level above 0"),
    "a site's levels of 2^16": (set_site("attention", 8, [2**16] * 16), r"sites\S*: expected int <= 65535"),
    "too few levels of a site": (set_site("attention", 8, [1] * 15), r"site \S+: 15 levels for codes up to 15"),
    "a site of ten fields": (
        lambda header, _: next(s for s in header["sites"].values() if s[0] == "attention").append(0),
        "array of at most length 9",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_program_is_rejected_with_a_one_line_error(case: str, original: bytes, tmp_path: Path) -> None:
    change, match = HOSTILE[case]
    raw = rewritten(original, change)
    with at_most(50e6):
        assert_rejected(raw, tmp_path, match)


def test_the_original_loads_and_contains_every_part_that_is_changed(original: bytes, tmp_path: Path) -> None:
    path = tmp_path / "good.fqvit"
    path.write_bytes(rewritten(original, set_op("attend", mult=0)))
    program = Program.load(path)
    tags = {str(type(op).__struct_config__.tag) for op in program.ops}
    assert {"row_codes", "attend", "lookup"} <= tags
    assert "alpha.0" in program.constants and "region.0" in program.constants
    assert {value.dtype for value in program.verify().buffers.values()} == {"u8", "u16", "i32"}
