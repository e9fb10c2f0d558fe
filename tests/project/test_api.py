"""The public names of `import fqvit`: complete, documented and imported lazily."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest


def test_importing_fqvit_imports_no_heavy_library() -> None:
    code = """
import sys, fqvit
assert not {"numpy", "torch", "PIL", "typer", "msgspec"} & set(sys.modules), sorted(sys.modules)
fqvit.Program, fqvit.Recipe, fqvit.load_recipe, fqvit.FqvitError, fqvit.runtime.reference.run
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_reference_is_available_after_engine_is_imported() -> None:
    code = "import fqvit; fqvit.Engine; fqvit.runtime.reference.run"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_has_a_docstring() -> None:
    # The documentation site shows docstrings. If one is missing, msgspec and dataclasses generate a signature instead.
    import fqvit as package

    undocumented = []
    for name in package.__all__:
        thing = getattr(package, name)
        parts = {name: thing}
        if inspect.isclass(thing):
            parts |= {f"{name}.{part}": getattr(thing, part) for part in vars(thing) if not part.startswith("_")}
        for part, value in parts.items():
            described = inspect.isclass(value) or callable(value) or isinstance(value, property)
            if described and (inspect.getdoc(value) or "(").startswith((f"{part}(", "(")):
                undocumented.append(part)
    assert undocumented == []


def test_the_public_names_exist() -> None:
    import fqvit as package
    from fqvit.lowering.lower import lower

    assert package.lower is lower
    assert all(hasattr(package, name) for name in package.__all__ if name != "__version__")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = package.nonsense
