"""Write a recipe as a TOML file, which load_recipe reads back. See also: recipe.py (reads TOML files)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from fqvit.quant.recipe import Recipe
from fqvit.system.files import write_atomically


def to_toml(recipe: Recipe) -> str:
    """Return the fields that are not defaults as TOML. Tables follow the plain fields, as TOML requires."""
    fields: dict[str, Any] = msgspec.to_builtins(recipe)
    lines = [f"{name} = {_value(value)}" for name, value in fields.items() if not isinstance(value, dict)]
    if fields.get("layer_bits"):
        lines += ["", "[layer_bits]", *(f"{json.dumps(name)} = {bits}" for name, bits in fields["layer_bits"].items())]
    for pattern, rule in fields.get("sites", {}).items():
        lines += ["", f"[sites.{json.dumps(pattern)}]", *(f"{name} = {_value(value)}" for name, value in rule.items())]
    return "\n".join(lines) + "\n"


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe atomically."""
    text = to_toml(recipe)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _value(value: Any) -> str:
    """Format a string, boolean, number or list of numbers. JSON strings without control characters are TOML strings."""
    return json.dumps(value, ensure_ascii=False)
