"""Compare fused attention with plain loops.

Runs the kernels that this CPU supports, those of AVX-512 with emulated instructions, and those of NEON in QEMU.
"""

from __future__ import annotations

from fqvit import _native
from tests.native.compilers import Compiler, core, run
from tests.native.test_gemm import emulated, passed


def test_fused_attention_equals_plain_loops(x86_compiler: Compiler) -> None:
    program = x86_compiler.program(
        x86_compiler.object("test/attention_test.cpp", "-O1"),
        *x86_compiler.avx512_shim(),
        *x86_compiler.engine(),
    )
    counts = passed(run(program))
    features = _native.cpu_features()
    wanted = {
        "avx2": features["avx2"],
        "avx512": features["avx512_vnni"] and features["avx512_vbmi"],
        "avx512bw": features["avx512_vnni"],
        "avx512_shim": True,
        "avx512bw_shim": True,
    }
    assert {name for name, runs in wanted.items() if runs} == set(counts)
    assert all(count > 800 for count in counts.values())


def test_fused_attention_on_aarch64_equals_plain_loops(aarch64_compiler: Compiler) -> None:
    kernels = [name for name in core() if name.startswith("kernels/") and "sha256" not in name and "roialign" not in name]
    program = aarch64_compiler.program(
        aarch64_compiler.object("test/attention_test.cpp", "-O1"), *map(aarch64_compiler.object, kernels)
    )
    counts = passed(emulated(program))
    assert set(counts) == {"neon", "neon_dotprod"}
    assert all(count > 800 for count in counts.values())
