"""Check that no kernel computes with floats.

Scalar code must compile without float registers, and the disassembly of SIMD code must have no float instructions.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.native.compilers import Compiler, core, run, tool

SIMD = [name for name in core() if re.search(r"_(avx2|avx512|avx512bw|vnni|x86)\.cpp$", name)]
# Files that the test of scalar code leaves out, with the reason.
OTHERS = {
    "core/engine.cpp": "profile() measures seconds as a double",
    "detect/opencv_weights.cpp": "computes the weights of resizing in float, as OpenCV does",
    "image/weights.cpp": "computes the weights of image filters in double, as Pillow does",
    "ir/fields.cpp": "reads numbers of the JSON as doubles",
    "ir/json.cpp": "parses numbers of the JSON",
}
NEON = [name for name in core() if name.startswith("kernels/neon/")]  # an x86-64 compiler skips their code
SCALAR = [name for name in core() if name not in (*SIMD, *NEON, *OTHERS)]

# These are named like float instructions, but only move, shuffle or mask bits, or compute with packed integers (vpmaxsd).
HARMLESS = re.compile(r"v?(mov\w*|shuf|unpck[lh]|blendv?|broadcast|insert|extract|maskmov|andn?|or|xor)(ss|sd|ps|pd)|v?p\w+")
PREFIXES = r"(?:\{\w+\} |(?:data16|rep|repz|repnz|lock|notrack|bnd|cs|ds) )*"


def float_instructions(listing: str) -> set[str]:
    """Return the instructions that compute with floats: x87, conversions, and float suffixes that are not harmless."""
    names = set(re.findall(rf"^ +[0-9a-f]+:\t{PREFIXES}(\w+)", listing, re.MULTILINE))
    assert names
    floats = {name for name in names if re.fullmatch(r"f\w+|v?cvt\w+|\w+(ss|sd|ps|pd)|v\w+(ph|sh)", name)}
    return {name for name in floats if not HARMLESS.fullmatch(name)}


def disassembly(path: Path) -> str:
    return run(tool("objdump"), "-d", "--no-show-raw-insn", path)


@pytest.mark.parametrize("source", SIMD)
def test_simd_kernels_compute_with_integers_only(source: str, x86_compiler: Compiler) -> None:
    listing = disassembly(x86_compiler.object(source))
    assert float_instructions(listing) == set()


def neon_float_instructions(listing: str) -> set[str]:
    """Return the AArch64 instructions that compute with floats: conversions, bfloat16 products, and f* except fmov*."""
    names = set(re.findall(r"^ +[0-9a-f]+:\t(\w+)", listing, re.MULTILINE))
    assert names
    return {name for name in names if re.fullmatch(r"f(?!mov)\w+|[su]cvtf|bf\w*(dot|mla|mmla)\w*|bfcvt\w*", name)}


@pytest.mark.parametrize("source", NEON)
def test_neon_kernels_compute_with_integers_only(source: str, aarch64_compiler: Compiler) -> None:
    listing = run(tool("aarch64-linux-gnu-objdump"), "-d", "--no-show-raw-insn", aarch64_compiler.object(source))
    assert neon_float_instructions(listing) == set()


def test_float_arithmetic_of_aarch64_is_found(aarch64_compiler: Compiler, tmp_path: Path) -> None:
    path = tmp_path / "floats.cpp"
    path.write_text("float root(float x) { return __builtin_sqrtf(x) + 1; }\ndouble of(int x) { return x; }\n")
    listing = run(tool("aarch64-linux-gnu-objdump"), "-d", "--no-show-raw-insn", aarch64_compiler.object(path))
    assert {"fsqrt", "fadd", "scvtf"} <= neon_float_instructions(listing)


def test_float_arithmetic_in_a_disassembly_is_found(x86_compiler: Compiler, tmp_path: Path) -> None:
    path = tmp_path / "floats.cpp"
    path.write_text(
        "float sum(const float* x, int n) { float s = 0; for (int i = 0; i < n; ++i) s += x[i] * x[i]; return s; }\n"
        "float root(float x) { return __builtin_sqrtf(x); }\n"
        "int whole(double x) { return static_cast<int>(x); }\n"
        "long double half(long double x) { return x / 2; }\n"
    )
    found = float_instructions(disassembly(x86_compiler.object(path)))
    assert {"addss", "mulss", "sqrtss", "cvttsd2si"} <= found
    assert any(name.startswith(("fmul", "fdiv")) for name in found)
    wide = float_instructions(disassembly(x86_compiler.object(path, "-O3", "-ffast-math", "-mavx2", "-mfma")))
    assert any(re.fullmatch(r"vfn?m(add|sub)\d+ps", name) for name in wide)


@pytest.mark.parametrize("source", SCALAR)
def test_scalar_code_compiles_without_float_registers(source: str, gcc: Compiler) -> None:
    gcc.object(source, "-O1", "-mgeneral-regs-only")


def test_every_scalar_op_of_attention_compiles_without_float_registers(gcc: Compiler, tmp_path: Path) -> None:
    path = tmp_path / "attention.cpp"
    path.write_text('#include "kernels/scalar/attention_scalar.h"\n')
    made = gcc.object(path, "-O1", "-mgeneral-regs-only", "-fkeep-inline-functions")
    names = run(tool("nm"), "-C", made)
    for name in ("matmul_row", "log_softmax_row", "softmax_row", "row_codes_row", "weighted_sum_row"):
        assert f"::{name}(" in names


def test_gcc_rejects_a_float_without_float_registers(gcc: Compiler, tmp_path: Path) -> None:
    path = tmp_path / "float.cpp"
    path.write_text("double twice(double x) { return x + x; }\n")
    run(gcc.command, "-c", path, "-o", tmp_path / "float.o")
    run(gcc.command, "-c", "-mgeneral-regs-only", path, "-o", tmp_path / "float.o", code=1)
