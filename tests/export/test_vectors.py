"""Tests of golden vectors: they are complete, equal the reference's buffers and suffice to recompute every op."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from PIL import Image

from fqvit.errors import FqvitError
from fqvit.export import vectors
from fqvit.export.folder import check_free
from fqvit.ir.kit import DTYPES, kit
from fqvit.ir.program import AnyOp, Program
from tests.factories import assert_same, buffers_of, images_for
from tests.golden.test_golden import HERE
from tests.runtime.test_networks import lowered


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the manifest, the buffers and the constants. Checks every file against the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    arrays: list[dict[str, Any]] = []
    for kind in ("buffers", "constants"):
        arrays.append({})
        for name, entry in manifest[kind].items():
            path = folder / entry["file"]
            assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
            array = np.load(path, allow_pickle=False)
            assert array.dtype == DTYPES[entry["dtype"]] and list(array.shape) == entry["shape"]
            arrays[-1][name] = array
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert there == {"manifest.json", *manifest["files"]}
    return manifest, arrays[0], arrays[1]


@pytest.mark.parametrize("kind, recipe", [("vit", "fqvit"), ("padded swin", "fq-vit"), ("vit", "w4")])
def test_every_buffer_and_constant_is_exported(kind: str, recipe: str, tmp_path: Path) -> None:
    model, _, program, _ = lowered(kind, recipe)
    image = images_for(model.preprocess, 1, 1)[0]
    vectors.export(program, tmp_path / "v", image)
    manifest, buffers, constants = read(tmp_path / "v")
    expected = {"pixels": image} | {name: codes[0] for name, codes in buffers_of(program, image[None]).items()}
    assert_same(buffers, expected, "buffers")
    assert_same(constants, dict(sorted(program.constants.items())), "constants")
    assert manifest["format"] == "fqvit vectors 1" and manifest["fingerprint"] == program.fingerprint()
    assert [op["output"] for op in manifest["ops"]] == [op.y for op in program.ops]
    assert manifest["output"] == program.header.output.buffer and manifest["image"] == "pixels"
    assert set(manifest["sites"]) == set(program.header.sites)
    for name, site in manifest["sites"].items():
        assert site["bits"] == program.header.sites[name].bits


@pytest.mark.parametrize("name", ["fqvit_swin_v1", "uniform_v1", "original_v1", "tiny_v1", "elementwise_v1"])
def test_every_op_can_be_recomputed_from_its_manifest_entry(name: str, tmp_path: Path) -> None:
    program = Program.load(HERE / f"{name}.fqvit")
    vectors.export(program, tmp_path / "v")
    manifest, buffers, constants = read(tmp_path / "v")
    kinds = {op.__struct_config__.tag: op for op in get_args(AnyOp)}
    for entry in manifest["ops"]:
        op = msgspec.convert({"op": entry["op"], "y": entry["output"], **entry["fields"]}, kinds[entry["op"]])
        known = {key: constants[key] for key in entry["constants"]}
        known |= {key: buffers[key][None] for key in entry["inputs"] if key in buffers}
        assert_same(op.run(kit("numpy"), known.__getitem__)[0], buffers[op.y], f"{name} {op.y}")


def test_the_test_picture_has_fixed_pixels() -> None:
    preprocess = lowered("vit", "fqvit")[0].preprocess
    picture = vectors.test_picture(preprocess)
    assert picture.shape == (12, 12, 3) and picture.dtype == np.uint8
    assert picture[0, 0].tolist() == [0, 31, 62] and picture[11, 11, 0] == 233 and picture[3, 6, 0] == 255 - 95
    assert len(np.unique(picture)) > 60


def test_an_image_file_is_preprocessed_as_the_program_specifies(tmp_path: Path) -> None:
    model, _, program, _ = lowered("vit", "fqvit")
    Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3)).save(tmp_path / "cat.png")
    vectors.export(program, tmp_path / "v", tmp_path / "cat.png")
    manifest, buffers, _ = read(tmp_path / "v")
    with Image.open(tmp_path / "cat.png") as image:
        assert_same(buffers["pixels"], model.preprocess.apply(image), "pixels")
    assert manifest["image"] == "cat.png"


def test_invalid_images_and_folders_are_rejected_and_leave_no_files(tmp_path: Path) -> None:
    program = lowered("vit", "fqvit")[2]
    with pytest.raises(FqvitError, match=r"expected uint8 \[12, 12, 3\]"):
        vectors.export(program, tmp_path / "v", np.zeros((12, 12, 1), np.uint8))
    with pytest.raises(FqvitError, match="no such file"):
        vectors.export(program, tmp_path / "v", tmp_path / "nothing.png")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "thesis.tex").write_text("")
    with pytest.raises(FqvitError, match="not an export of fqvit"):
        vectors.export(program, tmp_path / "v")
    (tmp_path / "v" / "thesis.tex").unlink()
    for _ in range(2):  # into the empty folder, then over the first export
        vectors.export(program, tmp_path / "v")
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


def test_the_current_folder_and_its_parents_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = lowered("vit", "fqvit")[2]
    (tmp_path / "v" / "below").mkdir(parents=True)
    for folder in (tmp_path / "v", tmp_path / "v" / "below"):
        monkeypatch.chdir(folder)
        with pytest.raises(FqvitError, match="is or contains the current folder"):
            vectors.export(program, tmp_path / "v")
    assert list((tmp_path / "v").rglob("*")) == [tmp_path / "v" / "below"]


@pytest.mark.parametrize(
    "manifest", ['{"format": "mine 1", "files": []}', '{"format": 1}', "[]", '{"format": "fqvit 1", "files": [[]]}']
)
def test_a_folder_with_a_foreign_manifest_is_rejected(manifest: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(FqvitError, match="not an export of fqvit"):
        check_free(tmp_path)
