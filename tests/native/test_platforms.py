"""Compare the engine with the reference on several platforms: this one, AArch64, s390x (big-endian) and Windows.

The other platforms need Debian's packages g++-aarch64-linux-gnu, g++-s390x-linux-gnu and qemu-user, or
g++-mingw-w64-x86-64-posix and wine64. Tests whose packages are missing are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fqvit import _native
from fqvit.detect.batch import batched
from fqvit.ir.program import Program
from fqvit.models.embedded import test_images as embedded_images
from fqvit.runtime.reference import Reference
from tests.detect.test_programs import lowered, packed, some_codes
from tests.factories import embedded_program
from tests.ir.draw import STYLES, Draw
from tests.native.compilers import Compiler, run, tool
from tests.native.test_gemm import ARM_SETS
from tests.runtime.programs import program_with
from tests.runtime.wide import accepted
from tests.runtime.wide_moves import EVERY_WIDE

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
RANDOM_OPS = 40  # programs of each kind for AArch64


def cases() -> Iterator[tuple[str, Program, Any]]:
    """Yield golden files, the embedded models, detector programs with several outputs, and two ops of every kind."""
    for path in sorted(GOLDEN.glob("*_v?.npz")):
        yield path.stem, Program.load(path.with_suffix(".fqvit")), np.load(path)["images"]
    for name in ("fmnist_vit", "fmnist_swin"):
        yield name, embedded_program(name), embedded_images()[0][:2]
    for name, low in (("packed", packed()), ("cascade", lowered("cascade of 4conv1fc", "fqvit"))):
        parts = {"pyramid": low.pyramid(32, 64), "box": batched(low.boxes[0], 5), "mask": low.masks[0]}
        for part, program in parts.items():
            yield f"{name}_{part}", program, some_codes(program, 2)
    for kind in EVERY_WIDE:
        yield from ((f"{kind}_{i}", *case) for i, case in enumerate(islice(wide_cases(kind), 2)))


def wide_cases(kind: str) -> Iterator[tuple[Program, Any]]:
    for seed in count():
        draw = Draw(np.random.default_rng(seed), STYLES[seed % 4])
        ops = EVERY_WIDE[kind](draw)
        if accepted(draw, ops):
            yield program_with(draw, *ops)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Write programs, images and the reference's outputs for answers_test; return the folder and the number of programs."""
    folder = tmp_path_factory.mktemp("answers")
    for name, program, images in cases():
        write_case(folder, name, program, images)
    return folder, len(list(folder.glob("*.answers")))


def write_case(folder: Path, name: str, program: Program, images: Any) -> None:
    program.save(folder / f"{name}.fqvit")
    (folder / f"{name}.images").write_bytes(images.tobytes())
    (folder / f"{name}.answers").write_bytes(b"".join(map(little_endian, Reference(program).run_all(images))))


def little_endian(x: Any) -> bytes:
    return np.ascontiguousarray(x, x.dtype.newbyteorder("<")).tobytes()


def answers_test(compiler: Compiler) -> Path:
    return compiler.program(compiler.object("test/answers_test.cpp", "-O1"), *compiler.engine())


def test_this_machine_matches_the_reference_bit_for_bit(compiler: Compiler, answers: tuple[Path, int]) -> None:
    folder, programs = answers
    *isas, last = run(answers_test(compiler), folder).splitlines()
    assert isas == _native.instruction_sets()
    assert programs == len(list(GOLDEN.glob("*_v?.npz"))) + 2 + 6 + 2 * len(EVERY_WIDE)
    assert last == f"{2 * programs * len(isas)} passed, 0 failed"


@pytest.mark.nightly
@pytest.mark.parametrize("machine, cpu", [*(("aarch64", cpu) for cpu in ARM_SETS), ("s390x", "max")])
def test_other_machines_match_the_reference_bit_for_bit(
    machine: str, cpu: str, answers: tuple[Path, int], request: pytest.FixtureRequest
) -> None:
    compiler = request.getfixturevalue(f"{machine}_compiler")
    emulator, libraries = tool(f"qemu-{machine}"), Path(f"/usr/{machine}-linux-gnu")
    folder, programs = answers
    isas = ARM_SETS[cpu] if machine == "aarch64" else ["scalar"]
    output = run(emulator, "-cpu", cpu, "-L", libraries, answers_test(compiler), folder)
    assert output.splitlines() == [*isas, f"{2 * programs * len(isas)} passed, 0 failed"]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", EVERY_WIDE)
def test_random_ops_on_aarch64_match_the_reference_bit_for_bit(kind: str, aarch64_compiler: Compiler, tmp_path: Path) -> None:
    for i, (program, images) in enumerate(islice(wide_cases(kind), RANDOM_OPS)):
        write_case(tmp_path, str(i), program, images)
    output = run(tool("qemu-aarch64"), "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", answers_test(aarch64_compiler), tmp_path)
    assert output.splitlines()[-1] == f"{2 * RANDOM_OPS * len(ARM_SETS['max'])} passed, 0 failed"


@pytest.mark.nightly
def test_windows_matches_the_reference_bit_for_bit(
    windows_compiler: Compiler, answers: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wine = tool("wine64", "/usr/lib/wine/wine64", "wine")
    for name, value in {"WINEPREFIX": str(tmp_path), "WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree=;mshtml="}.items():
        monkeypatch.setenv(name, value)
    folder, programs = answers
    isas = _native.instruction_sets()
    output = run(wine, answers_test(windows_compiler), folder)
    assert output.splitlines() == [*isas, f"{2 * programs * len(isas)} passed, 0 failed"]
