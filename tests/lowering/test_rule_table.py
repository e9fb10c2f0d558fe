"""Tests of lowering/rules: every leaf module has exactly one rule in the table."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

pytest.importorskip("torch")

from fqvit.lowering.rules import RULES, attention
from fqvit.lowering.rules import general as general_rules
from fqvit.lowering.rules import layers as layer_rules
from fqvit.lowering.rules import maps as map_rules
from fqvit.models import general, layers, maps
from fqvit.models.layers import Leaf


def leaves_of(module: ModuleType) -> set[type[Leaf]]:
    """Return the leaf modules that a Python module defines."""
    classes = (value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__)
    return {found for found in classes if issubclass(found, Leaf) and found is not Leaf}


def test_every_leaf_module_has_a_rule() -> None:
    leaves = leaves_of(layers) | leaves_of(maps) | leaves_of(general)
    assert len(leaves) == 33
    assert [leaf.__name__ for leaf in leaves if leaf not in RULES] == []


def test_every_rule_belongs_to_a_leaf_module() -> None:
    assert [leaf.__name__ for leaf in RULES if leaf not in leaves_of(layers) | leaves_of(maps) | leaves_of(general)] == []


def test_no_leaf_module_has_two_rules() -> None:
    assert len(RULES) == sum(len(part.RULES) for part in (layer_rules, attention, map_rules, general_rules))
