"""Compare all outputs of a program on all bit-exact backends with the reference, and choose random outputs of a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.export import vectors
from fqvit.export.onnx import model as onnx_model
from fqvit.ir.moves import Permute, Take
from fqvit.ir.program import INPUT, KINDS, AnyOp, Output, Program
from fqvit.runtime.onnx import Session
from fqvit.runtime.outputs import describe_outputs
from fqvit.runtime.reference import Reference
from tests.export.compiled import Builder
from tests.factories import assert_same
from tests.runtime.programs import ISAS, engine_of


def compare_backends(program: Program, images: NDArray[np.uint8], name: str, builder: Builder, folder: Path) -> None:
    """Compare all outputs of the engine, ONNX Runtime, compiled C and golden vectors with the reference: bits, types, names."""
    infos = describe_outputs(program, program.verify())
    wanted = dict(zip([info.name for info in infos], Reference(program).run_all(images), strict=True))

    def check(found: Any, backend: str) -> None:
        assert_same(dict(zip(wanted, found, strict=True)), wanted, f"{name}: {backend},")

    for isa in ISAS:
        engine = engine_of(program, 1, isa=isa)
        found = engine.run_all(images)
        check(found, f"engine ({isa})")
        assert [x.dtype for x in found] == [x.dtype for x in wanted.values()]
        assert_same(engine.run(images), found[0], f"{name}: first output of the engine ({isa}),")
        assert engine.outputs == infos
    session = Session(onnx_model(program).SerializeToString(), threads=1)
    found = session.run_all(images)
    check(found, "ONNX Runtime")
    assert [x.dtype for x in found] == [x.dtype for x in wanted.values()] and session.outputs == infos
    assert_same(session.run(images), found[0], f"{name}: first output of ONNX Runtime,")
    check(builder.all_outputs(program, images, *builder.sanitizers), "C")
    vectors.export(program, folder / "vectors", images[0])
    manifest = json.loads((folder / "vectors" / "manifest.json").read_text())
    assert [entry["name"] for entry in manifest["outputs"]] == list(wanted)
    files = (manifest["buffers"][entry["buffer"]]["file"] for entry in manifest["outputs"])
    golden = [np.load(folder / "vectors" / file, allow_pickle=False) for file in files]
    assert_same(dict(zip(wanted, golden, strict=True)), {key: x[0] for key, x in wanted.items()}, f"{name}: golden vectors,")


def extended(program: Program) -> Program:
    """Return the program with more buffers, three of which no op reads: u16 [C], i32 [C] and i32 [T, 2, C / 2]."""
    buffers, constants = program.verify().buffers, dict(program.constants)
    wide = [op.y for op in program.ops if buffers[op.y].dtype == "u16" and len(buffers[op.y].shape) == 2][-1]
    acc = [op.y for op in program.ops if buffers[op.y].dtype == "i32" and len(buffers[op.y].shape) == 2][-1]
    constants["more.first"] = np.zeros(1, np.int32)
    added: list[AnyOp] = []
    for name in (wide, acc):
        added.append(Take(y=f"more.{name}.row", x=name, index="more.first"))
        added.append(Permute(y=f"more.{name}", x=f"more.{name}.row", view=(buffers[name].channels,), perm=(0,)))
    rows, channels = buffers[acc].shape
    added.append(Permute(y="more.halves", x=acc, view=(rows, channels), perm=(0, 1), shape=(rows, 2, channels // 2)))
    return Program(msgspec.structs.replace(program.header, ops=(*program.ops, *added)), constants)


def possible_outputs(program: Program) -> list[Output]:
    """Return every output that a program can have: each buffer as each kind that fits its type and shape, without names."""
    found = []
    for buffer, value in program.verify().buffers.items():
        site = program.header.sites.get(buffer)
        for kind, (dtypes, axes) in KINDS.items():
            if value.dtype not in dtypes or len(value.shape) not in axes:
                continue
            plain = value.dtype == "i32" or kind == "signs"
            zero = 0 if plain or site is None or len(site.zero) != 1 else int(site.zero[0])
            scale = 0.5 if site is None or not site.scale else site.scale[0]
            alpha = site.alpha if site is not None and not plain and kind != "embedding" else None
            found.append(Output(buffer, kind, scale, zero, alpha))
    return found


def with_outputs(program: Program, *outputs: Output) -> Program:
    """Return the program with `outputs` in place of its own."""
    changed = msgspec.structs.replace(program.header, output=outputs[0], others=outputs[1:])
    return Program(changed, program.constants)


def with_random_outputs(program: Program, seed: int, most: int = 6) -> Program:
    """Return the program with up to `most` outputs, each a different buffer; about half of them have names.

    Every fifth seed adds the pixels as one more output.
    """
    rng = np.random.default_rng(seed)
    possible = possible_outputs(program)
    chosen: dict[str, Output] = {}
    for i in rng.permutation(len(possible)):
        chosen.setdefault(possible[i].buffer, possible[i])
    outputs = list(chosen.values())[: int(rng.integers(1, most + 1))]
    if seed % 5 == 0:
        outputs.append(Output(INPUT, "map", 1.0))
        outputs = list({output.buffer: output for output in outputs}.values())
    named = [
        msgspec.structs.replace(output, name=f"{output.kind}@{i}" if rng.integers(2) else "")
        for i, output in enumerate(outputs)
    ]
    return with_outputs(program, *named)
