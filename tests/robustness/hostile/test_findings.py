"""Regression tests for the faults found by fuzzing and code review, one test per fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fqvit.detect.fixed import compatibility, reference
from fqvit.detect.images import prepare
from fqvit.detect.model.load import load_detector
from fqvit.detect.program import DetectorProgram
from fqvit.detect.resize import resized
from fqvit.detect.results import read_results
from fqvit.errors import LONGEST, FqvitError
from fqvit.ir.program import Header, Move, Program
from fqvit.lowering import grids
from fqvit.models.checkpoints.checkpoint import read_checkpoint
from fqvit.runtime.memory import live_bytes
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference
from tests.robustness.fuzz.seeds import golden, seeds_of
from tests.robustness.hostile.allocated import at_most
from tests.robustness.hostile.containers import DETECTOR, rewritten
from tests.robustness.hostile.small_programs import file_of, header_of


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.fqvit"
    path.write_bytes(golden()["tiny_v1.fqvit"])
    return path


def test_an_error_is_one_line_without_control_characters() -> None:
    assert str(FqvitError("a\nb\x1b[2J\x85c\u2028d: é is fine.")) == r"a\nb\x1b[2J\x85c\u2028d: é is fine."
    assert len(str(FqvitError("x" * 10**6))) <= LONGEST


def test_a_newline_in_the_name_of_a_field_is_escaped(program: Path) -> None:
    program.write_bytes(rewritten(program.read_bytes(), lambda header, _: header["preprocess"].update({"a\n": 1})))
    for load in (Program.load, Engine):
        with pytest.raises(FqvitError, match=r"tiny\.fqvit: preprocess: .*unknown field '?a\\n'?\."):
            load(program)


def test_the_error_for_an_unknown_instruction_set_names_its_origin(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FqvitError, match="^isa: instruction set abacus: not in this build"):
        Engine(program, isa="abacus")
    monkeypatch.setenv("FQVIT_ISA", "beads")
    with pytest.raises(FqvitError, match="^FQVIT_ISA: instruction set beads"):
        Engine(program)
    with pytest.raises(FqvitError, match="^isa: instruction set abacus"):
        Engine(program, isa="abacus")
    assert Engine(program, isa="scalar").isa == "scalar"


def test_the_error_for_too_much_memory_names_the_file(program: Path) -> None:
    with pytest.raises(FqvitError, match=r"tiny\.fqvit: its buffers need 0 MiB per image, at most 0 MiB are allowed"):
        Engine(program, 1, most_bytes=1)


@pytest.mark.parametrize(
    "op",
    [
        {"op": "add", "y": "y", "terms": [{"x": "flat", "mult": 1, "zero": 1}] * 2, "shift": 1, "y_zero": 1},
        {"op": "lookup", "y": "y", "x": "flat"},
    ],
    ids=lambda op: op["op"],
)
def test_the_number_of_channels_is_limited(op: dict[str, Any], tmp_path: Path) -> None:
    path, flat = tmp_path / "x.fqvit", {"op": "permute", "y": "flat", "x": "pixels", "view": [1 << 26], "perm": [0]}
    header = header_of([flat, op], {"buffer": "y", "kind": "pooled", "scale": 1.0}, image=(8192, 8192, 1))
    path.write_bytes(file_of(header, {"y.table": np.arange(256).astype(np.uint8)}))
    for load in (Program.load, Engine):
        with pytest.raises(FqvitError, match=r"x\.fqvit: y: too many channels: 67108864, at most 1048576"):
            load(path)


def test_too_many_ops_are_rejected(program: Path) -> None:
    def repeat(header: dict[str, Any], _: object) -> None:
        header["ops"] = [header["ops"][0]] * 8193

    program.write_bytes(rewritten(program.read_bytes(), repeat))
    with pytest.raises(FqvitError, match=r"tiny\.fqvit: ops: expected array of length <= 8192"):
        Program.load(program)
    with pytest.raises(FqvitError, match=r"tiny\.fqvit: ops: 8193 elements, expected at most 8192"):
        Engine(program)


def test_8192_ops_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.fqvit"
    ops = [{"op": "permute", "y": f"y{i}", "x": "pixels", "view": [1], "perm": [0]} for i in range(8192)]
    path.write_bytes(file_of(header_of(ops, {"buffer": "y0", "kind": "pooled", "scale": 1.0}, image=(1, 1, 1)), {}))
    Program.load(path)
    assert Engine(path, 1).run(np.full((1, 1, 1, 1), 7, np.uint8)) == 7


@pytest.mark.parametrize("name", ["backbone.layers.99999999.blocks.0.norm1.bias", "roi_head.bbox_head.99999999.fc_cls.bias"])
def test_a_detector_block_with_a_huge_index_is_rejected(name: str, tmp_path: Path) -> None:
    (tmp_path / "d.safetensors").write_bytes(seeds_of("safetensors")["detector.safetensors"])
    tensors = read_checkpoint(tmp_path / "d.safetensors").tensors
    save_file({**tensors, name: torch.zeros(1)}, tmp_path / "d.safetensors")
    with pytest.raises(FqvitError, match=r"d\.safetensors: .*has a block or stage number above 99"):
        load_detector(tmp_path / "d.safetensors")


def test_a_window_of_1000_x_1000_tokens_is_rejected_before_pairs_of_tokens_are_computed(tmp_path: Path) -> None:
    (tmp_path / "d.safetensors").write_bytes(seeds_of("safetensors")["detector.safetensors"])
    tensors = read_checkpoint(tmp_path / "d.safetensors").tensors
    wide = {name: torch.zeros(1999**2, x.shape[1], dtype=torch.int8) for name, x in tensors.items() if "bias_table" in name}
    save_file({**tensors, **wide}, tmp_path / "d.safetensors")
    with pytest.raises(FqvitError, match=r"d\.safetensors: .*with one window <= 64"):
        load_detector(tmp_path / "d.safetensors")


def test_the_error_for_impossible_masks_in_results_names_the_file(tmp_path: Path) -> None:
    rows = json.loads(seeds_of("results")["two.json"])
    rows[1]["segmentation"]["size"] = [8, 10]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    with pytest.raises(FqvitError, match=r"r\.json: result 1: run lengths: 72 pixels in total, expected 8 x 10"):
        read_results(tmp_path / "r.json")


def test_a_head_that_cannot_be_batched_is_rejected_when_it_is_loaded(tmp_path: Path) -> None:
    def turn(header: dict[str, Any], _: object) -> None:
        op = next(op for op in header["masks"][0]["ops"] if op["op"] == "permute" and len(op["view"]) == 3)
        op["view"], op["perm"] = [1, *op["view"]], [1, 0, 2, 3]
        op["shape"] = op["view"][1:]

    path = tmp_path / "d.fqvit"
    path.write_bytes(rewritten(seeds_of("detector")["tiny.fqvit"], turn, DETECTOR))
    with pytest.raises(FqvitError, match=r"d\.fqvit: .*cannot run on a batch of RoIs"):
        DetectorProgram.load(path)


def template(side: int, op: dict[str, Any], move: Move) -> Program:
    """Make a program with one op on the pixels of a large image. The `move` of the op does not match its constants."""
    raw = {"version": 1, "model": "x", "ops": [op], "sites": {}, "recipe": {}, "source": "", "images": 1}
    shape = {"height": side, "width": side, "channels": 1, "resize": 1, "interpolation": "bicubic", "mean": [0.5], "std": [0.5]}
    raw |= {"preprocess": shape, "output": {"buffer": "y", "kind": "tokens", "scale": 1.0}, "moves": {"y": move}}
    return Program(msgspec.convert(raw, Header), {"rows": np.zeros(1, np.int32)})


@pytest.mark.parametrize("kind", ["neighbours", "windows", "tokens", "second", "merge"])
def test_a_move_that_does_not_match_its_constants_allocates_no_memory(kind: Any) -> None:
    program = template(8192, {"op": "take", "y": "y", "x": "pixels", "index": "rows"}, Move(kind=kind, window=256, shift=1))
    program.verify()
    with at_most(1e6), pytest.raises(FqvitError, match="its stored indices differ from those that its move gives"):
        resized(program, 8192, 8192)


def test_regions_of_a_window_allocate_no_memory_for_pairs_of_tokens() -> None:
    with at_most(20e6):
        assert grids.regions((300, 200), 256, 1).shape == (2, 1 << 16)


def test_a_move_with_too_many_rows_is_rejected() -> None:
    program = template(32, {"op": "take", "y": "y", "x": "pixels", "index": "rows"}, Move(kind="neighbours"))
    with pytest.raises(FqvitError, match="y: the image is too large"):
        resized(program, 8192, 8192)


def test_the_reference_has_the_same_memory_limit_as_the_engine(program: Path) -> None:
    whole = Program.load(program)
    with pytest.raises(FqvitError, match=r"^vit: its buffers need 0 MiB per image, at most 0 MiB are allowed"):
        Reference(whole, most_bytes=1)
    most = live_bytes(whole, whole.verify().buffers)
    Reference(whole, most_bytes=most)
    with pytest.raises(FqvitError, match="its buffers need"):
        Reference(whole, most_bytes=most - 1)


def test_live_bytes_equal_the_peak_memory_of_the_reference(program: Path) -> None:
    whole = Program.load(program)
    reference, seen = Reference(whole), [0]
    alive = {"pixels": 12 * 12 * 3}

    def visit(name: str, codes: Any) -> None:
        alive[name] = codes.nbytes
        seen.append(sum(alive.values()))
        i = next(i for i, op in enumerate(whole.ops) if op.y == name)
        for read in whole.ops[i].inputs():
            if reference.last_use[read] == i and read != whole.header.output.buffer:
                alive.pop(read, None)

    reference.run(np.zeros((1, 12, 12, 3), np.uint8), visit)
    assert max(seen) == live_bytes(whole, whole.verify().buffers)


def test_a_head_with_large_outputs_runs_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.fqvit"
    path.write_bytes(seeds_of("detector")["tiny.fqvit"])
    detector = DetectorProgram.load(path)
    image = prepare(Image.fromarray(np.random.default_rng(1).integers(0, 256, (24, 32, 3)).astype(np.uint8)), detector.settings)
    expected = detector.ready(1).detect(image)
    monkeypatch.setattr(reference, "BYTES_AT_ONCE", 1)
    found = detector.ready(1, "reference").detect(image)
    assert len(found.boxes) > 1
    for name in ("boxes", "scores", "labels", "probabilities"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_a_detector_with_too_many_scores_is_rejected_by_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.fqvit"
    path.write_bytes(seeds_of("detector")["tiny.fqvit"])
    detector = DetectorProgram.load(path)
    monkeypatch.setattr(compatibility, "MAX_SCORES", detector.between.proposals * (detector.classes + 1) - 1)
    with pytest.raises(FqvitError, match=r"d\.fqvit: detector: .* scores per image, expected at most"):
        DetectorProgram.load(path)
