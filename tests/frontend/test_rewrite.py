"""Tests of rewrites of the draft graph: what is folded, split, merged and reordered."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.frontend.parity import Tokens, captured, kinds, tokens


def test_layer_scale_is_folded_into_the_preceding_layer() -> None:
    model = Tokens(lambda x: x, fc=nn.Linear(8, 8))
    model.body = lambda x, layers: x + layers["fc"](F.gelu(x)) * torch.arange(8.0)
    assert kinds(captured(model)) == ["Patches", "Gelu", "Linear", "Add"]


def test_a_factor_that_only_one_reader_uses_becomes_one_leaf() -> None:
    model = Tokens(lambda x: x, fc=nn.Linear(8, 8))

    def body(x: Tensor, layers: nn.ModuleDict) -> Tensor:
        y = layers["fc"](x)
        return F.gelu(y * torch.arange(8.0)) + F.silu(y)

    model.body = body
    assert kinds(captured(model)).count("Depthwise") == 1


def test_a_factor_per_token_scales_along_another_axis() -> None:
    tokens(lambda x: F.silu(F.gelu(x) * torch.arange(16.0).view(16, 1)))


def test_the_mean_of_two_heads_is_folded_into_them() -> None:
    model = Tokens(lambda x: x, a=nn.Linear(8, 5), b=nn.Linear(8, 5))
    model.body = lambda x, layers: (layers["a"](x[:, 0]) + layers["b"](x[:, 1])) / 2
    assert "Depthwise" not in kinds(captured(model))


def test_factors_of_concatenated_values_are_folded() -> None:
    model = Tokens(lambda x: x, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.body = lambda x, layers: F.gelu(torch.cat([layers["a"](x) * torch.arange(8.0), layers["b"](x) * 3 + 1], 1))
    assert "Depthwise" not in kinds(captured(model))


def test_factors_of_concatenated_activations_are_applied_before_the_concatenation() -> None:
    graph = tokens(lambda x: F.silu(torch.cat([F.gelu(x) * torch.arange(8.0), F.relu(x) * 3], 1)))
    assert kinds(graph).count("Depthwise") == 2 and "Join" in kinds(graph)


def test_class_token_and_position_embedding_become_one_leaf() -> None:
    token, positions = torch.randn(1, 1, 8), torch.randn(1, 17, 8)
    graph = tokens(lambda x: F.gelu(torch.cat([token.expand(len(x), -1, -1), x], 1) + positions))
    assert kinds(graph) == ["Patches", "Embed", "Gelu"]


def test_position_embeddings_added_to_other_values_become_a_shift() -> None:
    positions = torch.randn(1, 16, 8)
    graph = tokens(lambda x: F.gelu(F.silu(x)[:, 3:9] + positions[:, :6]))
    assert kinds(graph).count("Shift") == 1


def test_a_linear_layer_is_split_between_readers_of_different_channels() -> None:
    model = Tokens(lambda x: x, fc=nn.Linear(8, 12))

    def body(x: Tensor, layers: nn.ModuleDict) -> Tensor:
        a, b = layers["fc"](x).chunk(2, -1)
        return F.gelu(a) * b

    model.body = body
    linear = [node.leaf for node in captured(model).graph.nodes if type(node.leaf).__name__ == "Linear"]
    assert [tuple(leaf.weight.shape) for leaf in linear] == [(6, 8), (6, 8)]


def test_patch_merging_in_any_channel_order_gathers_whole_rows() -> None:
    model = Tokens(lambda x: x, fc=nn.Linear(32, 4))
    model.body = lambda x, layers: layers["fc"](
        F.gelu(x).reshape(-1, 2, 2, 2, 2, 8).permute(0, 1, 3, 5, 2, 4).reshape(len(x), 4, 32)
    )
    assert kinds(captured(model)) == ["Patches", "Gelu", "Take", "Linear"]


def test_a_rearrangement_and_its_inverse_around_a_linear_layer_cancel() -> None:
    model = Tokens(lambda x: x, fc=nn.Linear(8, 8))
    model.body = lambda x, layers: x + layers["fc"](F.gelu(x).flip(1)).flip(1)
    nodes = captured(model).graph.nodes
    assert [type(node.leaf).__name__ for node in nodes] == ["Patches", "Gelu", "Linear", "Add"]


def test_patches_in_another_order_keep_their_values() -> None:
    positions = torch.randn(1, 16, 8)
    tokens(lambda x: F.gelu(x.reshape(-1, 2, 2, 2, 2, 8).transpose(2, 3).reshape(len(x), 16, 8) + positions))
