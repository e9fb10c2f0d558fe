"""Run the WebAssembly modules of `make wasm` in node, for tests. The variable FQVIT_NODE selects another node executable."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODULES = ROOT / "build" / "wasm"
VARIANTS = ("scalar", "simd128", "relaxed_simd")
THREADED = ("simd128-threads", "relaxed_simd-threads")


class EngineError(Exception):
    """The module reported an error."""


class Trap(Exception):
    """The module trapped. This is a bug: modules must report every error as a message."""


def node() -> str:
    """Return the path of node; skip the test if it is missing or too old for C++ exceptions in WebAssembly."""
    path = shutil.which(os.environ.get("FQVIT_NODE", "node"))
    if path is None:
        pytest.skip("needs node 17 or newer")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.lstrip("v").split(".")[0]) < 17:
        pytest.skip(f"needs node 17 or newer, found {version.strip()}")
    return path


def module(variant: str) -> Path:
    """Return a module; skip the test if it is not built."""
    path = MODULES / f"fqvit-{variant}.wasm"
    if not path.exists():
        pytest.skip(f"needs {path.relative_to(ROOT)}: run `make wasm`")
    return path


def command_of(variant: str) -> list[str]:
    """Return the command that starts node with the options that a module needs; skip the test if node cannot run the module."""
    command = [node()]
    if variant.startswith("relaxed_simd"):
        # (func (result v128) (i16x8.relaxed_dot_i8x16_i7x16_s (v128.const 0) (v128.const 0))), made from splats
        code = "0,97,115,109,1,0,0,0,1,5,1,96,0,1,123,3,2,1,0,10,15,1,13,0,65,0,253,15,65,0,253,15,253,146,2,11"
        script = f"process.exit(WebAssembly.validate(Uint8Array.of({code})) ? 0 : 1)"
        for options in ([], ["--experimental-wasm-relaxed-simd"]):  # node 20 needs this option
            if subprocess.run([*command, *options, "-e", script], capture_output=True, check=False).returncode == 0:
                return [*command, *options]
        pytest.skip("needs a node that supports relaxed SIMD")
    return command


class Node:
    """A node process that runs one module."""

    def __init__(self, variant: str, threads: int = 1) -> None:
        command = [*command_of(variant), str(HERE / "serve.mjs"), str(module(variant)), str(threads)]
        self.threads = threads
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()

    def call(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        encoded = {
            key: base64.b64encode(value).decode() if isinstance(value, bytes) else value for key, value in arguments.items()
        }
        self._process.stdin.write(json.dumps({"command": command, **encoded}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise (Trap if answer["trap"] else EngineError)(answer["error"])
        return answer["result"]

    def load(self, kind: str, file: bytes, instruction_set: str = "") -> Any:
        return self.call("load", kind=kind, file=file, set=instruction_set)

    def run(self, handle: int, images: npt.NDArray[np.uint8]) -> list[bytes]:
        found = self.call("run", handle=handle, images=images.tobytes(), count=len(images))
        return [base64.b64decode(each) for each in found]
