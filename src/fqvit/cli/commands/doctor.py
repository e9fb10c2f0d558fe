"""`fqvit doctor`: show the machine, versions and missing packages, and test the compiled kernels.

Works even if the compiled core or an optional package is missing or broken: none of them is imported at the top. The exit code
is 2 if quantized models cannot run.
"""

from __future__ import annotations

import platform
import sys
from importlib import import_module, metadata
from typing import Any, NamedTuple

import numpy as np

from fqvit.cli.output import say, say_json
from fqvit.distributed.workers import cores
from fqvit.errors import FqvitError
from fqvit.system.text import facts, table


class Package(NamedTuple):
    """An optional package. extra: the extra of pyproject.toml that installs it, if any."""

    name: str
    purpose: str
    extra: str | None


PACKAGES = (
    Package("torch", "quantizing, float models", "quantize"),
    Package("onnx", "export to ONNX", "onnx"),
    Package("onnxruntime", "running exported ONNX", "onnx"),
    Package("jinja2", "reports", "report"),
    Package("pycocotools", "accuracy of detectors", "detect"),
    Package("pyarrow", "Parquet files", "parquet"),
    Package("ray", "embedding on a Ray cluster", "ray"),
    Package("huggingface-hub", "weights by hf:ORG/NAME", None),
    Package("openvino", "comparison in bench", None),
)
NEEDED = ("numpy", "safetensors", "pillow", "msgspec", "typer")


def run(as_json: bool) -> None:
    core = _core()
    packages = {name: _version(name) for name in (*NEEDED, *(package.name for package in PACKAGES))}
    result: dict[str, object] = {
        "fqvit": _version("fqvit"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": cores(),
        **core,
        "packages": packages,
    }
    if as_json:
        say_json(result)
    else:
        _show(result, core, packages)
    if core["problems"]:
        raise FqvitError(f"quantized models cannot run: {'; '.join(core['problems'])}. Install fqvit again.")


def _core() -> dict[str, Any]:
    """Return the version of the compiled core, the CPU features, the available kernels, and any problems."""
    try:
        native = import_module("fqvit._native")
    except ImportError as error:
        return {"core": None, "cpu": {}, "kernels": [], "problems": [f"the compiled core cannot be loaded ({error})"]}
    problems = []
    if native.version != _version("fqvit"):
        problems.append(f"the compiled core has version {native.version}, the package has {_version('fqvit')}")
    problems += [f"the {isa} kernels give wrong results" for isa in native.instruction_sets() if not matches_reference(isa)]
    return {
        "core": native.version,
        "cpu": native.cpu_features(),
        "kernels": native.instruction_sets(),
        "problems": problems,
    }


def matches_reference(isa: str) -> bool:
    """Return whether a linear op with 96 x 200 random and extreme weights gives the same integers as the reference."""
    from fqvit.data.preprocess import Preprocess
    from fqvit.ir.moves import Permute
    from fqvit.ir.ops import Linear
    from fqvit.ir.program import INPUT, Header, Output, Program
    from fqvit.ir.value import Constant
    from fqvit.runtime import reference
    from fqvit.runtime.native import Engine

    random = np.random.default_rng(0)
    weights = random.integers(-127, 128, (96, 200)).astype(np.int8)
    weights[0], weights[1] = 127, -127
    constants: dict[str, Constant] = {"y.w": weights, "y.bias": random.integers(-(2**20), 2**20, 96).astype(np.int32)}
    header = Header(
        version=1,
        model="doctor",
        preprocess=Preprocess(10, 20, 1, 10, "bilinear", (0.5,), (0.5,)),
        ops=(Permute(y="flat", x=INPUT, view=(200,), perm=(0,)), Linear(y="y", x="flat", out="acc")),
        output=Output("y", "logits", 1.0),
        sites={},
        recipe={},
        source="",
        images=1,
    )
    program = Program(header, constants)
    images = random.integers(0, 256, (5, 10, 20, 1)).astype(np.uint8)
    images[0], images[1] = 0, 255
    return bool(np.array_equal(Engine(program, 1, isa=isa).run(images), reference.run(program, images)))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _show(result: dict[str, object], core: dict[str, Any], packages: dict[str, str | None]) -> None:
    has = [name for name, there in core["cpu"].items() if there]
    kernels = ", ".join(core["kernels"])
    rows = [
        ("fqvit", f"{result['fqvit']}, compiled core {core['core'] or 'missing'}"),
        ("python", f"{result['python']} ({sys.executable})"),
        ("machine", f"{result['platform']}, {result['cores']} cores for this process"),
        ("CPU has", ", ".join(has) or "no instruction set with special kernels"),
        ("kernels", f"{kernels}: the first is used, all match the reference" if not core["problems"] else kernels),
    ]
    say(facts(rows))
    say()
    listed = [
        (name, packages[name] or "missing", "everything", "" if packages[name] else "install fqvit again") for name in NEEDED
    ]
    for name, purpose, extra in PACKAGES:
        remedy = "" if packages[name] else f"pip install 'fqvit[{extra}]'" if extra else f"pip install {name}"
        listed.append((name, packages[name] or "missing", purpose, remedy))
    say(table(("package", "version", "needed for", "remedy"), listed, left=4))
