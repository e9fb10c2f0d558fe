"""Tests of C exports: they compile without warnings and match the reference.

See also: test_c_targets.py (other processors).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.export import c
from fqvit.export.c import text as c_text
from fqvit.export.c.plan import plan
from fqvit.ir.program import Header, Program, encode_header
from fqvit.ir.value import Scope
from fqvit.models.embedded import test_images as embedded_images
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import run as reference
from tests.export.compiled import MODEL, STRICT, Builder, outputs_of, sources
from tests.factories import assert_same, images_for
from tests.golden.test_golden import FILES, NEWER
from tests.ir.draw import STYLES, Draw
from tests.ir.test_ops import CASES
from tests.native.compilers import run, tool
from tests.runtime.programs import program_with
from tests.runtime.test_networks import lowered


@pytest.mark.parametrize("kind", ["vit", "padded swin"])
@pytest.mark.parametrize("recipe", ["fq-vit", "fqvit", "minmax", "w4", "fqvit 6/6/4"])
def test_small_networks_match_the_reference(kind: str, recipe: str, builder: Builder) -> None:
    model, _, program, _ = lowered(kind, recipe)
    images = images_for(model.preprocess, 4, 1)
    assert_same(builder.outputs(program, images), reference(program, images), f"{kind}, {recipe}")


@pytest.mark.parametrize("features", ["tokens", "pooled"])
def test_features_match_the_reference(features: str, builder: Builder) -> None:
    model, _, program, _ = lowered("distilled", "fqvit", features)
    images = images_for(model.preprocess, 2, 1)
    assert_same(builder.outputs(program, images), reference(program, images).reshape(2, -1), features)


@pytest.mark.parametrize("path", [*FILES, *NEWER], ids=lambda path: path.stem)
def test_golden_programs_give_their_recorded_outputs(path: Path, builder: Builder) -> None:
    expected = np.load(path.with_suffix(".npz"))
    images = expected["images"]
    output = builder.outputs(Program.load(path), images, *builder.sanitizers)
    assert_same(output, expected["output"].reshape(len(images), -1), path.stem)


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_every_op_matches_the_reference_without_undefined_behaviour(kind: type, builder: Builder) -> None:
    done = 0
    for seed in range(20):
        draw = Draw(np.random.default_rng(seed), STYLES[seed % len(STYLES)])
        op = CASES[kind](draw)
        if all(proof.holds for proof in op.infer(Scope(draw.values, draw.constants, op.y))[1]):
            program, images = program_with(draw, op)
            output = builder.outputs(program, images, *builder.sanitizers)
            assert_same(output, reference(program, images).reshape(len(images), -1), f"{op}")
            done += 1
            if done == 3:
                return
    assert done > 0


def test_make_builds_a_program_that_classifies_the_embedded_images(
    fmnist_vit: Program, exported_vit: Path, builder: Builder, tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    shutil.copytree(exported_vit, folder)
    run(tool("make"), "-s", "-C", folder, f"CC={builder.command}", "CFLAGS=-O1")
    images = embedded_images()[0][[0, 333, 999]]
    expected = reference(fmnist_vit, images)
    assert_same(Engine(fmnist_vit, 1).run(images), expected, "engine")
    for i, image in enumerate(images):
        (tmp_path / "image.rgb").write_bytes(image.tobytes())
        printed = run(folder / "classify", tmp_path / "image.rgb")
        assert printed == "".join(f"{score}\n" for score in expected[i])
    sizes = dict(line.split() for line in run(folder / "classify", "--sizes").splitlines())
    assert sizes["FQVIT_PIXELS"] == "784" and sizes["FQVIT_OUTPUTS"] == "10"
    assert f"#define FQVIT_ARENA_BYTES {sizes['FQVIT_ARENA_BYTES']} " in (folder / "model.h").read_text()
    for content in (b"", bytes(783), bytes(785)):
        (tmp_path / "image.rgb").write_bytes(content)
        assert run(folder / "classify", tmp_path / "image.rgb", code=2) == ""
    c.export(fmnist_vit, folder)  # replaces the build products of make, too
    assert not (folder / "classify").exists()


@pytest.mark.parametrize("flags", ["gcc", "clang", "gcc -mgeneral-regs-only"])
def test_the_model_compiles_without_warnings_and_without_float_registers(flags: str, tmp_path: Path) -> None:
    name, *more = flags.split()
    command = tool(name)
    if more and run(command, "-dumpmachine").split("-")[0] != "x86_64":
        pytest.skip("needs x86-64")
    for kind, recipe in (("vit", "fqvit"), ("padded swin", "w4")):
        folder = tmp_path / kind
        c.export(lowered(kind, recipe)[2], folder)
        for source in sources(folder):
            run(command, *STRICT, *more, "-O1", "-c", source, "-o", tmp_path / "out.o")


def test_the_code_uses_no_floats_and_no_libc(exported_vit: Path) -> None:
    for path in sources(exported_vit):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        assert set(re.findall(r"#include <(\w+)\.h>", text)) <= {"stdint", "stddef"}
        assert re.findall(r"\b(?:float|double|malloc|mem\w+|\d+\.\d+)\b", text) == []


def test_the_code_names_its_sites_and_is_short_enough_to_read(exported_vit: Path, fmnist_vit: Program) -> None:
    text = (exported_vit / "model.c").read_text()
    assert [name for name in fmnist_vit.header.sites if name != "pool" and f"/* {name}: " not in text] == []
    assert len(text.splitlines()) < 1200 and max(map(len, text.splitlines())) < 250


def test_scores_and_hidden_activations_never_exist_as_whole_buffers(fmnist_vit: Program) -> None:
    planned = plan(fmnist_vit, fmnist_vit.verify())
    kinds = {name: memory.kind for name, memory in planned.allocations.items()}
    assert kinds["blocks.0.attn.scores"] == kinds["blocks.0.attn.softmax"] == kinds["blocks.0.mlp.fc1"] == "row"
    assert kinds["blocks.0.attn.k"] == kinds["blocks.0.attn.v"] == "slice"
    assert planned.allocations["embed"].offset == planned.allocations["blocks.2.add2"].offset  # one residual stream
    assert planned.arena_bytes < 33000


def test_large_constants_are_split_into_several_files(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(c_text, "NUMBERS_PER_FILE", 1000)
    model, _, program, _ = lowered("vit", "fqvit")
    c.export(program, tmp_path / "c")
    assert len(list((tmp_path / "c").glob("weights*.c"))) > 5
    images = images_for(model.preprocess, 1, 1)
    assert_same(builder.outputs(program, images), reference(program, images), "many files")


def renamed(program: Program, names: dict[str, str]) -> Program:
    """Return the same program with other names for buffers and for the constants that belong to them."""

    def new(text: str) -> str:
        old = max((name for name in names if text == name or text.startswith(f"{name}.")), key=len, default=None)
        return text if old is None else names[old] + text[len(old) :]

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return new(value)
        if isinstance(value, dict):
            return {(new(key) if isinstance(key, str) else key): walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    header = msgspec.json.decode(encode_header(program.header))
    header |= {key: walk(header[key]) for key in ("ops", "output", "sites")}
    constants = {new(name): array for name, array in program.constants.items()}
    return Program(msgspec.convert(header, Header), constants)


def test_names_cannot_end_comments_or_collide(builder: Builder) -> None:
    model, _, program, _ = lowered("vit", "fqvit")
    names = {"norm": "*/ #error x /*", "pool": "??/\n#error", "head": "int", "embed": "", "blocks.0.norm1": "a.b"}
    names |= {"blocks.0.norm2": "a_b", "blocks.1.norm1": "A_B", "blocks.1.norm2": "é" * 300, "blocks.1.add1": "\\"}
    other = renamed(called(program, "m */ \\\n#error"), names)
    other.verify()
    images = images_for(model.preprocess, 1, 1)
    assert_same(builder.outputs(other, images), reference(program, images), "renamed")


BOTH = """\
#include <stdio.h>
#include "%s/model.h"
#include "%s/model.h"
static uint8_t pixels[SHOES_PIXELS + BIRDS_PIXELS], arena[SHOES_ARENA_BYTES + BIRDS_ARENA_BYTES];
static int32_t output[SHOES_OUTPUTS + BIRDS_OUTPUTS];
int main(void)
{
    if (fread(pixels, 1, sizeof pixels, stdin) != sizeof pixels) return 1;
    shoes_run(pixels, arena, output);
    birds_run(pixels + SHOES_PIXELS, arena, output + SHOES_OUTPUTS);
    for (int i = 0; i < SHOES_OUTPUTS + BIRDS_OUTPUTS; ++i) printf("%%ld\\n", (long)output[i]);
    return 0;
}
"""


def test_two_models_with_prefixes_link_into_one_program(builder: Builder, tmp_path: Path) -> None:
    files, images, expected = [], b"", []
    for name, kind in (("shoes", "vit"), ("birds", "padded swin")):
        model, _, program, _ = lowered(kind, "fqvit")
        c.export(program, tmp_path / name, prefix=name)
        files += [path for path in sources(tmp_path / name) if path.name != "fqvit_ops.c"]
        image = images_for(model.preprocess, 1, 1)
        images, expected = images + image.tobytes(), [*expected, *reference(program, image)[0]]
    (tmp_path / "both.c").write_text(BOTH % (tmp_path / "shoes", tmp_path / "birds"))
    files += [tmp_path / "both.c", tmp_path / "shoes" / "fqvit_ops.c"]
    run(builder.command, *STRICT, *files, "-o", tmp_path / "both")
    assert_same(outputs_of([tmp_path / "both"], np.frombuffer(images, np.uint8)[None])[0], np.array(expected), "both")
    run(tool("make"), "-s", "-C", tmp_path / "birds", f"CC={builder.command}", "CFLAGS=-O1")
    assert run(tmp_path / "birds" / "classify", "--sizes").startswith("BIRDS_PIXELS ")


@pytest.mark.parametrize("prefix", ["", "Shoes", "1st", "a-b", "fqvit", "fqvit_x", "é", "a" * 32, "a;b"])
def test_invalid_prefixes_are_rejected(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match="prefix .*expected up to 31 lower-case letters"):
        c.export(lowered("vit", "fqvit")[2], tmp_path / "c", prefix=prefix)
    assert list(tmp_path.iterdir()) == []


def called(program: Program, name: str) -> Program:
    return Program(msgspec.structs.replace(program.header, model=name), program.constants)


def test_two_exports_of_a_program_are_equal(fmnist_vit: Program, exported_vit: Path, tmp_path: Path) -> None:
    c.export(fmnist_vit, tmp_path / "again")
    for path in exported_vit.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    assert {*MODEL, "model.h", "main.c", "Makefile", "README.txt"} <= {path.name for path in exported_vit.iterdir()}


def test_folders_that_fqvit_did_not_write_are_rejected_and_unchanged(tmp_path: Path) -> None:
    program = lowered("vit", "fqvit")[2]
    for name in ("notes.txt", "manifest.json"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(FqvitError, match="not an export of fqvit"):
            c.export(program, folder)
        assert [path.name for path in folder.iterdir()] == [name]
    c.export(program, tmp_path / "own")
    (tmp_path / "own" / "mine.c").write_text("")
    with pytest.raises(FqvitError, match=r"'mine\.c', which fqvit did not write"):
        c.export(program, tmp_path / "own")
    (tmp_path / "file").write_text("")
    with pytest.raises(FqvitError, match="is a file"):
        c.export(program, tmp_path / "file")
    with pytest.raises(FqvitError, match="Create the folder first"):
        c.export(program, tmp_path / "nowhere" / "c")


def test_a_failed_export_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = lowered("vit", "fqvit")[2]
    monkeypatch.setattr("fqvit.export.c.writer.write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        c.export(program, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
