"""Test that committed files of every format version load and give their stored outputs.

If a test fails, fix the code, not the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from fqvit.detect.program import DetectorProgram
from fqvit.ir.attention import Attend, MatMul, RowCodes
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup
from fqvit.ir.program import AnyOp, Program
from fqvit.models.requests import MODIFIERS, NAMES
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference, run
from tests.factories import assert_same

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*_v1.fqvit"))
NEWER = sorted(HERE.glob("*_v2.fqvit"))
OUTPUTS = sorted((HERE / "outputs").glob("*_v1.fqvit"))
DETECTORS = [HERE / "detectors" / f"{name}_v1.fqvit" for name in ("cascade", "mask_rcnn", "opencv")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_file_of_version_1_gives_its_stored_outputs(path: Path, library: Any) -> None:
    expected = np.load(path.with_suffix(".npz"))
    program = Program.load(path)
    assert program.header.version == 1 and program.fingerprint() == str(expected["fingerprint"])
    output = run(program, expected["images"], library)
    assert_same(output, expected["output"], f"{path.stem}: computed and stored")


@pytest.mark.parametrize("path", NEWER, ids=lambda path: path.stem)
@pytest.mark.parametrize("backend", ["numpy", "torch", "native"])
def test_a_file_of_version_2_gives_its_stored_outputs(path: Path, backend: Any) -> None:
    expected = np.load(path.with_suffix(".npz"))
    program = Program.load(path)
    assert program.header.version == 2 and program.fingerprint() == str(expected["fingerprint"])
    native = backend == "native"
    output = Engine(path, 2).run(expected["images"]) if native else run(program, expected["images"], backend)
    assert_same(output, expected["output"], f"{path.stem}: computed and stored")


def test_the_files_of_version_2_have_weights_of_every_width_and_format() -> None:
    assert [path.stem for path in NEWER] == ["codebooks_v2", "narrow_v2", "widths_v2"]
    linears = [op for path in NEWER for op in Program.load(path).ops if isinstance(op, Linear)]
    formats = {(False, False), (True, False), (True, True)}
    assert {(op.width, bool(op.group), bool(op.codebooks)) for op in linears} == {(w, *f) for w in range(2, 8) for f in formats}
    assert {(bool(op.group), bool(op.codebooks)) for op in linears if op.weights_of} == formats


@pytest.mark.parametrize("path", OUTPUTS, ids=lambda path: path.stem)
def test_a_file_with_several_outputs_gives_its_stored_outputs(path: Path) -> None:
    expected = np.load(path.with_suffix(".npz"))
    program = Program.load(path)
    assert program.header.version == 1 and program.fingerprint() == str(expected["fingerprint"])
    for found in (Reference(program).run_all(expected["images"]), Engine(path, 2).run_all(expected["images"])):
        for i, array in enumerate(found):
            assert_same(array, expected[f"output{i}"], f"{path.stem}: output {i}, computed and stored")
        assert f"output{i + 1}" not in expected


def test_the_files_with_several_outputs_have_every_modifier() -> None:
    labels = [output.label for path in OUTPUTS for output in Program.load(path).header.outputs]
    assert {part for label in labels for part in label.split(":")[1:]} == {*MODIFIERS} - {"i32"}
    assert {label.split(":")[0].partition("@")[0] for label in labels} == {*NAMES}


@pytest.mark.parametrize("path", DETECTORS, ids=lambda path: path.stem)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_detector_of_version_1_gives_its_stored_detections(path: Path, backend: Any) -> None:
    expected = np.load(path.with_suffix(".npz"))
    program = DetectorProgram.load(path)
    assert program.header.version == 1 and program.fingerprint() == str(expected["fingerprint"])
    detector = program.ready(2, backend)
    for i, picture in enumerate(expected["pictures"]):
        found = detector.detect(program.prepare(Image.fromarray(picture)))
        for part in ("boxes", "scores", "labels", "probabilities"):
            assert_same(getattr(found, part), expected[f"{part}{i}"], f"{path.stem}: {part}, computed and stored")
        assert_same(
            np.packbits(np.array(list(found.masks()))), expected[f"masks{i}"], f"{path.stem}: masks, computed and stored"
        )


def test_the_detectors_of_version_1_use_every_resize_rule() -> None:
    assert [DetectorProgram.load(path).resize for path in DETECTORS] == ["rounded", "rounded", "opencv"]


def test_the_files_of_version_1_use_every_op() -> None:
    assert [path.stem for path in FILES] == [
        "cosine_v1",
        "elementwise_v1",
        "fqvit_swin_v1",
        "fqvit_v1",
        "fraction_v1",
        "grouped_v1",
        "original_v1",
        "swin_v1",
        "tiny_v1",
        "tokens_v1",
        "uniform_v1",
    ]
    used = {type(op) for path in FILES for op in Program.load(path).ops}
    assert not [op.__name__ for op in get_args(AnyOp) if op not in used]


def test_a_file_of_version_1_has_4_bit_weights() -> None:
    assert any(isinstance(op, Linear) and op.group for op in Program.load(HERE / "grouped_v1.fqvit").ops)


def test_the_files_of_recipe_fqvit_use_all_its_fields() -> None:
    ops = [op for name in ("fqvit_v1", "fqvit_swin_v1") for op in Program.load(HERE / f"{name}.fqvit").ops]
    row_codes = [op for op in ops if isinstance(op, RowCodes)]
    assert {op.region is None for op in row_codes} == {True, False}
    assert any(isinstance(op, Attend) and len(op.levels) == 16 for op in ops)
    assert any(isinstance(op, Lookup) and op.alpha is not None for op in ops)
    assert any(isinstance(op, Add) and op.bits == 16 for op in ops)
    sites = Program.load(HERE / "fqvit_v1.fqvit").header.sites.values()
    assert any(site.steps and isinstance(site.zero, str) for site in sites) and any(site.levels for site in sites)


def test_a_file_of_version_1_has_multipliers_per_head_a_wide_index_and_uncentered_norms() -> None:
    program = Program.load(HERE / "cosine_v1.fqvit")
    (scores,) = (op for op in program.ops if isinstance(op, MatMul))
    assert isinstance(scores.mult, str) and scores.index is not None and program.constants[scores.index].dtype == np.int32
    assert not any(op.center for op in program.ops if isinstance(op, LayerNorm))


def test_class_names_of_a_file_of_version_1_are_read() -> None:
    assert Program.load(HERE / "tiny_v1.fqvit").classes == ("a", "b", "c", "d", "é")


def test_golden_files_stay_small() -> None:
    # Recipes with new ops or fields add files; files are never removed.
    assert sum(path.stat().st_size for path in HERE.rglob("*_v?.*")) < 900_000
