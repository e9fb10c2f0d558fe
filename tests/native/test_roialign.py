"""Run native/test/roialign_test.cpp: scalar and AVX2, one thread and three, on random and extreme boxes."""

from __future__ import annotations

from tests.native.compilers import Compiler, run


def test_scalar_and_avx2_give_the_same(compiler: Compiler) -> None:
    output = run(compiler.program(compiler.object("test/roialign_test.cpp", "-O1"), *compiler.engine()))
    assert output == "300 passed, 0 failed\n"
