"""Compare every GEMM with three plain loops.

Runs the GEMMs that this CPU supports, the VNNI code with an emulated instruction, and the NEON code in QEMU.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

from fqvit import _native
from tests.native.compilers import Compiler, run, tool

ARM_ROOT = Path("/usr/aarch64-linux-gnu")
VNNI = "kernels/vnni/gemm_vnni.cpp"
# Number of tile functions per file: one for each number of rows from 1 to 6. The file with dot products also has the tiles of
# attention, for 1 to 4 rows.
NEON_TILES = {"kernels/neon/gemm_neon_dotprod.cpp": 6 + 4, "kernels/neon/gemm_neon_i8mm.cpp": 6}
# Emulated CPUs and their instruction sets, fastest first: with i8mm, with dot products only, with neither.
ARM_SETS = {
    "max": ["neon_i8mm", "neon_dotprod", "neon", "scalar"],
    "cortex-a76": ["neon_dotprod", "neon", "scalar"],
    "cortex-a72": ["neon", "scalar"],
}


def passed(output: str) -> dict[str, int]:
    """Return the number of passed checks per instruction set; fail if any check failed."""
    assert re.search(r"^[1-9]\d* passed, 0 failed$", output, re.MULTILINE), output
    return {name: int(count) for name, count in re.findall(r"^(\w+): (\d+) passed, 0 failed$", output, re.MULTILINE)}


def emulated(program: Path, *arguments: str, cpu: str = "max") -> str:
    if not ARM_ROOT.is_dir():
        pytest.skip(f"needs the AArch64 libraries in {ARM_ROOT}")
    return run(tool("qemu-aarch64", "qemu-aarch64-static"), "-cpu", cpu, "-L", ARM_ROOT, program, *arguments)


def gemm_test(compiler: Compiler) -> Path:
    return compiler.program(
        compiler.object("test/gemm_test.cpp", "-O1"),
        compiler.object("test/gemm_vnni_shim.cpp", "-O1"),
        *compiler.engine(),
    )


def test_every_gemm_equals_three_plain_loops(compiler: Compiler) -> None:
    counts = passed(run(gemm_test(compiler)))
    wanted = {"scalar"}
    if platform.machine() in ("x86_64", "AMD64"):
        wanted |= {"avx_vnni_shim", "avx512_vnni_shim", "avx512_vnni_prefetch_shim"}
    features = _native.cpu_features()
    wanted |= {name for name in ("avx2", "avx_vnni", "avx512_vnni") if features[name]}
    assert wanted <= set(counts)
    assert all(count > 10_000 for count in counts.values())


def test_vnni_multiplies_unsigned_activations_by_signed_weights(x86_compiler: Compiler) -> None:
    # The emulation cannot check the order of the operands: the unsigned one must be the broadcast activations.
    listing = run(tool("objdump"), "-d", "--no-show-raw-insn", x86_compiler.object(VNNI))
    writer: dict[str, str] = {}  # the instruction that wrote each vector register last
    found = {"ymm": 0, "zmm": 0}
    for name, operands in re.findall(r"^ +[0-9a-f]+:\t(?:\{vex\} )?(\w+) +(.*)$", listing, re.MULTILINE):
        target = re.search(r"(?:^|,)%([xyz]mm)(\d+)$", operands)  # AT&T: the last operand is written
        if target is None:
            continue
        if name == "vpdpbusd":
            weights, activations = operands.rsplit(",", 2)[:2]
            assert writer[activations[4:]] == "vpbroadcastd", operands
            assert "(" in weights or writer[weights[4:]].startswith("vmovdq"), operands
            found[target.group(1)] += 1
        writer[target.group(2)] = name
    # Two vectors per row, in tiles of 1 to 6 rows (ymm) and of 1 to 14 rows (zmm).
    assert found["ymm"] >= 2 * sum(range(1, 7)) and found["zmm"] >= 2 * sum(range(1, 15))


def test_vnni_tiles_stay_in_registers(x86_compiler: Compiler) -> None:
    listing = run(tool("objdump"), "-d", "--no-show-raw-insn", x86_compiler.object(VNNI))
    tiles = re.findall(r"<\w*multiply_tile\w*>:\n(.*?)\n\n", listing + "\n\n", re.DOTALL)
    assert len(tiles) == 6 + 14 + 3  # the tiles of 12 to 14 rows also with prefetching
    assert [line for tile in tiles for line in tile.splitlines() if re.search(r"mm\d+,.*\(%r[sb]p", line)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", ARM_SETS)
def test_the_neon_gemms_equal_three_plain_loops(cpu: str, aarch64_compiler: Compiler) -> None:
    assert set(passed(emulated(gemm_test(aarch64_compiler), cpu=cpu))) == set(ARM_SETS[cpu])


@pytest.mark.parametrize("source", NEON_TILES)
def test_neon_tiles_stay_in_registers(source: str, aarch64_compiler: Compiler) -> None:
    listing = run(tool("aarch64-linux-gnu-objdump"), "-d", "--no-show-raw-insn", aarch64_compiler.object(source))
    tiles = re.findall(r"<\w*_tileILi\w*>:\n(.*?)\n\n", listing + "\n\n", re.DOTALL)
    assert len(tiles) == NEON_TILES[source]
    assert [line for tile in tiles for line in tile.splitlines() if re.search(r"\bq\d+.*\[sp", line)] == []


def engine_test(compiler: Compiler) -> Path:
    return compiler.program(compiler.object("test/engine_test.cpp", "-O1"), *compiler.engine())


def test_a_transformer_gives_the_same_bits_on_every_instruction_set(compiler: Compiler) -> None:
    output = run(engine_test(compiler))
    assert [name for name in _native.instruction_sets() if f"{name}: as scalar" not in output] == []
    passed(output)


@pytest.mark.nightly
@pytest.mark.parametrize("cpu", ARM_SETS)
def test_the_whole_engine_runs_on_aarch64(cpu: str, aarch64_compiler: Compiler) -> None:
    output = emulated(engine_test(aarch64_compiler), cpu=cpu)
    assert re.findall(r"^(\w+): as scalar$", output, re.MULTILINE) == ARM_SETS[cpu]
    passed(output)
