"""Test the handlers of normalizations that are written as one op or as several."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.frontend.load import load_model
from fqvit.ir.ops import LayerNorm
from fqvit.lowering.lower import lower
from fqvit.models.graph import Captured
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference
from tests.factories import calibration_of, images_for
from tests.frontend.parity import Maps, Tokens, captured, kinds, maps, tokens


def test_a_layer_norm_becomes_one_leaf() -> None:
    assert kinds(captured(Tokens(norm := nn.LayerNorm(8), norm=norm))) == ["Patches", "LayerNorm"]


def test_a_layer_norm_over_the_channels_of_feature_maps_is_captured() -> None:
    def channels_last(x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2)

    assert kinds(maps(channels_last))[:2] == ["Patches", "LayerNorm"]


def test_rms_norm_as_one_op_becomes_a_norm_without_centering() -> None:
    graph = tokens(lambda x: F.rms_norm(x, (8,), torch.arange(8.0), 1e-6))
    assert not graph.graph.nodes[-1].leaf.center


def test_rms_norm_as_several_ops_becomes_one_leaf() -> None:
    graph = tokens(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.arange(8.0))
    assert kinds(graph) == ["Patches", "LayerNorm"]


@pytest.mark.parametrize("axis", [1, 2])
def test_l2_normalisation_becomes_a_norm(axis: int) -> None:
    assert "LayerNorm" in kinds(tokens(lambda x: F.normalize(x, dim=axis)))


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_group_norm_becomes_one_norm(groups: int) -> None:
    model = Maps(lambda x: x, norm=nn.GroupNorm(groups, 8))
    model.body = lambda x, layers: F.relu(layers["norm"](x))
    graph = captured(model)
    assert kinds(graph).count("LayerNorm") == 1
    assert ("Depthwise" in kinds(graph)) == (groups > 1)  # one group: weight and bias are part of the norm


@pytest.mark.parametrize(("channels", "narrow"), [(24, False), (40, True)])
def test_a_group_norm_of_long_rows_runs_in_integers(channels: int, narrow: bool) -> None:
    """Rows of 16,129 values or more need fewer fraction bits; from 32,768 values on, squares of 16-bit codes would overflow."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, channels, 3, 2, 1), nn.GroupNorm(1, channels)
            self.out, self.head = nn.Conv2d(channels, channels, 1), nn.Linear(channels, 5)

        def forward(self, images: Tensor) -> Tensor:
            x = self.stem(images)
            x = x + self.out(self.norm(x))
            return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = load_model(Normed().eval(), 64)
    assert isinstance(model.module, Captured)
    before = kinds(model.module)
    assert ("Narrow" in before[: before.index("LayerNorm")]) == narrow
    program = lower(model, calibration_of(model, "fqvit", count=2))
    (norm,) = (op for op in program.ops if isinstance(op, LayerNorm))
    assert norm.fraction == 23
    images = images_for(model.preprocess, 1, 3)
    assert np.array_equal(Engine(program, 1).run(images), Reference(program).run(images))


def test_a_group_norm_of_rearranged_maps_is_captured() -> None:
    tokens(lambda x: F.group_norm(F.gelu(x).transpose(1, 2).reshape(-1, 8, 4, 4).flip(2), 1, torch.arange(8.0)))


def test_batch_norm_is_folded_into_the_preceding_convolution() -> None:
    model = Maps(lambda x: x, conv=nn.Conv2d(8, 6, 3, padding=1), norm=nn.BatchNorm2d(6))
    model.body = lambda x, layers: F.relu(layers["norm"](layers["conv"](x)))
    assert "Depthwise" not in kinds(captured(model))


def test_batch_norm_is_folded_into_the_following_layer() -> None:
    model = Maps(lambda x: x, norm=nn.BatchNorm2d(8), conv=nn.Conv2d(8, 6, 1))
    model.body = lambda x, layers: layers["conv"](layers["norm"](F.gelu(x)))
    assert kinds(captured(model)) == ["Patches", "Gelu", "Linear", "Route"]


def test_batch_norm_between_activations_becomes_one_leaf() -> None:
    model = Maps(lambda x: x, norm=nn.BatchNorm2d(8))
    model.body = lambda x, layers: F.silu(layers["norm"](F.gelu(x)))
    assert kinds(captured(model))[:4] == ["Patches", "Gelu", "Depthwise", "Activation"]
