"""Run the WebAssembly modules of `make wasm` in node, for tests."""

from __future__ import annotations

import base64
import json
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
VARIANTS = ("scalar", "simd128")


class EngineError(Exception):
    """The module reported an error."""


class Trap(Exception):
    """The module trapped. This is a bug: modules must report every error as a message."""


def node() -> str:
    """Return the path of node; skip the test if it is missing or too old for C++ exceptions in WebAssembly."""
    path = shutil.which("node")
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


class Node:
    """One module in one process."""

    def __init__(self, variant: str, *options: str) -> None:
        command = [node(), *options, str(HERE / "serve.mjs"), str(module(variant))]
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
