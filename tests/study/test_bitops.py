"""Counts of bit operations equal the paper's numbers and, layer by layer, the counts from a traced model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.graph import Node, trace
from fqvit.models.layers import BiasedScores, Context, Gelu, LayerNorm, Linear, Patches, Scores, Softmax
from fqvit.models.load import build
from fqvit.models.zoo import find
from fqvit.quant.recipe import RECIPES, Recipe
from fqvit.quant.recipe_file import to_toml
from fqvit.study.bitops import Layer, attention_memory, layers_of, paper_totals, recipe_total, usual_total
from tests.cli.command_line import assert_rejected, fqvit

SMALL = {
    "vit": ViTConfig((32, 32), 8, 3, 10, 24, 2, 3, 96),
    "distilled": ViTConfig((32, 32), 8, 3, 10, 24, 1, 3, 96, prefix=2),
    "mean": ViTConfig((32, 16), 8, 1, 10, 24, 1, 2, 50, prefix=0, pool="mean", norm_first=False, norm_last=True),
    "swin": SwinConfig((64, 64), 4, 3, 10, 8, (2, 2), (2, 4), 4),
    "padded swin": SwinConfig((52, 40), 4, 1, 10, 8, (2, 1, 1), (1, 2, 4), 4),
}


def test_vit_base_gives_the_four_numbers_of_the_paper() -> None:
    found = paper_totals(layers_of(find("vit_base").config))
    assert {name: round(value, 2) for name, value in found.items()} == {
        "baseline8": 1118.51,
        "ptf8": 1118.52,
        "uniform4": 1118.34,
        "lis4": 1117.76,
    }


def test_vit_base_is_counted_in_the_usual_convention() -> None:
    layers = layers_of(find("vit_base").config)
    assert round(usual_total(layers, 8, 8, 8), 2) == 1124.09
    assert round(usual_total(layers, 8, 8, 4), 2) == 1112.64


@pytest.mark.parametrize("name", SMALL)
def test_every_layer_has_the_counts_of_the_traced_model(name: str) -> None:
    config = SMALL[name]
    assert sorted(layers_of(config), key=lambda layer: layer.name) == sorted(counted(config), key=lambda layer: layer.name)


@torch.no_grad()
def counted(config: ViTConfig | SwinConfig) -> list[Layer]:
    """Count the layers from the shapes in a run of the float model."""
    found: list[Layer] = []
    shapes: dict[str, tuple[int, ...]] = {}

    def visit(node: Node, y: torch.Tensor) -> torch.Tensor:
        shapes[node.name] = tuple(y.shape[1:])
        leaf, count = node.leaf, y[0].numel()
        if isinstance(leaf, Patches):
            found.append(Layer(node.name, "patch", macs=count * leaf.weight[0].numel()))
        elif isinstance(leaf, Linear):
            found.append(Layer(node.name, "linear", macs=count * leaf.weight.shape[1]))
        elif isinstance(leaf, Scores | BiasedScores):
            found.append(Layer(node.name, "scores", macs=count * shapes[node.inputs[0]][-1]))
        elif isinstance(leaf, Context):
            found.append(Layer(node.name, "context", macs=count * shapes[node.inputs[0]][-1]))
        elif isinstance(leaf, LayerNorm):
            found.append(Layer(node.name, "norm", elements=count))
        elif isinstance(leaf, Softmax):
            found.append(Layer(node.name, "softmax", elements=count))
        elif isinstance(leaf, Gelu):
            found.append(Layer(node.name, "gelu", elements=count))
        return y

    trace(build(config)).run(torch.zeros(1, config.channels, *config.image), visit)
    return found


def test_attention_maps_take_half_the_bytes_at_4_bits() -> None:
    layers = layers_of(find("deit_tiny").config)
    eight, four = attention_memory(layers, 8), attention_memory(layers, 4)
    assert eight.largest_layer == 3 * 197 * 197
    assert eight.every_layer == 12 * eight.largest_layer
    assert 2 * four.every_layer in (eight.every_layer, eight.every_layer - 1)


def test_the_command_prints_both_conventions_and_every_layer() -> None:
    result = fqvit("bitops", "vit_base", "--json").json
    assert round(result["paper"]["lis4"], 2) == 1117.76
    assert round(result["usual"]["8/8/4"], 2) == 1112.64
    assert sum(layer["paper"]["ptf8"] for layer in result["layers"]) == pytest.approx(result["paper"]["ptf8"])
    assert sum(layer["macs"] for layer in result["layers"]) == result["macs"]
    text = fqvit("bitops", "swin_tiny", "--bits", "4/8/4", "--layers").out
    assert "4/8/4" in text
    assert "layers.3.blocks.1.mlp.fc2" in text


def test_every_recipe_is_counted_with_the_bit_widths_of_its_layers(tmp_path: Path) -> None:
    found = fqvit("bitops", "deit_tiny", "--json").json
    assert set(found["recipes"]) == set(RECIPES) and set(found["usual"]) >= {"8/8/8", "8/8/4", "6/6/4", "4/8/4", "4/4/4"}
    assert found["recipes"]["fqvit"] == found["usual"]["8/8/4"] and found["recipes"]["minmax"] == found["usual"]["8/8/8"]
    layers = layers_of(find("deit_tiny").config)
    ends = sum(layer.macs for layer in layers if layer.name in ("patch_embed.proj", "head"))
    # The patch embedding and the head of w4 have 8-bit weights.
    assert found["recipes"]["w4"] == pytest.approx(found["usual"]["4/8/4"] + 4 * 8 * ends / 1e9, abs=1e-5)
    recipe = Recipe(name="mixed", layer_bits={"blocks.*.mlp.fc1": 6, "blocks.0.*": 4})
    fc1 = [layer.macs for layer in layers if layer.name.endswith("fc1")]
    first = [layer.macs for layer in layers if layer.name.startswith("blocks.0.") and layer.kind == "linear"]
    saved = 2 * 8 * sum(fc1[1:]) + 4 * 8 * sum(first)
    assert recipe_total(layers, recipe) == pytest.approx(usual_total(layers, 8, 8, 4) - saved / 1e9)
    (tmp_path / "mine.toml").write_text(to_toml(recipe))
    text = fqvit("bitops", "deit_tiny", "--recipe", tmp_path / "mine.toml").out
    assert "8/8/4 (mixed)" in text and f"{recipe_total(layers, recipe):.4f}" in text
    assert_rejected(fqvit("bitops", "--recipe", "none"), "no such recipe")


def test_mistakes_are_reported_in_one_line() -> None:
    assert_rejected(fqvit("bitops", "vit_bse"), "vit_bse", "Did you mean")
    for bits in ("8-8", "8/8", "0/8/8", "8/8/64"):
        assert_rejected(fqvit("bitops", "vit_base", "--bits", bits), bits, "W/A/ATTN")


def test_small_models_are_printed_with_enough_digits_to_tell_rows_apart() -> None:
    figures = [line.split()[-1] for line in fqvit("bitops", "fmnist_vit").out.splitlines() if "attention  " in line][:4]
    assert len(set(figures)) == 4
