"""Run native/test/roialign_test.cpp: scalar code on one thread against the fastest code on three threads."""

from __future__ import annotations

from tests.native.compilers import Compiler, run


def test_results_do_not_depend_on_instruction_set_or_threads(compiler: Compiler) -> None:
    output = run(compiler.program(compiler.object("test/roialign_test.cpp", "-O1"), *compiler.engine()))
    assert output == "300 passed, 0 failed\n"
