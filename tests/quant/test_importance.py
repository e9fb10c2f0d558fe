"""Tests of token weights, which measure the influence of each token on the outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fqvit.models.graph import trace
from fqvit.models.load import FloatModel
from fqvit.models.outputs import output_graph
from fqvit.quant.importance import EQUAL, token_weights
from tests.factories import MODELS, float_model, images_for
from tests.factories import one_thread as one_thread


def weights_of(model: FloatModel, outputs: tuple[str, ...], count: int = 6) -> dict[str, torch.Tensor]:
    p = model.preprocess
    graph = output_graph(model.module, (p.channels, p.height, p.width), outputs=outputs)
    return token_weights(graph, p, images_for(p, count))


def test_only_the_class_token_counts_in_the_last_block_if_it_is_the_only_output() -> None:
    weights = weights_of(float_model("vit"), ("class",))
    last = weights["blocks.1.mlp.fc2"]
    torch.testing.assert_close(last[1:], torch.full_like(last[1:], EQUAL))
    assert float(last[0]) == pytest.approx(EQUAL + (1 - EQUAL) * len(last))
    keys = weights["blocks.1.attn.qkv"]
    assert (keys > EQUAL).all()


def test_patch_tokens_count_if_they_are_an_output() -> None:
    alone, both = (
        weights_of(float_model("vit"), outputs)["blocks.1.mlp.fc2"] for outputs in (("tokens",), ("class", "tokens"))
    )
    assert alone[0] == EQUAL and (alone[1:] > EQUAL).all()
    assert (both > EQUAL).all() and both[0] > both[1:].max()


def test_sign_bits_give_no_weights_because_they_have_no_gradient() -> None:
    assert weights_of(float_model("vit"), ("class:sign",)) == {}
    both, one = (weights_of(float_model("vit"), outputs) for outputs in (("class:sign", "class"), ("class",)))
    assert both.keys() == one.keys()


def test_weights_have_mean_1_and_the_shape_of_the_positions() -> None:
    for kind in MODELS:
        model = float_model(kind)
        weights = token_weights(trace(model.module), model.preprocess, images_for(model.preprocess, 3))
        assert {"patch_embed.proj"} <= weights.keys()
        for each in weights.values():
            assert each.dtype == torch.float64 and bool((each >= EQUAL).all())
            np.testing.assert_allclose(float(each.mean()), 1, rtol=1e-9)


def test_weights_are_deterministic_and_leave_no_gradients() -> None:
    model = float_model("vit")
    first, second = (weights_of(model, ("class",)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(parameter.grad is None for parameter in model.module.parameters())
    with torch.no_grad():
        assert torch.equal(weights_of(model, ("class",))["blocks.0.mlp.fc1"], first["blocks.0.mlp.fc1"])
