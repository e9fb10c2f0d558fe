"""Callers may run an engine in threads that never end, fork, change the pixels during a run, or run out of threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from fqvit.ir.program import Program
from fqvit.runtime import reference
from fqvit.runtime.native import Engine
from tests.robustness.fuzz.seeds import golden
from tests.robustness.hostile.small_programs import file_of, header_of, i32

PROLOGUE = """
import os, resource, sys, threading, time
import numpy as np
from fqvit.runtime.native import Engine

engine = Engine(sys.argv[1], 2)
images = np.zeros((64, *engine.input_shape), np.uint8)


def forever(work):
    def loop():
        while True:
            work()

    threading.Thread(target=loop, daemon=True).start()


"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.fqvit"
    path.write_bytes(golden()["tiny_v1.fqvit"])
    return path


def run_script(script: str, path: Path) -> None:
    """Run a script in a new process, which must exit with code 0 before the timeout and print nothing."""
    child = [sys.executable, "-c", PROLOGUE + script, str(path)]
    done = subprocess.run(child, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_python_exits_while_threads_run_engines(program: Path) -> None:
    run_script("for _ in range(4): forever(lambda: engine.run(images))\ntime.sleep(0.1)", program)


def test_engines_run_in_exit_handlers(program: Path) -> None:
    run_script(
        "import atexit\natexit.register(lambda: engine.run(images))\natexit.register(lambda: engine.run(images))", program
    )


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_an_engine_that_runs_during_a_fork_works_in_the_child(program: Path) -> None:
    script = """
expected = engine.run(images[:3])
forever(lambda: engine.run(images))
forever(lambda: engine.run(images[:1]))
for _ in range(8):
    child = os.fork()
    if child == 0:
        threading.Timer(20, os._exit, [1]).start()
        os._exit(0 if (engine.run(images[:3]) == expected).all() else 2)
    assert os.waitpid(child, 0)[1] == 0
"""
    run_script("import warnings\nwarnings.simplefilter('ignore')\n" + script, program)


def test_pixels_may_change_while_a_run_reads_them(program: Path) -> None:
    """A softmax reads its scores twice: if the largest score vanished in between, it would divide by zero."""
    ops = [{"op": "softmax", "y": "y", "x": "pixels", "mult": 2**30, "shift": 20}]
    header = header_of(ops, {"buffer": "y", "kind": "map", "scale": 1.0})
    header |= {"input": {"shape": [8, 32, 32], "scale": 1.0, "zero": 0}}
    program.write_bytes(file_of(header, {"y.table": i32(1, 0, 0, 0)}))
    script = """
scores = Engine(sys.argv[1], 1, isa="scalar")
pixels = np.zeros((100, 8, 32, 32), np.uint8)
value = 0


def change():
    global value
    value = (value + 37) % 256
    pixels[:] = value


forever(change)
for _ in range(30):
    scores.run(pixels)
"""
    run_script(script, program)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory in a way specific to Linux")
def test_an_engine_works_with_fewer_threads_than_requested(program: Path) -> None:
    script = """
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), resource.RLIM_INFINITY))
many = Engine(sys.argv[1], 200)
assert 1 <= many.threads < 200
assert (many.run(images) == engine.run(images)).all()
"""
    run_script(script, program)


def test_buffers_belong_to_their_image_while_another_thread_runs_the_engine(program: Path) -> None:
    engine = Engine(program, 2, keep=True)
    image, other = np.random.default_rng(0).integers(0, 256, (2, *engine.input_shape)).astype(np.uint8)
    expected, ended = engine.buffers(image), threading.Event()

    def run_another() -> None:
        while not ended.is_set():
            engine.run(other[None])

    thread = threading.Thread(target=run_another)
    thread.start()
    try:
        for _ in range(50):
            for name, codes in engine.buffers(image).items():
                np.testing.assert_array_equal(codes, expected[name])
    finally:
        ended.set()
        thread.join()


def test_a_loaded_file_may_be_truncated_or_overwritten(program: Path) -> None:
    engine, whole, first = Engine(program, 1), Program.load(program), Engine(program, 1)
    images = np.random.default_rng(0).integers(0, 256, (2, *engine.input_shape)).astype(np.uint8)
    expected = first.run(images)
    with program.open("r+b") as file:
        file.write(bytes(program.stat().st_size))
    np.testing.assert_array_equal(engine.run(images), expected)
    os.truncate(program, 100)
    np.testing.assert_array_equal(first.run(images), expected)
    np.testing.assert_array_equal(reference.run(whole, images), expected)


def test_constants_may_be_unaligned_in_memory_and_in_the_file(program: Path) -> None:
    whole = Program.load(program)
    odd = {}
    for name, array in whole.constants.items():
        odd[name] = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
        odd[name][...] = array
    images = np.random.default_rng(0).integers(0, 256, (2, *whole.input_shape)).astype(np.uint8)
    np.testing.assert_array_equal(Engine(Program(whole.header, odd), 1).run(images), Engine(whole, 1).run(images))
    raw = program.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    for spaces in range(1, 8):  # a longer header moves the constants
        head = raw[8 : 8 + size] + b" " * spaces
        program.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + size :])
        np.testing.assert_array_equal(Engine(program, 1).run(images), Engine(whole, 1).run(images))
