"""Tests of lowering/sites.py: how a header describes each quantization format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from fqvit.ir.program import Site
from fqvit.lowering.emit import Emitter, LoweredValue
from fqvit.lowering.sites import describe_sites
from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Leaf
from fqvit.quant.calibration import Calibration
from fqvit.quant.qparams import QParams
from fqvit.quant.recipe import Recipe


def params(scale: list[float], zero: list[int], bits: int = 8, **more: Any) -> QParams:
    return QParams(bits, np.array(scale), np.array(zero, np.int64), **more)


def test_every_quantization_format_is_described() -> None:
    many = [0.25, 0.5, 0.5, 1.0]
    sites = {
        "log2": (Leaf("attention"), params([1.0], [0], 4, log2=True, zero_code=True)),
        "levels": (Leaf("attention"), params([1.0], [0], 2, levels=(4, 2, 1, 0))),
        "gelu": (Leaf("gelu"), params(many, [1, 2, 2, 3])),
        "gelu with one scale": (Leaf("gelu"), params([0.5], [3])),
        "norm": (Leaf("norm"), params(many, [4] * 4)),
        "norm with zero points": (Leaf("norm"), params(many, [1, 2, 3, 5])),
        "qkv": (Leaf("qkv"), params([0.1, 0.1, 0.2, 0.2, 0.25, 0.5], [1, 1, 2, 2, 3, 3])),
        "qkv with three scales": (Leaf("qkv"), params([0.1, 0.2, 1 / 3], [1, 2, 3])),
        "ptf": (Leaf("residual"), params([0.5], [3], alpha=np.array([0, 1, 2, 3], np.uint8))),
        "not calibrated": (Leaf("norm"), params([0.5], [3])),
        "sum": (Leaf("norm"), None),
    }
    calibrated = {name: q for name, (_, q) in sites.items() if q is not None and name != "not calibrated"}
    values = {name: LoweredValue(name, (4,), q) for name, (_, q) in sites.items()}
    graph = Graph(tuple(Node(name, leaf, ()) for name, (leaf, _) in sites.items()), "sum")
    emitter = Emitter()
    found = describe_sites(graph, Calibration(Recipe(name="test"), "logits", 1, calibrated), values, emitter)
    assert found == {
        "log2": Site("attention", 4, log2=True, zero_code=True),
        "levels": Site("attention", 2, levels=(4, 2, 1, 0)),
        "gelu": Site("gelu", 8, (0.25,), (1, 2, 3), "alpha.0"),
        "gelu with one scale": Site("gelu", 8, (0.5,), (3,)),
        "norm": Site("norm", 8, found["norm"].scale, (4,), steps="steps.0"),
        "norm with zero points": Site("norm", 8, found["norm"].scale, "zero.0", steps="steps.0"),
        "qkv": Site("qkv", 8, found["qkv"].scale, (1, 2, 3), steps="steps.1"),
        "qkv with three scales": Site("qkv", 8, (0.1, 0.2, 0.333333333), (1, 2, 3)),
        "ptf": Site("residual", 8, (0.5,), (3,), "alpha.1"),
    }
    # Q and K have one scale each.
    assert found["qkv"].scale[:2] == (0.1, 0.2) and len(emitter.constants["steps.1"]) == 2
    for name in ("gelu", "norm", "norm with zero points", "qkv"):
        q = sites[name][1]
        assert q is not None
        scale, zero = found[name].scales_and_zeros(emitter.constants)
        np.testing.assert_allclose(scale, q.scale, rtol=1e-4)  # scales are rounded to multiples of a unit
        np.testing.assert_array_equal(np.repeat(zero, len(q.zero) // len(zero)), q.zero)
