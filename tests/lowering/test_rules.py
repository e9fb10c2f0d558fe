"""Tests of single lowering rules: the decoded result of the ops is the float leaf's result, rounded once."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.ir.attention import Attend, Softmax
from fqvit.ir.kit import DTYPES, NumpyKit
from fqvit.ir.moves import Take
from fqvit.ir.ops import Linear
from fqvit.ir.program import Move
from fqvit.ir.value import NAMES, Scope, Value
from fqvit.lowering.context import LoweringContext
from fqvit.lowering.emit import Emitter, LoweredValue
from fqvit.lowering.rules import lower_node
from fqvit.lowering.rules.base import Lowering
from fqvit.lowering.rules.layers import to_codes
from fqvit.models import layers, maps
from fqvit.models.graph import Node
from fqvit.quant.calibration import Calibration
from fqvit.quant.qparams import QParams
from fqvit.quant.recipe import Recipe
from fqvit.quant.weights import quantize_linear

Array = np.ndarray[Any, Any]
MEAN, STD = (0.5, 0.25, 0.125), (0.5, 0.25, 0.5)
PREPROCESS = Preprocess(4, 6, 3, 4, "bicubic", MEAN, STD)
X = QParams(8, np.array([0.25]), np.array([100]))


def params(scale: float, zero: int, bits: int = 8, **more: Any) -> QParams:
    return QParams(bits, np.array([scale]), np.array([zero]), **more)


def codes(shape: tuple[int, ...], q: QParams = X, seed: int = 0) -> tuple[LoweredValue, Array]:
    """Return a lowered input and random codes of two images for it."""
    made = np.random.default_rng(seed).integers(0, q.last + 1, (2, *shape)).astype(np.uint8 if q.bits <= 8 else np.uint16)
    return LoweredValue(f"x{seed}", shape, q), made


def numbers(shape: tuple[int, ...], unit: Array, seed: int = 0) -> tuple[LoweredValue, Array]:
    """Return a lowered input and random accumulators of two images for it."""
    return LoweredValue(f"x{seed}", shape, unit=unit), np.random.default_rng(seed).integers(-500, 500, (2, *shape)).astype(
        np.int32
    )


def read(value: LoweredValue, values: Array) -> Tensor:
    """Decode integers to real numbers."""
    wide = torch.from_numpy(values.astype(np.float64))
    return wide * torch.from_numpy(value.unit) if value.q is None else value.q.decode(wide)


class Made:
    """The ops of a rule, run on numpy, and the result of the float leaf for the same inputs.

    options: fields of the recipe (recipe={...}) and of the LoweringContext
    """

    def __init__(
        self, leaf: layers.Leaf, inputs: list[tuple[LoweredValue, Array]], q: QParams | None, *tensors: Tensor, **options: Any
    ) -> None:
        recipe = Recipe(name="test", **options.pop("recipe", {}))
        calibration = Calibration(recipe, "logits", 1, {} if q is None else {"y": q})
        context, self.emit = LoweringContext(calibration, PREPROCESS, **options), Emitter()
        leaf = leaf.double()
        node = Node("y", leaf, tuple(value.buffer for value, _ in inputs), tensors)
        self.lowered = lower_node(Lowering(context, self.emit, node, [value for value, _ in inputs]))
        arrays = {value.buffer: array for value, array in inputs}
        known = {}
        for value, x in inputs:
            levels = () if value.q is None else value.q.levels  # RowCodes puts the largest level into every row
            row_code = levels.index(max(levels)) if levels else None
            lo, hi = (int(x.min()), int(x.max())) if value.q is None else (0, value.q.last)
            known[value.buffer] = Value(NAMES[x.dtype], x.shape[1:], lo, hi, row_code=row_code)
        kit = NumpyKit()
        for op in self.emit.ops:
            known[op.y], proofs = op.infer(Scope(known, self.emit.constants, op.y))
            assert all(proof.holds for proof in proofs)
            arrays[op.y] = op.run(kit, lambda name: arrays[name] if name in arrays else self.emit.constants[name])
            assert arrays[op.y].dtype == DTYPES[known[op.y].dtype]
        self.values = arrays[self.lowered.buffer]
        assert self.values.shape[1:] == self.lowered.shape
        self.found = read(self.lowered, self.values)
        if isinstance(leaf, layers.Patches):
            pixels = torch.from_numpy(inputs[0][1] / 255.0)
            floats = [((pixels - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2)]
        else:
            floats = [read(value, array) for value, array in inputs]
        with torch.no_grad():
            self.exact = leaf(*floats, *tensors)

    def check(self, error: float | None = None) -> None:
        """Check that codes are the nearest ones, or at most `error` codes away; accumulators may be off by at most `error`."""
        exact = self.exact
        if self.lowered.q is not None:
            q = self.lowered.q
            ends = [q.decode(torch.full_like(exact, end)) for end in (0.0, float(q.last))]
            exact = torch.minimum(torch.maximum(exact, ends[0]), ends[1])
            scales = (
                torch.from_numpy(q.channel_scales(exact.shape[-1]))
                if len(q.scale) > 1 or q.alpha is not None
                else float(q.scale[0])
            )
            assert ((self.found - exact).abs() <= (0.5 + 1e-3 if error is None else error) * scales).all()
            assert len(np.unique(self.values)) > 2
        else:
            np.testing.assert_allclose(self.found.numpy(), exact.numpy(), rtol=1e-9, atol=error or 1e-9)


def whole(*shape: int, seed: int = 9) -> Tensor:
    """Return weights [O, ...] that are exact in 8 bits: rows of integers up to 127, each times a power of two."""
    w = np.random.default_rng(seed).integers(-127, 128, shape).astype(float)
    w.reshape(shape[0], -1)[:, 0] = 127
    return torch.from_numpy(w * 2.0 ** -(7 + np.arange(shape[0]) % 3).reshape(-1, *[1] * (len(shape) - 1)))


def with_weights(leaf: Any, weight: Tensor) -> Any:
    leaf.weight.data = weight
    leaf.bias.data = torch.arange(len(leaf.bias)).double() - 2
    return leaf


def linear(role: Any = "fc1") -> layers.Linear:
    return with_weights(layers.Linear(6, 4, role), whole(4, 6))  # type: ignore[no-any-return]


def test_linear_is_exact_in_the_accumulator() -> None:
    Made(linear(), [codes((5, 6))], None).check()


BY_CHANNEL = QParams(8, np.array([0.5, 0.7, 0.3, 2]), np.array([9, 99, 100, 3]))


@pytest.mark.parametrize("q", [params(0.7, 120), params(0.7, 30, 6), BY_CHANNEL])
def test_linear_gives_the_nearest_codes(q: QParams) -> None:
    Made(linear(), [codes((5, 6))], q).check()


@pytest.mark.parametrize("q, unit", [(None, 2.0**-9), (params(0.3, 7), 0.3), (params(2.0**-12, 7), 2.0**-9)])
def test_class_scores_share_the_coarsest_unit(q: QParams | None, unit: float) -> None:
    made = Made(linear("logits"), [codes((6,))], q)
    assert made.lowered.q is None and made.lowered.unit.tolist() == [unit]
    made.check(unit / 2 * (1 + 1e-6))
    assert made.values.dtype == np.int32


def test_with_short_multipliers_the_unit_of_a_term_is_a_fraction_of_the_scale_of_its_sum() -> None:
    made = Made(linear(), [codes((5, 6))], None, recipe={"mult": "short"}, sums={"y": params(0.5, 3)})
    assert made.lowered.unit.tolist() == [0.5 / 256]
    made.check(0.5 / 512 * (1 + 1e-3))
    # A linear layer with its own site does not use the unit of the sum.
    Made(linear(), [codes((5, 6))], params(0.7, 120), recipe={"mult": "short"}, sums={"y": params(0.5, 3)}).check(0.52)


def test_weights_of_the_calibration_are_used() -> None:
    leaf, x = linear(), codes((5, 6))
    chosen = quantize_linear(leaf.weight.detach().double().numpy() * 3, None, X.channel_scales(6), 8)
    context, emit = LoweringContext(Calibration(Recipe(name="test"), "logits", 1, {}, {"y": chosen}), PREPROCESS), Emitter()
    lower_node(Lowering(context, emit, Node("y", leaf, ("x",)), [x[0]]))
    np.testing.assert_array_equal(emit.constants["y.w"], chosen.w)
    np.testing.assert_array_equal(emit.constants["y.bias"], chosen.bias - chosen.w.astype(np.int64).sum(1) * 100)


def test_weights_with_a_group_are_packed() -> None:
    leaf = layers.Linear(16, 4, "fc1")
    leaf.weight.data = whole(4, 16).float()
    value = codes((5, 16))[0]
    calibration = Calibration(Recipe(name="test", weight_bits=4, weight_group=8), "logits", 1, {})
    context, emit = LoweringContext(calibration, PREPROCESS), Emitter()
    lower_node(Lowering(context, emit, Node("y", leaf, ("x0",)), [value]))
    (op,) = emit.ops
    assert isinstance(op, Linear) and op.group == 8 and set(emit.constants) == {"y.w", "y.choice", "y.codebooks", "y.bias"}
    expected = quantize_linear(leaf.weight.detach().double().numpy(), np.zeros(4), X.channel_scales(16), 4, group=8).w
    known = {"x0": Value("u8", (5, 16), 0, 255)}
    np.testing.assert_array_equal(op.weights(Scope(known, emit.constants, "y")), expected)


def test_patches_agree_with_the_convolution_of_normalized_pixels() -> None:
    leaf = with_weights(layers.Patches(3, 2, 4), torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)).double())
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3)).astype(np.uint8)
    made = Made(leaf, [(LoweredValue("pixels", (4, 6, 3)), pixels)], None)
    made.check(0.05)  # the error of 8-bit weights
    assert made.lowered.shape == (6, 4) and made.emit.moves == {}
    assert Made(leaf, [(LoweredValue("pixels", (4, 6, 3)), pixels)], None, resizable=True).emit.moves == {
        "y.pixels": Move("patches")
    }


PREFIX = torch.tensor([[[0.3, -0.7, 2.0, 9.0], [1.0, 2.0, -3.0, 0.49]]]).double()
POSITIONS = torch.linspace(-1, 1, 20).double().reshape(1, 5, 4)


@pytest.mark.parametrize("patches", [numbers((3, 4), np.array([0.01, 0.02, 0.03, 0.04])), codes((3, 4), params(0.05, 99))])
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_embed_prepends_tokens_and_adds_position_embeddings(patches: tuple[LoweredValue, Array], prefix: int) -> None:
    unit = 0.05 if patches[0].q is not None else 0.04
    clipped = PREFIX if patches[0].q is None else PREFIX.clamp(-99 * 0.05, 156 * 0.05)
    made = Made(layers.Embed(), [patches], params(0.1, 128), clipped[:, :prefix], POSITIONS[:, : 3 + prefix])
    assert made.lowered.shape == (3 + prefix, 4)
    made.check(0.5 + (unit / 2 / 0.1 if prefix else 0) + 1e-2)  # the class token is first rounded to the unit of the patches
    if prefix and patches[0].q is None:
        token = np.floor(clipped[0, :prefix].numpy() / patches[0].unit + 0.5)
        assert made.emit.constants["y.prefix"].tolist() == token.tolist()


def test_to_codes_gives_the_nearest_code_per_channel() -> None:
    q = QParams(8, np.array([0.1]), np.array([7]), np.array([0, 1, 2, 3], np.uint8))
    values = np.array([[0.26, 0.52, 1.04, 1.16], [-9.0, 9.0, 120.0, 999.0]])
    assert to_codes(values, q).tolist() == [[10, 10, 10, 8], [0, 52, 255, 255]]
    assert to_codes(np.array([0.26, 0.24, -0.04, -0.06]), params(0.1, 7)).tolist() == [10, 9, 7, 6]


ALPHA = np.array([0, 1, 2, 3], np.uint8)


@pytest.mark.parametrize("q", [params(0.3, 128), QParams(8, np.array([0.05]), np.array([128]), ALPHA), params(0.02, 30000, 16)])
@pytest.mark.parametrize("second", [numbers((3, 4), np.array([0.01, 0.02, 0.03, 0.04]), 1), codes((3, 4), params(0.05, 99), 1)])
def test_add_rounds_once(second: tuple[LoweredValue, Array], q: QParams) -> None:
    Made(layers.Add(), [codes((3, 4), QParams(8, np.array([0.02]), np.array([120]), ALPHA)), second], q).check()


@pytest.mark.parametrize("skip", [0, 1, 2])
def test_mean_skips_the_first_tokens(skip: int) -> None:
    Made(layers.Mean(skip), [codes((5, 40))], params(0.25, 128)).check()


@pytest.mark.parametrize("finest, greatest", [(2.0**-6, 2**14), (256 / 32767, 32767), (2.0**-7, 2**15), (2.0**-8, 2**16)])
def test_gelu_tables_are_int16_if_all_entries_fit(finest: float, greatest: int) -> None:
    by_power = QParams(8, finest * np.array([2.0, 1, 64, 4]), np.array([3, 9, 100, 7]))
    made = Made(layers.Gelu(), [codes((3, 4), params(1.0, 127))], by_power)
    table = made.emit.constants["y.table"]
    assert table.dtype == (np.int16 if greatest < 2**15 else np.int32) and table.max() == greatest
    made.check()


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("index", [[[0, 1], [2, 0]], [[0, -1], [2, 1]]])
def test_take_gathers_rows(index: list[list[int]], join: bool) -> None:
    padded = -1 in index[0]
    leaf = layers.Take(torch.tensor(index), join, "windows", (7, 3))
    made = Made(leaf, [codes((3, 4))], None)
    made.check(1e-9)
    # Without padding the fill is not needed, unless the program can be resized.
    for resizable in (False, True):
        made = Made(leaf, [codes((3, 4))], None, resizable=resizable)
        (take,) = [op for op in made.emit.ops if isinstance(op, Take)]
        assert take.fill == (100 if padded or resizable else 0)
        assert made.emit.moves == ({take.y: Move("windows", 7, 3)} if resizable else {})
    plain = Made(layers.Take(torch.tensor(index), join), [codes((3, 4))], None, resizable=True)
    assert plain.emit.moves == {}


def test_scores_are_the_nearest_codes_with_and_without_a_bias() -> None:
    index = torch.tensor([[0, 1, 2], [3, 0, 1], [4, 3, 0]])
    a, b = codes((2, 3, 8), params(0.03, 120)), codes((2, 3, 8), params(0.05, 99), 1)
    Made(layers.Scores(0.35), [a, b], params(0.3, 128)).check()
    table = torch.linspace(-9, 9, 10).double().reshape(5, 2)
    Made(layers.BiasedScores(0.35, index), [a, b], params(0.3, 128), table).check(0.51)


MASK = torch.tensor([[[True, True, False], [True, True, False], [False, False, True]], [[True] * 3] * 3])
SCORES = params(0.04, 128)
LEVELS = (1000, 500, 250, 100, 50, 20, 5, 0)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize(
    "q, error", [(params(1 / 255, 0), 1.5), (params(1.0, 0, 4, log2=True), 0.35), (params(1.0, 0, 3, levels=LEVELS), 0.4)]
)
def test_softmax_is_close_to_that_of_the_float_leaf(q: QParams, error: float, mask: Tensor | None) -> None:
    made = Made(layers.Softmax(mask, (7, 3)), [codes((2, 2, 3, 3), SCORES)], q, masked=mask is not None, resizable=True)
    assert (made.found - made.exact).abs().max() <= error * float(q.scale[0])
    if mask is not None:
        assert made.found[:, 0, :, 2, :2].max() == made.found[:, 0, :, :2, 2].max() == 0
    assert made.emit.moves == ({} if mask is None else {"y": Move("windows", 7, 3)})


def test_a_mask_that_is_not_a_partition_is_rejected() -> None:
    mask = torch.tensor([[[True, True, False], [True, True, True], [False, True, True]]])
    with pytest.raises(FqvitError, match="not a partition"):
        Made(layers.Softmax(mask), [codes((1, 2, 3, 3), SCORES)], params(1 / 255, 0))


def test_more_than_256_regions_in_a_window_are_rejected() -> None:
    mask = torch.eye(257, dtype=torch.bool)[None]
    with pytest.raises(FqvitError, match="257 regions in a window, expected at most 256"):
        Made(layers.Softmax(mask), [codes((1, 2, 257, 257), SCORES)], params(1 / 255, 0))


BYTES = tuple(range(256))


@pytest.mark.parametrize("mult", ["full", "short"])
@pytest.mark.parametrize(
    "q", [params(1 / 255, 0), params(1.0, 0, 4, log2=True), params(1.0, 0, 3, levels=LEVELS), params(1.0, 0, 8, levels=BYTES)]
)
def test_attention_times_v_gives_the_nearest_codes(q: QParams, mult: str) -> None:
    value, attention = codes((2, 3, 3), q)
    if q.levels:
        attention[..., 0] = np.argmax(q.levels)
    if not q.log2 and not q.levels:
        attention = attention // 3  # rows sum to at most 1
    v = codes((2, 3, 4), params(0.05, 99), 1)
    made = Made(layers.Context(), [(value, attention), v], params(0.1, 128), recipe={"mult": mult})
    made.check(0.52)
    if q.levels:
        (attend,) = [op for op in made.emit.ops if isinstance(op, Attend)]
        assert attend.levels == (() if q.levels == BYTES else LEVELS)
        assert attend.mult < 2**29


def multiplier_of(
    leaf: layers.Leaf, inputs: list[tuple[LoweredValue, Array]], q: QParams, mult: str = "full"
) -> tuple[int, int]:
    (op,) = [op for op in Made(leaf, inputs, q, recipe={"mult": mult}).emit.ops if isinstance(op, Attend | Softmax)]
    return op.mult, op.shift


@pytest.mark.parametrize("scale", [*(0.1 * 1.07**i for i in range(12)), 50 * (1 - 2.0**-31)])
def test_multipliers_of_attend_leave_room_for_the_largest_level(scale: float) -> None:
    q = params(1.0, 0, 3, levels=LEVELS)
    value, attention = codes((2, 3, 3), q)
    inputs = [(value, attention * 0), codes((2, 3, 4), params(scale, 99), 1)]
    exact = Fraction(scale) / Fraction(0.2) / 1000
    mult, shift = multiplier_of(layers.Context(), inputs, params(0.2, 128))
    assert 2**28 <= mult < 2**29
    # Rounded to 31 bits, then to 29 bits, and clamped below 2^29.
    assert abs(mult - exact * 2**shift) <= Fraction(5, 8) + Fraction(1, 10**6) or mult == 2**29 - 1 < exact * 2**shift
    mult, shift = multiplier_of(layers.Context(), inputs, params(0.2, 128), "short")
    assert 2**15 <= mult < 2**16 and abs(mult - exact * 2**shift) <= Fraction(51, 100)


@pytest.mark.parametrize("scale", [1 / 255, 1 / 15, 0.3, 0.7, 1.0, 1e-4, 3e-3])
def test_the_multiplier_of_softmax_has_52_bits(scale: float) -> None:
    mult, shift = multiplier_of(layers.Softmax(), [codes((2, 3, 3), SCORES)], params(scale, 0))
    # The float64 quotient may be off by one in the last place.
    assert abs(mult - Fraction(2**shift) / Fraction(scale)) <= 1 and 2**51 <= mult < 2**53 and shift <= 52


@pytest.mark.parametrize("part", [0, 1, 2])
def test_heads_select_q_k_or_v(part: int) -> None:
    Made(layers.Heads(2, part), [codes((2, 3, 12))], None).check(1e-9)


@pytest.mark.parametrize("q", [None, params(0.7, 120)])
def test_convolutions_are_padded_with_zeros(q: QParams | None) -> None:
    made = Made(with_weights(maps.Conv2d(3, 4, "fpn"), whole(4, 3, 3, 3)), [codes((2, 3, 3))], q, resizable=True)
    made.check()
    assert made.emit.moves == {"y.rows": Move("neighbours"), "y.squares": Move("grid")}


def test_deconvolutions_write_2x2_blocks() -> None:
    leaf = maps.Deconv(3, 5, "fpn")
    leaf.weight.data = whole(20, 3).T.reshape(3, 2, 2, 5).permute(0, 3, 1, 2)
    leaf.bias.data = torch.arange(5).double() - 2
    Made(leaf, [codes((2, 3, 3))], params(0.5, 120)).check(0.52)
    with pytest.raises(FqvitError, match="^y: not calibrated"):
        Made(leaf, [codes((2, 3, 3))], None)


def test_a_fused_relu_emits_no_op() -> None:
    x = (LoweredValue("y", (2, 3)), np.zeros((2, 2, 3), np.int32))
    assert Made(maps.Relu(), [x], params(0.5, 0)).lowered is x[0]
    with pytest.raises(
        FqvitError, match="^y: cannot fuse this ReLU, expected it to be the only reader of a convolution or linear layer"
    ):
        Made(maps.Relu(), [codes((2, 3))], params(0.5, 0))


def test_rules_that_only_move_values_are_exact() -> None:
    by_channel = QParams(8, np.array([0.5, 0.25]), np.array([3, 4]))
    grid = Made(maps.Grid((2, 3)), [codes((6, 2), by_channel)], None, resizable=True)
    flat = Made(maps.Flatten(), [codes((2, 3, 2), by_channel)], None, resizable=True)
    small, large = codes((2, 3, 2), by_channel), codes((4, 6, 2), by_channel, 1)
    up = Made(maps.Upsample(), [small, large], None, resizable=True)
    down = Made(maps.Subsample(), [codes((3, 5, 2), by_channel)], None, resizable=True)
    for made in (grid, flat, up, down):
        assert torch.equal(made.found, made.exact)
    assert [made.emit.moves for made in (grid, flat, up, down)] == [
        {"y": Move("grid")},
        {},
        {"y": Move("enlarged", of="x1")},
        {"y": Move("second")},
    ]
