"""Handlers of sums, products and functions of one variable."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.frontend.parity import Tokens, captured, kinds, tokens


@pytest.mark.parametrize(
    "function",
    [F.relu, F.gelu, F.silu, F.hardswish, F.elu, F.softplus, torch.sigmoid, torch.tanh, torch.exp, torch.abs, F.relu6, F.mish],
)
def test_functions_of_one_variable_become_one_leaf(function: object) -> None:
    assert len(kinds(tokens(function))) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_captured_in_both_forms(approximate: str) -> None:
    graph = tokens(lambda x: F.gelu(x, approximate=approximate))
    assert kinds(graph)[-1] == ("Gelu" if approximate == "none" else "Activation")


def test_quick_gelu_is_one_function() -> None:
    graph = tokens(lambda x: x * torch.sigmoid(1.702 * x))
    assert kinds(graph) == ["Patches", "Activation"]
    assert graph.graph.nodes[-1].leaf.label == "x*sigmoid(1.702x+0)"


def test_a_clamp_with_keywords_is_captured() -> None:
    tokens(lambda x: x.clamp(min=-0.1, max=0.3))


def test_constant_factors_of_a_function_become_part_of_it() -> None:
    assert kinds(tokens(lambda x: F.silu(F.silu(x) * 2 + 1))) == ["Patches", "Activation", "Activation"]


def test_in_place_functions_are_captured() -> None:
    tokens(lambda x: F.relu(x * 2, inplace=True) + 1)


def test_sums_differences_and_negation_are_captured() -> None:
    tokens(lambda x: 1 - (F.gelu(x) + 0.5 * F.silu(x)) - torch.neg(F.relu(x)) + torch.add(F.tanh(x), F.silu(x), alpha=0.3))


def test_a_sum_with_rearranged_values_is_captured() -> None:
    tokens(lambda x: F.gelu(x) + F.silu(x).roll(3, 1))


def test_a_product_of_two_values_becomes_one_multiply() -> None:
    graph = tokens(lambda x: F.silu(x[..., :4]) * x[..., 4:])
    assert kinds(graph).count("Multiply") == 1


def test_a_gate_per_channel_is_broadcast() -> None:
    graph = tokens(lambda x: F.gelu(x) * torch.sigmoid(x.mean(1, keepdim=True)))
    assert "Multiply" in kinds(graph)


def test_a_gate_per_token_is_broadcast() -> None:
    tokens(lambda x: F.gelu(x) * torch.sigmoid(x.mean(2, keepdim=True)))


def test_divisions_by_constants_are_captured() -> None:
    tokens(lambda x: F.gelu(x) / 3 / torch.arange(1.0, 9.0))


def test_a_rotary_position_embedding_becomes_one_leaf() -> None:
    angles = torch.rand(16, 4, generator=torch.Generator().manual_seed(0))
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin

    assert kinds(tokens(lambda x: rotate(F.gelu(x)))) == ["Patches", "Gelu", "Rotary"]


def test_rotary_position_embeddings_may_differ_between_heads() -> None:
    angles = torch.rand(2, 16, 2, generator=torch.Generator().manual_seed(0))
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(x).reshape(-1, 16, 2, 4).transpose(1, 2)
        return y * cos + torch.cat([-y[..., 2:], y[..., :2]], -1) * sin

    graph = tokens(rotate)
    assert "Rotary" in kinds(graph)
    rotary = next(node.leaf for node in graph.graph.nodes if type(node.leaf).__name__ == "Rotary")
    assert tuple(rotary.cos.shape) == (16, 8)


def test_a_gated_mlp_has_one_multiply() -> None:
    model = Tokens(lambda x: x, gate=nn.Linear(8, 12), up=nn.Linear(8, 12), down=nn.Linear(12, 8))
    model.body = lambda x, layers: layers["down"](F.silu(layers["gate"](x)) * layers["up"](x))
    assert kinds(captured(model)).count("Multiply") == 1


def test_a_relu_of_a_convolution_of_the_images_becomes_a_lookup_table() -> None:
    """Only layers that read codes can clamp their accumulators at the zero point."""
    graph = tokens(F.relu)
    assert kinds(graph) == ["Patches", "Activation"]
    model = Tokens(lambda x: x, fc=nn.Linear(8, 12))
    model.body = lambda x, layers: F.relu(layers["fc"](x))
    assert kinds(captured(model))[-2:] == ["Linear", "Relu"]
