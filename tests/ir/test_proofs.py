"""Tests that the bounds proved by verify() hold: adversarial inputs never exceed them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fqvit.ir.attention import LogSoftmax, MatMul
from fqvit.ir.kit import NumpyKit
from fqvit.ir.ops import LayerNorm, Linear
from fqvit.ir.value import Scope, Value
from tests.factories import few


@few
@given(seed=st.integers(0, 2**32 - 1))
def test_the_bound_of_linear_is_tight_up_to_the_bias_and_never_exceeded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = int(rng.integers(1, 40))
    w = rng.integers(-127, 128, (3, inputs)).astype(np.int8)
    bias = rng.integers(-(2**16), 2**16, 3).astype(np.int32)
    op = Linear(y="y", x="x", out="acc")
    scope = Scope({"x": Value("u8", (inputs,), 0, 255)}, {"y.w": w, "y.bias": bias}, "y")
    value, (proof,) = op.infer(scope)
    reached = 0
    for sign in (1, -1):
        codes = np.where(sign * w > 0, 255, 0).astype(np.int64)  # one row of inputs per output
        acc = np.einsum("ok,ok->o", codes, w.astype(np.int64)) + bias
        reached = max(reached, int(np.abs(acc).max()))
        assert acc.min() >= value.lo and acc.max() <= value.hi
    assert reached <= proof.bound <= reached + 2 * int(np.abs(bias.astype(np.int64)).max())


@few
@given(seed=st.integers(0, 2**32 - 1), zeros=st.sampled_from([(0, 0), (255, 0), (0, 255), (255, 255), (100, 200)]))
def test_the_bound_of_matmul_holds_at_the_corners(seed: int, zeros: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    inner = int(rng.integers(1, 30))
    known = Value("u8", (1, 1, inner), 0, 255)
    op = MatMul(y="y", a="a", b="b", mult=1, shift=1, a_zero=zeros[0], b_zero=zeros[1])
    _, (proof,) = op.infer(Scope({"a": known, "b": known}, {}, "y"))
    corners = [inner * (a - zeros[0]) * (b - zeros[1]) for a in (0, 255) for b in (0, 255)]
    assert max(map(abs, corners)) == proof.bound


@few
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 300),
    bits=st.integers(2, 4),
    spread=st.sampled_from([0, 1, 3, 40, 255]),
)
def test_the_row_sum_of_log2_codes_never_exceeds_its_bound(seed: int, tokens: int, bits: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    # Any decreasing table is valid; with equal entries all weights round in the same direction.
    table = np.sort(rng.integers(0, 2**20, 256))[::-1].astype(np.int32) if seed % 3 else np.full(256, 7, np.int32)
    table[0] = max(int(table[0]), 1)
    codes = rng.integers(0, spread + 1, (4, 2, 3, tokens)).astype(np.uint8)
    op = LogSoftmax(y="y", x="x", bits=bits)
    value, _ = op.infer(Scope({"x": Value("u8", codes.shape[1:], 0, 255)}, {"y.table": table}, "y"))
    arrays = {"x": codes, "y.table": table}
    a = op.run(NumpyKit(), arrays.__getitem__).astype(np.int64)
    last = 2**bits - 1
    assert value.row_sum == 3 * 2 ** (last - 1) + tokens
    assert int((1 << last - a).sum(-1).max()) <= value.row_sum


@few
@given(seed=st.integers(0, 2**32 - 1), style=st.sampled_from(["two values", "one high", "one low", "random"]))
def test_layernorm_never_exceeds_its_bounds(seed: int, style: str) -> None:
    rng = np.random.default_rng(seed)
    channels = int(rng.integers(1, 70))
    x = rng.integers(0, 256, channels)
    if style == "two values":
        x = np.where(rng.random(channels) < 0.5, 0, 255)
    elif style != "random":
        x = np.full(channels, 0 if style == "one high" else 255)
        x[0] = 255 - x[0]
    zero = int(rng.choice([0, 128, 255]))
    alpha = rng.integers(0, 4, channels).astype(np.uint8)
    constants = {"y.affine": np.ones((2, channels), np.int32), "alpha": alpha}
    op = LayerNorm(y="y", x="x", epsilon=1, shift=30, b_shift=10, zero=zero, alpha="alpha")
    _, proofs = op.infer(Scope({"x": Value("u8", (channels,), 0, 255)}, constants, "y"))
    bounds = {proof.what: proof.bound for proof in proofs}
    v = [(int(code) - zero) * 2 ** int(a) for code, a in zip(x, alpha, strict=True)]
    m1, m2 = sum(v), sum(a * a for a in v)
    d = channels * m2 - m1 * m1 + 1
    j = 0
    while d * 4 ** (j + 1) < 2**62:
        j += 1
    root = int(np.floor(np.sqrt(float(d * 4**j))))
    assert d <= bounds["D"]
    for a in v:
        numerator = abs(channels * a - m1) * 2 ** (24 + j)
        assert numerator + root // 2 <= bounds["t numerator"]
        assert numerator / root <= bounds["t"]
