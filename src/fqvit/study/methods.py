"""Build the methods of a table: recipes by name and bits, or one recipe with each value of K.

Needs no torch. See also: ablation.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fqvit.errors import FqvitError
from fqvit.quant.recipe import RECIPES, Recipe, load_recipe, with_bits, with_methods

# The methods of the paper's Table 1, then our default recipe.
DEFAULT = "minmax,ema,percentile,omse,bit-split,ptq-vit,fq-vit-8,fq-vit,fqvit"


@dataclass(frozen=True)
class Method:
    """A row of a table. recipe: None for the float model."""

    label: str
    recipe: Recipe | None

    @property
    def bits(self) -> str:
        """Bits of weights, activations and attention: W/A/ATTN."""
        r = self.recipe
        return "32/32/32" if r is None else f"{r.weight_bits}/{r.activation_bits}/{r.attention_bits}"

    @property
    def runs(self) -> str:
        """How the method runs: "float", "integer", or "simulation" (in float) if the recipe has no integer program."""
        return "float" if self.recipe is None else "integer" if self.recipe.integer else "simulation"


def with_images(method: Method, images: int) -> Method:
    """Return the method with a calibration on at most `images` images."""
    recipe = method.recipe
    return method if recipe is None else Method(method.label, msgspec.structs.replace(recipe, images=images))


FLOAT = Method("float", None)


def parse(text: str, bits: str | None) -> list[Method]:
    """Parse a comma-separated list of NAME|FILE.toml[@W/A/ATTN].

    bits: a comma-separated list of W/A/ATTN; every method without @W/A/ATTN runs at each of them. None: such a method uses the
    bits of its recipe.
    """
    found: list[Method] = []
    widths = [width.strip() for width in (bits or "").split(",") if width.strip()]
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, own = word.rsplit("@", 1) if "@" in word and not word.endswith(".toml") else (word, "")
        recipe = load_recipe(name)
        if recipe.name in RECIPES and name not in RECIPES:
            raise FqvitError(f"{name}: the name {recipe.name} belongs to a built-in recipe. Give this recipe another name.")
        for width in [own] if own else widths or [""]:
            label = f"{recipe.name}@{width}" if width else recipe.name
            found.append(Method(label, with_methods(with_bits(recipe, width)) if width else recipe))
    if not found:
        raise FqvitError("--methods: no recipe given. Pass a comma-separated list, such as minmax,fq-vit.")
    labels = [method.label for method in found]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise FqvitError(f"--methods: {twice} is given twice. Name it once, or with different bits (NAME@W/A/ATTN).")
    return found


def sweep(recipe: Recipe, largest: int) -> list[Method]:
    """Return `recipe` with Power-of-Two Factors of at most 2^K, for K = 0 .. largest."""
    return [Method(f"K = {k}", msgspec.structs.replace(recipe, k=k)) for k in range(largest + 1)]
