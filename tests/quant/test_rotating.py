"""Rotated heads: the float model keeps its function, and outlying channels of Q and K disappear."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from fqvit.models.graph import trace
from fqvit.models.layers import Linear
from fqvit.models.pixels import normalise
from fqvit.quant.centering import key_layers
from fqvit.quant.recipe import RECIPES
from fqvit.quant.rotating import rotate, rotation
from fqvit.quant.splitting import weight_of, with_weight
from tests.factories import float_model, images_for

ROTATED = msgspec.structs.replace(RECIPES["fqvit"], heads="rotated")
PLAIN = msgspec.structs.replace(RECIPES["fqvit"], heads="plain")


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8, 24, 64, 80])
def test_the_matrix_is_orthogonal_and_mixes_as_many_channels_as_possible(size: int) -> None:
    matrix = rotation(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    mixed = size & -size  # the largest power of two that divides the size
    assert ((matrix != 0).sum(1) == mixed).all()
    torch.testing.assert_close(matrix[matrix != 0].abs(), torch.full((size * mixed,), mixed**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["vit", "swin", "padded swin"])
def test_the_float_model_computes_the_same_function(kind: str) -> None:
    model = float_model(kind)
    graph = trace(model.module)
    x = normalise(images_for(model.preprocess, 3), model.preprocess)
    with torch.no_grad():
        torch.testing.assert_close(rotate(graph, ROTATED).run(x), graph.run(x), rtol=1e-4, atol=1e-5)


def test_only_q_and_k_change_and_the_given_graph_does_not() -> None:
    graph = trace(float_model("vit").module)
    name = key_layers(graph)[0]
    before = weight_of(graph.node(name)).clone()
    after = weight_of(rotate(graph, ROTATED).node(name))
    third = len(before) // 3
    assert torch.equal(weight_of(graph.node(name)), before) and torch.equal(after[2 * third :], before[2 * third :])
    for part in (slice(0, third), slice(third, 2 * third)):
        assert not torch.allclose(after[part], before[part])
        torch.testing.assert_close(after[part].norm(), before[part].norm())
    others = [node for node in graph.nodes if node.name not in key_layers(graph)]
    rotated = {node.name: node for node in rotate(graph, ROTATED).nodes}
    assert all(rotated[node.name] is node for node in others)


def test_an_outlying_channel_is_spread_over_its_head() -> None:
    graph = trace(float_model("vit").module)
    name = key_layers(graph)[0]
    node = graph.node(name)
    weight = weight_of(node).clone()
    weight[1] *= 100
    assert isinstance(node.leaf, Linear)
    louder = replace(node, leaf=with_weight(node.leaf, weight, node.leaf.bias))
    loud = replace(graph, nodes=tuple(louder if each.name == name else each for each in graph.nodes))
    norms = weight_of(rotate(loud, ROTATED).node(name)).norm(dim=1)
    assert norms.max() < 0.8 * weight.norm(dim=1).max()


def test_recipes_without_rotated_heads_keep_the_graph() -> None:
    graph = trace(float_model("vit").module)
    assert rotate(graph, PLAIN) is graph
