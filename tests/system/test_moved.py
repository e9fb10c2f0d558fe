"""Test that the import paths of version 0.1 still work: same objects as the new paths, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import fqvit
from fqvit.system.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_import_path_gives_the_same_objects_with_a_deprecation_warning(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {MOVED[old]}"):
        module = importlib.import_module(old)
    new = importlib.import_module(MOVED[old])
    assert all(getattr(module, name) is value for name, value in vars(new).items() if not name.startswith("__"))


def test_the_public_names_have_the_same_identity_under_old_and_new_paths() -> None:
    code = """
import warnings
warnings.simplefilter("ignore")
import fqvit
from fqvit.images import ImageFolder
from fqvit.ir.lower import lower
from fqvit.preprocess import Preprocess
from fqvit.shards import TarShards
from fqvit.workers import Workers
for thing in (ImageFolder, lower, Preprocess, TarShards, Workers):
    assert getattr(fqvit, thing.__name__) is thing
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_warning_points_at_the_import_statement() -> None:
    code = "import fqvit.images"
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert "<string>:1: DeprecationWarning: fqvit.images has moved" in done.stderr


def test_renamed_methods_of_public_classes_keep_their_old_names() -> None:
    workers = fqvit.Workers.alone()
    with pytest.warns(DeprecationWarning, match=r"Workers\.fold is now called Workers\.merge"):
        workers.fold(object())  # type: ignore[arg-type]  # a single process merges nothing
    for owner, old in ((fqvit.ImageFolder, "settle"), (fqvit.TarShards, "settle"), (fqvit.Simulation, "input_steps")):
        assert "Deprecated" in (getattr(owner, old).__doc__ or "")


def test_unknown_modules_are_still_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fqvit.nonsense")
    assert fqvit.FqvitError
