"""Public Python API of fqvit: quantize vision transformers to integer-only programs and run them.

Each name is imported on first use. Running a saved program needs no torch; quantizing imports it.

    fqvit.quantize("deit_tiny_patch16_224.safetensors", "photos").save("deit_tiny.fqvit")
    fqvit.load("deit_tiny.fqvit").classify("cat.jpg")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fqvit.errors import FqvitError as FqvitError
from fqvit.system import moved as _moved

if TYPE_CHECKING:
    from fqvit import runtime as runtime
    from fqvit.data.images import ImageFolder as ImageFolder
    from fqvit.data.preprocess import Preprocess as Preprocess
    from fqvit.data.shards import TarShards as TarShards
    from fqvit.detect.program import DetectorProgram as DetectorProgram
    from fqvit.detect.quantize import quantize_detector as quantize_detector
    from fqvit.distributed.workers import Workers as Workers
    from fqvit.evaluate.accuracy import measure as measure
    from fqvit.frontend.load import load_model as load_model
    from fqvit.inference.embeddings import Embeddings as Embeddings
    from fqvit.inference.model import Model as Model
    from fqvit.inference.model import load as load
    from fqvit.inference.search import nearest as nearest
    from fqvit.ir.program import Program as Program
    from fqvit.lowering.lower import lower as lower
    from fqvit.lowering.quantize import quantize as quantize
    from fqvit.models.load import FloatModel as FloatModel
    from fqvit.quant.calibrate import calibrate as calibrate
    from fqvit.quant.calibration import Calibration as Calibration
    from fqvit.quant.recipe import Recipe as Recipe
    from fqvit.quant.recipe import load_recipe as load_recipe
    from fqvit.quant.simulate import Simulation as Simulation
    from fqvit.runtime.native import Engine as Engine

_HOMES = {
    "Calibration": "fqvit.quant.calibration",
    "DetectorProgram": "fqvit.detect.program",
    "Embeddings": "fqvit.inference.embeddings",
    "Engine": "fqvit.runtime.native",
    "FloatModel": "fqvit.models.load",
    "ImageFolder": "fqvit.data.images",
    "Model": "fqvit.inference.model",
    "Preprocess": "fqvit.data.preprocess",
    "Program": "fqvit.ir.program",
    "Recipe": "fqvit.quant.recipe",
    "Simulation": "fqvit.quant.simulate",
    "TarShards": "fqvit.data.shards",
    "Workers": "fqvit.distributed.workers",
    "calibrate": "fqvit.quant.calibrate",
    "load": "fqvit.inference.model",
    "load_model": "fqvit.frontend.load",
    "load_recipe": "fqvit.quant.recipe",
    "lower": "fqvit.lowering.lower",
    "measure": "fqvit.evaluate.accuracy",
    "nearest": "fqvit.inference.search",
    "quantize": "fqvit.lowering.quantize",
    "quantize_detector": "fqvit.detect.quantize",
}

__all__ = [
    "Calibration",
    "DetectorProgram",
    "Embeddings",
    "Engine",
    "FloatModel",
    "FqvitError",
    "ImageFolder",
    "Model",
    "Preprocess",
    "Program",
    "Recipe",
    "Simulation",
    "TarShards",
    "Workers",
    "__version__",
    "calibrate",
    "load",
    "load_model",
    "load_recipe",
    "lower",
    "measure",
    "nearest",
    "quantize",
    "quantize_detector",
    "runtime",
]


_moved.install()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name == "runtime":
        value = import_module("fqvit.runtime")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("fqvit")
    else:
        raise AttributeError(f"module 'fqvit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
