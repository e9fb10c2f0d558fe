"""`fqvit bitops`: count the bit operations of a model per image, in the paper's and in the usual convention."""

from __future__ import annotations

import re

from fqvit.cli import inputs
from fqvit.cli.output import say, say_json
from fqvit.errors import FqvitError
from fqvit.models import architectures, embedded, zoo
from fqvit.models.config import SwinConfig
from fqvit.quant.recipe import RECIPES, Recipe, load_recipe
from fqvit.study.bitops import (
    PAPER_ROWS,
    Layer,
    attention_memory,
    giga,
    layers_of,
    paper_bitops,
    paper_totals,
    recipe_total,
    usual_bitops,
    usual_total,
)
from fqvit.system.progress import busy
from fqvit.system.text import table

USUAL = ("8/8/8", "8/8/4", "6/6/4", "4/8/4", "4/4/4")
# PTF: Power-of-Two Factor. LIS: Log-Int-Softmax.
MEANING = {
    "baseline8": "no PTF, no LIS, 8-bit attention",
    "ptf8": "PTF, 8-bit attention",
    "uniform4": "PTF, 4-bit uniform attention",
    "lis4": "PTF and LIS, 4-bit attention",
}


def run(name: str | None, bits: str | None, recipe: str | None, by_layer: bool, as_json: bool) -> None:
    recipes = RECIPES if recipe is None else {**RECIPES, recipe: load_recipe(recipe)}
    widths = USUAL if bits is None else tuple(dict.fromkeys((*USUAL, bits)))
    chosen = {width: _parsed(width) for width in widths}
    shown, layers = _layers(name or embedded.MODELS[0])
    paper = paper_totals(layers)
    usual = {width: usual_total(layers, *parsed) for width, parsed in chosen.items()}
    by_recipe = {key: recipe_total(layers, one) for key, one in recipes.items()}
    memory = [attention_memory(layers, bits) for bits in (8, 4)]
    macs = sum(layer.macs for layer in layers)
    if as_json:
        say_json(
            {
                "model": shown,
                "macs": macs,
                "paper": {key: round(value, 6) for key, value in paper.items()},
                "usual": {key: round(value, 6) for key, value in usual.items()},
                "recipes": {key: round(value, 6) for key, value in by_recipe.items()},
                "attention_bytes": {
                    str(m.bits): {"every_layer": m.every_layer, "largest_layer": m.largest_layer} for m in memory
                },
                "layers": [_layer_json(layer, chosen) for layer in layers],
            }
        )
        return
    say(f"{shown}: {macs / 1e9:.3f} G multiplications per image\n")
    say(table(("the paper's convention", "G BitOPs"), [(MEANING[key], giga(value)) for key, value in paper.items()]))
    say()
    say(table(("usual (bits_w x bits_a), W/A/Attn", "G BitOPs"), [(key, giga(value)) for key, value in usual.items()]))
    say()
    counted = [(key, _widths(recipes[key]), giga(value)) for key, value in by_recipe.items()]
    say(table(("recipe, usual convention", "W/A/Attn", "G BitOPs"), counted, left=2))
    say()
    sizes = [(f"{m.bits} bits", f"{m.every_layer / 1e6:.3f}", f"{m.largest_layer / 1e6:.3f}") for m in memory]
    say(table(("attention maps", "all layers, MB", "largest layer, MB"), sizes))
    if by_layer:
        head = (
            "layer",
            "kind",
            "M multiplications",
            "M values",
            *(f"{key}, M" for key in PAPER_ROWS),
            *(f"{w}, M" for w in chosen),
        )
        rows = []
        for layer in layers:
            figures = [paper_bitops(layer, *convention) for convention in PAPER_ROWS.values()]
            figures += [usual_bitops(layer, *widths) for widths in chosen.values()]
            counts = [f"{layer.macs / 1e6:.2f}", f"{layer.elements / 1e6:.3f}"]
            rows.append((layer.name, layer.kind, *counts, *(f"{figure / 1e6:.2f}" for figure in figures)))
        say()
        say(table(head, rows, left=2))


def _layers(name: str) -> tuple[str, list[Layer]]:
    """Return the full name of a model and its layers, from its config or from its graph, captured with random weights."""
    row, known = zoo.lookup(name), architectures.lookup(name)
    if row is not None:
        return row.name, layers_of(row.config)
    if known is None or isinstance(known.config, SwinConfig):
        found = zoo.find(name)  # raises with the reason
        return found.name, layers_of(found.config)
    inputs.require_torch(f"bitops of {known.name}")
    with busy(f"capturing {known.name}"):
        from fqvit.frontend.capture import capture
        from fqvit.models.families.build import build_family
        from fqvit.models.load import FloatModel
        from fqvit.models.transform import Transform, to_preprocess
        from fqvit.study.graph_layers import layers_of_model

        config = known.config
        preprocess, _ = to_preprocess(Transform(), config.image, config.channels, known.name)
        module = capture(build_family(config), (config.channels, *config.image))
        return known.name, layers_of_model(FloatModel(known.name, module, preprocess, None, "random weights"))


def _widths(recipe: Recipe) -> str:
    mixed = " (mixed)" if recipe.layer_bits else ""
    return f"{recipe.weight_bits}/{recipe.activation_bits}/{recipe.attention_bits}{mixed}"


def _parsed(bits: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d{1,2})/(\d{1,2})/(\d{1,2})", bits)
    found = (0, 0, 0) if match is None else (int(match[1]), int(match[2]), int(match[3]))
    if not all(1 <= width <= 32 for width in found):
        raise FqvitError(f"bits {bits!r}: expected W/A/ATTN, each from 1 to 32, such as 8/8/4.")
    return found


def _layer_json(layer: Layer, chosen: dict[str, tuple[int, int, int]]) -> dict[str, object]:
    return {
        "name": layer.name,
        "kind": layer.kind,
        "macs": layer.macs,
        "values": layer.elements,
        "paper": {key: paper_bitops(layer, *row) / 1e9 for key, row in PAPER_ROWS.items()},
        "usual": {key: usual_bitops(layer, *row) / 1e9 for key, row in chosen.items()},
    }
