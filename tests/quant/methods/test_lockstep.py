"""Tests of running the float and the quantized model in lockstep: which images are used, their order, missing biases."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fqvit.models.graph import Node, trace
from fqvit.models.layers import Linear
from fqvit.models.pixels import normalise
from fqvit.quant.fit import site_shapes
from fqvit.quant.methods import lockstep
from fqvit.quant.methods.lockstep import InputBatches, LinearLayer, run_in_lockstep
from tests.factories import float_model, images_for

MODEL = float_model("vit")
GRAPH = trace(MODEL.module)
IMAGES = images_for(MODEL.preprocess, 37)


def float_values(count: int) -> dict[str, Tensor]:
    """The float model's output at every node."""
    found: dict[str, Tensor] = {}

    def quantize_node(node: Node, exact: InputBatches, quantized: InputBatches) -> list[Tensor]:
        outputs = [node.leaf(*xs, *node.params) for xs in zip(*exact, strict=True)]
        found[node.name] = torch.cat(outputs)
        return outputs

    with torch.no_grad():
        run_in_lockstep(GRAPH, MODEL.preprocess, IMAGES[:count], quantize_node, None, "")
    return found


@pytest.mark.parametrize("count", [1, 16, 37])
def test_every_image_is_used_once_in_order(count: int) -> None:
    expected: dict[str, Tensor] = {}

    def visit(node: Node, y: Tensor) -> Tensor:
        expected[node.name] = y
        return y

    with torch.no_grad():
        GRAPH.run(normalise(IMAGES[:count], MODEL.preprocess), visit)
    found = float_values(count)
    assert list(found) == list(expected)
    for name, y in expected.items():
        torch.testing.assert_close(found[name], y, rtol=1e-4, atol=1e-5)


def test_the_number_of_images_is_limited_by_the_largest_site(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(math.prod(shape) for shape in site_shapes(GRAPH, MODEL.preprocess).values())
    for limit, count in ((3 * largest, 3), (4 * largest - 1, 3), (1, 1)):
        monkeypatch.setattr(lockstep, "MAX_ELEMENTS", limit)
        assert len(float_values(37)[GRAPH.output]) == count


def test_a_layer_without_a_bias_gets_a_zero_bias() -> None:
    node = Node("linear", Linear(4, 3, "norm", bias=False), ("x",), ())
    found = LinearLayer.of(node, MODEL.preprocess)
    assert found.bias.tolist() == [0.0, 0.0, 0.0] and found.weight.shape == (3, 4)
