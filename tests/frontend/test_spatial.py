"""Tests of how convolutions, pooling, interpolation and reductions are captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.frontend.parity import Maps, captured, kinds, maps, tokens


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 2},
        {"kernel_size": 3, "padding": 2, "dilation": 2},
        {"kernel_size": (1, 3), "padding": "same"},
        {"kernel_size": 3, "padding": 1, "groups": 2},
        {"kernel_size": 1, "bias": False},
    ],
)
def test_dense_convolutions_become_linear_layers(options: dict[str, Any]) -> None:
    assert "Linear" in kinds(captured(Maps(conv := nn.Conv2d(8, 6, **options), conv=conv)))


@pytest.mark.parametrize("outputs", [8, 16])
def test_depthwise_convolutions_become_depthwise_leaves(outputs: int) -> None:
    conv = nn.Conv2d(8, outputs, 3, 2, 1, groups=8)
    graph = captured(Maps(conv, conv=conv))
    assert "Depthwise" in kinds(graph)
    gathered = [node.leaf.index.numel() for node in graph.graph.nodes if type(node.leaf).__name__ == "Gather"]
    assert gathered == ([16 * 16] if outputs == 16 else [])  # channels are repeated once, not once per tap


def test_a_transposed_convolution_without_overlap_is_captured() -> None:
    captured(Maps(conv := nn.ConvTranspose2d(8, 5, 2, 2), conv=conv))


def test_an_overlapping_convolution_of_the_images_becomes_a_stem() -> None:
    stem = nn.Conv2d(3, 8, 3, 2, 1)
    assert kinds(captured(stem))[0] == "Stem"


def test_max_pooling_becomes_a_maximum_over_rows() -> None:
    assert "MaxRows" in kinds(maps(lambda x: F.max_pool2d(F.gelu(x), 3, 2, 1)))


@pytest.mark.parametrize(
    ("options", "taps"),
    [
        ({"kernel_size": 2}, 4),
        ({"kernel_size": 3, "stride": 1, "padding": 1}, 9 + 6 + 4),
        ({"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False}, 9 + 6 + 4),
        ({"kernel_size": 3, "stride": 2, "ceil_mode": True}, None),
    ],
)
def test_average_pooling_becomes_a_depthwise_leaf(options: dict[str, Any], taps: int | None) -> None:
    graph = maps(lambda x: F.avg_pool2d(F.gelu(x), **options))
    leaf = next(node.leaf for node in graph.graph.nodes if type(node.leaf).__name__ == "Depthwise")
    assert taps is None or leaf.index.shape[-1] <= taps


@pytest.mark.parametrize("size", [1, 2, 3])
def test_adaptive_average_pooling_is_captured(size: int) -> None:
    maps(lambda x: F.adaptive_avg_pool2d(F.gelu(x), size))
    tokens(lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), size))


def test_doubling_by_interpolation_has_four_taps() -> None:
    graph = maps(lambda x: F.interpolate(F.gelu(x), scale_factor=2.0, mode="bilinear"))
    leaf = next(node.leaf for node in graph.graph.nodes if type(node.leaf).__name__ == "Depthwise")
    assert leaf.index.shape[-1] == 4


@pytest.mark.parametrize(("mode", "align"), [("bilinear", True), ("bilinear", False), ("bicubic", False)])
def test_interpolation_to_any_size_is_captured(mode: str, align: bool) -> None:
    maps(lambda x: F.interpolate(F.gelu(x), (7, 5), mode=mode, align_corners=align))


def test_interpolation_with_many_weights_is_a_linear_layer_per_axis() -> None:
    graph = maps(lambda x: F.interpolate(F.gelu(x), (14, 11), mode="bilinear", align_corners=True))
    assert kinds(graph).count("Linear") == 2


def test_nearest_interpolation_only_moves_values() -> None:
    graph = maps(lambda x: F.interpolate(F.gelu(x), scale_factor=2.0))
    assert set(kinds(graph)) <= {"Patches", "Gelu", "Take", "Route", "Gather"}


@pytest.mark.parametrize("dims", [1, 2, (1, 2)])
def test_means_over_any_axes_are_captured(dims: Any) -> None:
    tokens(lambda x: F.gelu(x).reshape(-1, 4, 4, 8).mean(dims))


def test_sums_and_maxima_are_captured() -> None:
    tokens(lambda x: F.gelu(x).sum(1) + F.gelu(x).amax(1))


def test_padding_with_zeros_constants_and_reflections_is_captured() -> None:
    maps(lambda x: F.pad(F.gelu(x), (1, 2, 0, 1)))
    maps(lambda x: F.pad(F.gelu(x), (1, 1, 1, 1), value=2.0))
    maps(lambda x: F.pad(F.gelu(x), (1, 1, 1, 1), mode="reflect"))


def test_data_movement_in_every_form_only_moves_values() -> None:
    def move(x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(-1, 4, 4, 8).roll((1, 2), (1, 2)).flip(1)
        a, b = y.chunk(2, -1)
        c = torch.stack([b, a], -1).flatten(-2)
        first, *_ = c.unbind(1)
        order = torch.tensor([3, 1, 2, 0])
        return torch.cat(
            [c[:, order][:, :2], first[:, None], c.gather(1, order[:1].view(1, 1, 1, 1).expand(len(x), 1, 4, 8))], 1
        )

    graph = tokens(lambda x: move(F.gelu(x)))
    assert set(kinds(graph)) <= {"Patches", "Gelu", "Take", "Route", "Gather"}


def test_max_pooling_of_maps_padded_with_minus_infinity_leaves_the_padding_out() -> None:
    graph = maps(lambda x: F.max_pool2d(F.pad(F.gelu(x), (0, 1, 0, 1), value=-torch.inf), 3, 2))
    assert kinds(graph)[:3] == ["Patches", "Gelu", "MaxRows"]
