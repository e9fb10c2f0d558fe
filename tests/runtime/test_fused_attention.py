"""The engine fuses attention in every form that it claims to support, with the same bits as the reference.

See also: test_engine_ops.py (compares the random cases of wide_attention.py with the reference).
"""

from __future__ import annotations

import numpy as np
import pytest

from fqvit.ir.attention import LogSoftmax, MatMul, ShiftMatMul
from fqvit.ir.moves import Permute
from fqvit.ir.ops import LayerNorm
from fqvit.ir.program import AnyOp
from tests.ir.draw import Draw
from tests.runtime.programs import ISAS, compare_with_reference, engine_of, program_with

pytestmark = pytest.mark.skipif("avx2" not in ISAS, reason="needs a CPU with AVX2")


def attention(draw: Draw, mult: int | str = 2**30, bits: int = 8) -> list[AnyOp]:
    draw.constants["a.table"] = np.round(2.0**16 * np.exp(-np.arange(2**bits) / 40)).astype(np.int32)
    return [
        MatMul(y="s", a="q", b="k", mult=mult, shift=40, a_zero=128, b_zero=128, y_zero=2 ** (bits - 1), bits=bits),
        LogSoftmax(y="a", x="s"),
        ShiftMatMul(y="c", a="a", v="v", mult=2**30, shift=45, v_zero=128, y_zero=128),
    ]


def tags(draw: Draw, ops: list[AnyOp]) -> list[str]:
    """Compare the engine with the reference. Return the tags of the engine's ops that write the buffers of attention."""
    program, images = program_with(draw, *ops)
    compare_with_reference(program, images, "fused attention")
    times = engine_of(program, 1, isa="avx2").profile(images[0], 1)
    own = {"q", "k", "v", "s", "a", "c", "y", "flat"}  # flat: the reshaped output of the program
    return [time.op for time in times if time.buffer in own and (time.buffer, time.op) != ("flat", "permute")]


def test_queries_and_keys_from_different_buffers_and_of_different_lengths_are_fused() -> None:
    draw = Draw(np.random.default_rng(1), "random")
    draw.buffer("x", (5, 2 * 8))
    draw.buffer("kv", (9, 2 * (8 + 8)))
    split = Permute(y="q", x="x", view=(5, 2, 8), perm=(1, 0, 2))
    parts = [Permute(y=y, x="kv", view=(9, 2, 2, 8), perm=(1, 0, 2), select=(1, i)) for i, y in enumerate("kv")]
    join = Permute(y="y", x="c", view=(2, 5, 8), perm=(1, 0, 2), shape=(5, 16))
    assert tags(draw, [split, *parts, *attention(draw), join]) == ["attention"]


def test_a_single_query_with_wider_values_and_separate_heads_is_fused() -> None:
    draw = Draw(np.random.default_rng(2), "random")
    draw.buffer("q", (3, 1, 8))
    draw.buffer("k", (3, 11, 8))
    draw.buffer("v", (3, 11, 20))
    assert tags(draw, attention(draw)) == ["attention"]


def test_blocks_of_queries_share_the_packed_keys_of_their_head() -> None:
    # Few heads with many queries run in blocks of 252 queries; 301 keys need several blocks of values.
    draw = Draw(np.random.default_rng(4), "random")
    draw.buffer("q", (2, 600, 8))
    draw.buffer("k", (2, 301, 8))
    draw.buffer("v", (2, 301, 40))
    assert tags(draw, attention(draw)) == ["attention"]


def test_normalized_queries_with_one_multiplier_per_head_are_fused() -> None:
    draw = Draw(np.random.default_rng(3), "random")
    for name in ("x", "k", "v"):
        draw.buffer(name, (4, 2, 6, 16))
    draw.constants["q.affine"] = np.stack([np.full(16, 2**21), np.full(16, 2**27)]).astype(np.int32)
    draw.constants["mults"] = np.array([2**30, 2**27], np.int32)
    norm = LayerNorm(y="q", x="x", epsilon=9, shift=40, b_shift=20, zero=128, center=False)
    assert tags(draw, [norm, *attention(draw, "mults")]) == ["layernorm", "attention"]


def test_many_queries_of_one_head_are_fused() -> None:
    draw = Draw(np.random.default_rng(4), "random")
    draw.buffer("q", (1, 600, 4))
    draw.buffer("k", (1, 5, 4))
    draw.buffer("v", (1, 5, 3))
    assert tags(draw, attention(draw)) == ["attention"]


def test_scores_of_16_bits_run_as_separate_ops() -> None:
    draw = Draw(np.random.default_rng(5), "random")
    for name in ("q", "k", "v"):
        draw.buffer(name, (2, 6, 16))
    separate = ["matmul", "log_softmax", "shift_matmul"]
    assert tags(draw, attention(draw, 2**30, 16)) == ["permute"] * 3 + separate


@pytest.mark.parametrize(("tokens", "expected"), [(1500, ["attention"]), (4099, ["matmul", "log_softmax", "shift_matmul"])])
def test_attention_is_fused_up_to_a_maximum_number_of_keys(tokens: int, expected: list[str]) -> None:
    draw = Draw(np.random.default_rng(6), "random")
    draw.buffer("q", (2, 3, 5))
    draw.buffer("k", (2, tokens, 5))
    draw.buffer("v", (2, tokens, 3))
    assert [tag for tag in tags(draw, attention(draw)) if tag != "permute"] == expected


def test_long_reductions_match_the_reference() -> None:
    draw = Draw(np.random.default_rng(7), "random")
    draw.buffer("q", (1, 2, 4099))
    draw.buffer("k", (1, 3, 4099), 9)
    scores = MatMul(y="s", a="q", b="k", mult=2**30, shift=46, a_zero=128, b_zero=256, y_zero=128)
    assert tags(draw, [scores])[-1] == "matmul"
