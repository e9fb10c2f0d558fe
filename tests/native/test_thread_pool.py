"""Run native/test/thread_pool_test.cpp, also with ThreadSanitizer if the compiler has it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.compilers import NATIVE, STANDARD, Compiler, run, tool

EXPECTED = "40001 passed, 0 failed\n"


def test_every_item_is_computed_once(compiler: Compiler) -> None:
    assert run(compiler.program(compiler.object("test/thread_pool_test.cpp"))) == EXPECTED


def test_late_workers_do_not_race_with_the_next_job(tmp_path: Path) -> None:
    program, flags = tmp_path / "pool", ("-O1", "-g", "-pthread", "-fsanitize=thread", f"-I{NATIVE}")
    source = NATIVE / "test" / "thread_pool_test.cpp"
    command = [tool("g++", "clang++"), *STANDARD, *flags, str(source), "-o", str(program)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs a compiler with ThreadSanitizer")
    assert run(program) == EXPECTED
