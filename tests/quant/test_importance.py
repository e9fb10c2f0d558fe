"""The influence of tokens on the outputs."""

from __future__ import annotations

import numpy as np
import torch

from fqvit.models.graph import trace
from fqvit.models.load import FloatModel
from fqvit.models.outputs import output_graph
from fqvit.quant.importance import token_weights
from tests.factories import MODELS, float_model, images_for
from tests.factories import one_thread as one_thread


def weights_of(model: FloatModel, outputs: tuple[str, ...], count: int = 6) -> dict[str, torch.Tensor]:
    p = model.preprocess
    graph = output_graph(model.module, (p.channels, p.height, p.width), outputs=outputs)
    return token_weights(graph, p, images_for(p, count))


def test_only_the_class_token_counts_in_the_last_block_of_a_class_token_output() -> None:
    weights = weights_of(float_model("vit"), ("class",))
    last = weights["blocks.1.mlp.fc2"]
    assert last[0] == len(last) and (last[1:] == 0).all()
    keys = weights["blocks.1.attn.qkv"]
    assert (keys > 0).all()


def test_patch_tokens_count_if_they_are_an_output() -> None:
    alone, both = (
        weights_of(float_model("vit"), outputs)["blocks.1.mlp.fc2"] for outputs in (("tokens",), ("class", "tokens"))
    )
    assert alone[0] == 0 and (alone[1:] > 0).all()
    assert (both > 0).all() and both[0] > both[1:].max()


def test_weights_have_mean_1_and_the_shape_of_the_positions() -> None:
    for kind in MODELS:
        model = float_model(kind)
        weights = token_weights(trace(model.module), model.preprocess, images_for(model.preprocess, 3))
        assert {"patch_embed.proj"} <= weights.keys()
        for each in weights.values():
            assert each.dtype == torch.float64 and bool((each >= 0).all())
            np.testing.assert_allclose(float(each.mean()), 1, rtol=1e-9)


def test_weights_are_deterministic_and_leave_no_gradients() -> None:
    model = float_model("vit")
    first, second = (weights_of(model, ("class",)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(parameter.grad is None for parameter in model.module.parameters())
    with torch.no_grad():
        assert torch.equal(weights_of(model, ("class",))["blocks.0.mlp.fc1"], first["blocks.0.mlp.fc1"])
