"""Tests of how attention is captured: explicit and fused, with bias, mask and constant queries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.frontend.parity import Tokens, captured, kinds

HEADS, WIDTH = 2, 4
BIAS = torch.randn(HEADS, 16, 16, generator=torch.Generator().manual_seed(3))
MASK = torch.ones(16, 16, dtype=torch.bool).tril()


def attention(mask: Tensor | None = None, explicit: bool = False, norm: bool = False) -> Tokens:
    """Return a module with one attention layer over 16 tokens."""
    model = Tokens(lambda x: x, qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8))

    def body(x: Tensor, layers: nn.ModuleDict) -> Tensor:
        q, k, v = layers["qkv"](x).reshape(len(x), 16, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        if norm:
            q, k = F.layer_norm(q, (WIDTH,)), F.layer_norm(k, (WIDTH,))
        if explicit:
            scores = (q * WIDTH**-0.5) @ k.transpose(-2, -1)
            scores = scores if mask is None else scores + mask
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return layers["proj"](y.transpose(1, 2).flatten(2))

    model.body = body
    return model


FUSED = ["Patches", "Linear", "Heads", "Heads", "Heads", "Scores", "Softmax", "Context", "Linear"]


def test_fused_attention_reads_one_linear_layer() -> None:
    assert kinds(captured(attention())) == FUSED


def test_explicit_attention_is_captured_like_fused_attention() -> None:
    assert kinds(captured(attention(explicit=True))) == FUSED


def test_a_bias_per_head_becomes_part_of_the_scores() -> None:
    for explicit in (False, True):
        assert "BiasedScores" in kinds(captured(attention(BIAS, explicit)))


def test_a_mask_becomes_part_of_the_softmax() -> None:
    graph = captured(attention(MASK))
    softmax = next(node.leaf for node in graph.graph.nodes if type(node.leaf).__name__ == "Softmax")
    assert torch.equal(softmax.mask[0], MASK)


def test_norms_of_queries_and_keys_are_captured() -> None:
    graph = captured(attention(norm=True))
    assert kinds(graph).count("LayerNorm") == 2 and kinds(graph).count("Scores") == 1


def test_separate_layers_for_q_k_and_v_are_merged() -> None:
    model = Tokens(lambda x: x, q=nn.Linear(8, 8), k=nn.Linear(8, 8, bias=False), v=nn.Linear(8, 8))

    def body(x: Tensor, layers: nn.ModuleDict) -> Tensor:
        q, k, v = (layers[name](x).reshape(len(x), 16, HEADS, WIDTH).transpose(1, 2) for name in "qkv")
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    model.body = body
    assert kinds(captured(model)) == FUSED[:-1]


def test_windows_with_a_cyclic_shift_are_captured() -> None:
    model = Tokens(lambda x: x, qkv=nn.Linear(8, 24))

    def body(x: Tensor, layers: nn.ModuleDict) -> Tensor:
        windows = x.reshape(-1, 4, 4, 8).roll((-1, -1), (1, 2)).reshape(-1, 2, 2, 2, 2, 8).transpose(2, 3).reshape(-1, 4, 8)
        q, k, v = layers["qkv"](windows).reshape(-1, 4, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 2, 2, 2, 2, 8)
        return y.transpose(2, 3).reshape(-1, 4, 4, 8).roll((1, 1), (1, 2)).flatten(1, 2)

    model.body = body
    assert "Scores" in kinds(captured(model))


@pytest.mark.parametrize("count", [1, 4])
def test_an_axis_of_heads_before_the_windows_is_moved_after_them(count: int) -> None:
    """NesT has the axes [N, heads, windows, tokens, width]. Joined heads are interleaved: channel 0 of each head is first."""
    model = Tokens(lambda x: x, qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8))

    def body(x: Tensor, layers: nn.ModuleDict) -> Tensor:
        windows = x.reshape(-1, count, 16 // count, 8)
        q, k, v = layers["qkv"](windows).reshape(-1, count, 16 // count, 3, HEADS, WIDTH).permute(3, 0, 4, 1, 2, 5).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).permute(0, 2, 3, 4, 1).flatten(-2)
        return layers["proj"](y).reshape(-1, 16, 8)

    model.body = body
    assert [kind for kind in kinds(captured(model)) if kind != "Route"] == FUSED


def test_cosine_attention_has_a_factor_per_head() -> None:
    factors = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)

    def body(x: Tensor) -> Tensor:
        q = F.normalize(F.gelu(x).reshape(-1, 16, HEADS, WIDTH).transpose(1, 2), dim=-1)
        return (q @ q.transpose(-2, -1) * factors).softmax(-1).flatten(1)

    graph = captured(Tokens(body))
    scores = next(node.leaf for node in graph.graph.nodes if type(node.leaf).__name__ == "Scores")
    assert scores.factors.tolist() == [3.0, 5.0]


def test_attention_over_channels_is_captured() -> None:
    def body(x: Tensor) -> Tensor:
        q, v = F.gelu(x).transpose(1, 2).reshape(-1, HEADS, WIDTH, 16), F.silu(x).transpose(1, 2).reshape(-1, HEADS, WIDTH, 16)
        return ((q @ q.transpose(-2, -1)).softmax(-1) @ v).flatten(1)

    captured(Tokens(body))


def test_a_constant_query_makes_the_scores_a_linear_layer() -> None:
    query = torch.randn(1, HEADS, 1, WIDTH, generator=torch.Generator().manual_seed(4))

    def body(x: Tensor) -> Tensor:
        k = F.gelu(x).reshape(-1, 16, HEADS, WIDTH).transpose(1, 2)
        return F.scaled_dot_product_attention(query.expand(len(x), -1, -1, -1), k, k).flatten(1)

    assert "Scores" not in kinds(captured(Tokens(body)))


def test_einsum_and_batched_products_are_captured() -> None:
    def body(x: Tensor) -> Tensor:
        y = F.gelu(x)
        scores = torch.einsum("nic,njc->nij", y, F.silu(x)) / math.sqrt(8)
        term = torch.zeros(len(x), 16, 16)
        other = torch.baddbmm(term, y, F.silu(x).transpose(1, 2), alpha=0.3).softmax(-1)
        return torch.bmm(scores.softmax(-1), y) + other @ y

    captured(Tokens(body))


def test_grouped_queries_with_rotary_positions_are_captured() -> None:
    """Sapiens2 rotates K once per group, except for the first token, and repeats the heads of K and V."""
    angles = torch.randn(15, 2, generator=torch.Generator().manual_seed(5)).repeat(1, 2)
    model = Tokens(lambda x: x, q=nn.Linear(8, 16), k=nn.Linear(8, 8), v=nn.Linear(8, 8), proj=nn.Linear(16, 8))

    def rotated(x: Tensor) -> Tensor:
        turned = torch.cat([-x[..., 2:], x[..., :2]], -1)
        return x * angles.cos() + turned * angles.sin()

    def body(x: Tensor, layers: nn.ModuleDict) -> Tensor:
        q, k, v = (layers[name](x).reshape(len(x), 16, -1, WIDTH).transpose(1, 2) for name in "qkv")
        q, k = (torch.cat([t[:, :, :1], rotated(t[:, :, 1:])], 2) for t in (q, k))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        return layers["proj"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    model.body = body
    assert kinds(captured(model)).count("Rotary") == 2
