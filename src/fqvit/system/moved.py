"""Keep the import paths of version 0.1 working, each with a DeprecationWarning.

`import fqvit` appends the finder to sys.meta_path. It handles only the names in MOVED, after every other finder has failed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "fqvit.images": "fqvit.data.images",
    "fqvit.preprocess": "fqvit.data.preprocess",
    "fqvit.progress": "fqvit.system.progress",
    "fqvit.shards": "fqvit.data.shards",
    "fqvit.workers": "fqvit.distributed.workers",
    "fqvit.detect.anchors": "fqvit.detect.float.anchors",
    "fqvit.detect.integer": "fqvit.detect.fixed.detector",
    "fqvit.detect.pipeline": "fqvit.detect.float.pipeline",
    "fqvit.ir.lower": "fqvit.lowering.lower",
    "fqvit.ir.lower_detector": "fqvit.detect.lower",
    "fqvit.models.detector": "fqvit.detect.model.detector",
    "fqvit.models.detector_load": "fqvit.detect.model.load",
    "fqvit.quant.calibrate_detector": "fqvit.detect.calibrate",
}


class MovedModules(MetaPathFinder, Loader):
    """Import an old name as a module with the attributes of the new module."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, origin=MOVED[name]) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # the default: an empty module

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        message = f"{name} has moved to {MOVED[name]}. Import from there, or from fqvit if the name is public."
        warnings.warn(message, DeprecationWarning, stacklevel=2)  # importlib's own frames do not count
        attributes = vars(import_module(MOVED[name]))
        vars(module).update({key: value for key, value in attributes.items() if not key.startswith("__")})


def install() -> None:
    """Append the finder to sys.meta_path, once."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
