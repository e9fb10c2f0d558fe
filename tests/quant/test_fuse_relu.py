"""Tests of quant/fuse_relu.py: which ReLUs are fused into the layer before them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Add, Leaf, Linear
from fqvit.models.maps import Conv2d, Deconv, Relu
from fqvit.quant.fuse_relu import fuse_relus
from fqvit.quant.plan import plan
from fqvit.quant.recipe import RECIPES

LAYER = Node("layer", Linear(4, 4, "inner"), ("images",))
ACT = Node("act", Relu(), ("layer",))


@pytest.mark.parametrize("leaf", [Linear(4, 4, "inner"), Conv2d(4, 4, "inner"), Deconv(4, 4, "inner")])
def test_a_relu_is_fused_into_a_layer_if_it_is_the_only_reader(leaf: Leaf) -> None:
    assert fuse_relus(Graph((Node("layer", leaf, ("images",)), ACT), "act")) == {"layer": "act"}


def test_a_layer_with_a_second_reader_is_not_fused() -> None:
    assert fuse_relus(Graph((LAYER, ACT, Node("both", Add(), ("layer", "act"))), "both")) == {}


def test_a_layer_that_is_an_output_is_not_fused() -> None:
    assert fuse_relus(Graph((LAYER, ACT), "act", ("layer",))) == {}


def test_a_layer_that_no_relu_reads_is_not_fused() -> None:
    assert fuse_relus(Graph((LAYER, Node("sum", Add(), ("layer", "images"))), "sum")) == {}


def test_a_relu_is_not_fused_into_a_sum() -> None:
    total = Node("sum", Add(), ("images", "images"))
    assert fuse_relus(Graph((total, Node("act", Relu(), ("sum",))), "act")) == {}


def test_a_fused_layer_has_no_site() -> None:
    assert set(plan(Graph((LAYER, ACT), "act"), RECIPES["minmax"])) == {"act"}
