"""Layers counted from a graph equal those counted from the config, for models that have a config."""

from __future__ import annotations

import pytest

from fqvit.models.load import load_model
from fqvit.study.bitops import layers_of, paper_totals
from fqvit.study.graph_layers import layers_of_model
from tests.captured import captured


@pytest.mark.parametrize("name", ["fmnist_vit", "fmnist_swin"])
def test_graph_and_config_give_the_same_layers(name: str) -> None:
    model = load_model(name)
    assert layers_of_model(model) == layers_of(model.module.config)  # type: ignore[arg-type]


def test_gates_and_activations_of_captured_models_are_counted() -> None:
    layers = {layer.name: layer for layer in layers_of_model(captured("hybrid"))}
    assert layers["pixels@1"].kind == "patch" and layers["pixels@1"].macs == 16 * 48 * 8
    product = next(layer for name, layer in layers.items() if "multiply" in name)
    assert (product.kind, product.macs) == ("scores", 16 * 16)
    assert sum(layer.elements for layer in layers.values() if layer.kind == "gelu") == 16 * 16
    assert paper_totals(list(layers.values()))["lis4"] > 0
