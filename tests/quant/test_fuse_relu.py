"""Tests of quant/fuse_relu.py: which ReLUs are fused into the map before them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Add, Leaf, Linear
from fqvit.models.maps import Conv2d, Deconv, Relu
from fqvit.quant.fuse_relu import fuse_relus
from fqvit.quant.plan import plan
from fqvit.quant.recipe import RECIPES

MAP = Node("map", Linear(4, 4, "inner"), ("images",))
ACT = Node("act", Relu(), ("map",))


@pytest.mark.parametrize("leaf", [Linear(4, 4, "inner"), Conv2d(4, 4, "inner"), Deconv(4, 4, "inner")])
def test_a_relu_is_fused_into_the_map_that_it_alone_reads(leaf: Leaf) -> None:
    assert fuse_relus(Graph((Node("map", leaf, ("images",)), ACT), "act")) == {"map": "act"}


def test_a_map_with_a_second_reader_is_not_fused() -> None:
    assert fuse_relus(Graph((MAP, ACT, Node("both", Add(), ("map", "act"))), "both")) == {}


def test_a_map_that_is_an_output_is_not_fused() -> None:
    assert fuse_relus(Graph((MAP, ACT), "act", ("map",))) == {}


def test_a_map_that_no_relu_reads_is_not_fused() -> None:
    assert fuse_relus(Graph((MAP, Node("sum", Add(), ("map", "images"))), "sum")) == {}


def test_a_relu_is_not_fused_into_a_sum() -> None:
    total = Node("sum", Add(), ("images", "images"))
    assert fuse_relus(Graph((total, Node("act", Relu(), ("sum",))), "act")) == {}


def test_a_fused_map_has_no_site_of_its_own() -> None:
    assert set(plan(Graph((MAP, ACT), "act"), RECIPES["minmax"])) == {"act"}
