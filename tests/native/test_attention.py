"""Compare fused attention with plain loops.

Runs the kernels that this CPU supports, and those of AVX-512 with emulated instructions.
"""

from __future__ import annotations

from fqvit import _native
from tests.native.compilers import Compiler, run
from tests.native.test_gemm import passed


def test_fused_attention_equals_plain_loops(x86_compiler: Compiler) -> None:
    program = x86_compiler.program(
        x86_compiler.object("test/attention_test.cpp", "-O1"),
        *x86_compiler.avx512_shim(),
        *x86_compiler.engine(),
    )
    counts = passed(run(program))
    features = _native.cpu_features()
    wanted = {"avx2": features["avx2"], "avx512": features["avx512_vnni"] and features["avx512_vbmi"], "avx512_shim": True}
    assert {name for name, runs in wanted.items() if runs} == set(counts)
    assert all(count > 800 for count in counts.values())
