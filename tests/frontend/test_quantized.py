"""Test that captured attention in unusual layouts, once quantized, is bit-exact in the engine and close to float."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fqvit
from fqvit.models.load import FloatModel
from fqvit.models.pixels import normalise
from fqvit.runtime import reference
from tests.frontend.parity import SIZE, Tokens, captured

HEADS, WIDTH = 2, 4
SIZES = torch.logspace(-1.5, 0, 8)  # factors that make the channels of V differ widely in magnitude
PREPROCESS = fqvit.Preprocess(8, 8, 3, 8, "bicubic", (0.5,) * 3, (0.25,) * 3)
Split = Callable[[Tensor], Tensor]


def in_order(x: Tensor) -> Tensor:
    """[N, 16, 8] -> [N, heads, 16, width]"""
    return x.reshape(-1, 16, HEADS, WIDTH).transpose(1, 2)


def interleaved(x: Tensor) -> Tensor:
    """Like `in_order`, but channel c belongs to head c mod 2."""
    return x.reshape(-1, 16, WIDTH, HEADS).permute(0, 3, 1, 2)


def similarity(body: Callable[[Tensor, nn.ModuleDict], Tensor]) -> float:
    """Quantize a module and return the cosine similarity of the integer and the float output."""
    model = Tokens(body, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 8), proj=nn.Linear(8, 8))
    module = captured(model)
    images = np.random.default_rng(0).integers(0, 256, (9, *SIZE[1:], 3), dtype=np.uint8)
    floats = FloatModel("attention", module, PREPROCESS, None, "test")
    program = fqvit.lower(floats, fqvit.calibrate(floats, images[:8], fqvit.load_recipe("fqvit")))
    codes = fqvit.Engine(program, 1).run(images[8:])
    np.testing.assert_array_equal(codes, reference.run(program, images[8:]))
    (output,) = program.header.outputs
    with torch.no_grad():
        wanted = module(normalise(images[8:], PREPROCESS)).double().numpy().ravel()
    have = (codes.ravel().astype(np.float64) - output.zero) * output.scale
    return float(have @ wanted / np.linalg.norm(have) / np.linalg.norm(wanted))


@pytest.mark.parametrize("split", [in_order, interleaved])
def test_v_may_have_its_heads_in_any_order(split: Split) -> None:
    def body(x: Tensor, layers: nn.ModuleDict) -> Tensor:
        q, k, v = in_order(layers["q"](x)), in_order(layers["k"](F.gelu(x))), split(layers["v"](x) * SIZES)
        return layers["proj"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    assert similarity(body) > 0.99


def test_keys_and_values_may_be_the_same() -> None:
    def body(x: Tensor, layers: nn.ModuleDict) -> Tensor:
        q, v = in_order(layers["q"](x)), in_order(layers["v"](x) * SIZES)
        return layers["proj"](F.scaled_dot_product_attention(q, v, v).transpose(1, 2).flatten(2))

    assert similarity(body) > 0.99
