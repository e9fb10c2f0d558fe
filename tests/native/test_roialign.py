"""RoIAlign without Python: scalar and AVX2, one thread and several, on random and extreme boxes."""

from __future__ import annotations

from tests.native.compilers import Compiler, core, run


def test_scalar_and_avx2_give_the_same(compiler: Compiler) -> None:
    parts = [compiler.object(name, "-O1") for name in core()]
    output = run(compiler.program(compiler.object("test/roialign_test.cpp", "-O1"), *parts))
    assert output == "300 passed, 0 failed\n"
