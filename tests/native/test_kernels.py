"""Compare the kernels of every instruction set with the scalar ones.

Runs the kernels that this CPU supports, those of AVX-512 with emulated instructions, and those of NEON in QEMU.
"""

from __future__ import annotations

import platform
import re

import pytest

from fqvit import _native
from tests.native.compilers import Compiler, run
from tests.native.test_gemm import emulated, passed


def test_every_kernel_equals_the_scalar_one(compiler: Compiler) -> None:
    x86 = platform.machine() in ("x86_64", "AMD64")
    shims = compiler.avx512_shim() if x86 else []
    output = run(compiler.program(compiler.object("test/kernels_test.cpp", "-O1"), *shims, *compiler.engine()))
    assert re.search(r"^[1-9]\d* passed, 0 failed$", output, re.MULTILINE), output
    counts = {name: int(count) for name, count in re.findall(r"^(\w+): (\d+) passed, 0 failed$", output, re.MULTILINE)}
    features = _native.cpu_features()
    wanted = {"scalar"} | ({"avx512_shim", "avx512bw_shim"} if x86 else set())
    wanted |= {"avx2"} if features["avx2"] else set()
    wanted |= {"avx512"} if features["avx512_vnni"] and features["avx512_vbmi"] else set()
    wanted |= {"avx512bw"} if features["avx512_vnni"] else set()
    assert wanted <= set(counts)
    assert all(count > 5_000 for count in counts.values())


@pytest.mark.nightly
def test_every_neon_kernel_equals_the_scalar_one(aarch64_compiler: Compiler) -> None:
    program = aarch64_compiler.program(aarch64_compiler.object("test/kernels_test.cpp", "-O1"), *aarch64_compiler.engine())
    counts = passed(emulated(program))
    assert set(counts) == {"neon", "scalar"}
    assert all(count > 5_000 for count in counts.values())
