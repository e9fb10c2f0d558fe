"""What lowering rules share: numbers become the nearest integers of their format, constants are named and stored once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from fqvit.errors import FqvitError
from fqvit.ir.fixed import multiplier
from fqvit.ir.program import Move, Site
from fqvit.lowering.emit import Emitter, LoweredValue, _shortened, powers
from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Leaf
from fqvit.quant.calibration import Calibration
from fqvit.quant.qparams import QParams
from fqvit.quant.recipe import Recipe

RATIOS = st.floats(2.0**-30, 2.0**29)
# Just below a power of two, where rounding to 16 bits reaches the next one; and where the shift becomes small.
EDGES = [
    2.0**e * f for e in (-20, -1, 0, 13, 14, 15, 16, 29) for f in (1 - 2.0**-31, 1 - 2.0**-17, 1 - 2.0**-18, 1.0, 1 + 2.0**-16)
]


def emitter(mult: Any = "full", **sites: QParams) -> Emitter:
    return Emitter(Calibration(Recipe(name="test", mult=mult), "logits", 1, sites), False)


def params(scale: list[float], zero: list[int], bits: int = 8, **more: Any) -> QParams:
    return QParams(bits, np.array(scale), np.array(zero, np.int64), **more)


def check_short(ratio: float, mult: int, shift: int) -> None:
    """16 bits wherever a shift of 1 has room for them: the nearest, except that no shift is below 1."""
    assert 1 <= shift <= 62
    if ratio >= 2.0**15:
        assert (mult, shift) == multiplier(ratio)
    else:
        assert 2**15 <= mult < 2**16
        half = 2.0**-shift / 2
        greatest = (mult, shift) == (2**16 - 1, 1)
        assert abs(mult / 2.0**shift - ratio) <= (2 if greatest else 1) * half * (1 + 2.0**-14)


@given(RATIOS)
def test_short_multipliers_are_the_nearest_of_16_bits(ratio: float) -> None:
    check_short(ratio, *_shortened(*multiplier(ratio)))


@pytest.mark.parametrize("ratio", EDGES)
def test_short_multipliers_near_powers_of_two_keep_a_shift_that_programs_may_have(ratio: float) -> None:
    check_short(ratio, *_shortened(*multiplier(ratio)))


def test_a_short_multiplier_of_nothing_is_0() -> None:
    assert _shortened(*multiplier(2.0**-40)) == (0, 62)


def test_the_recipe_or_the_rule_asks_for_short_multipliers() -> None:
    full, short = multiplier(0.3), _shortened(*multiplier(0.3))
    assert emitter().encode("y", 0.3) == full
    assert emitter().encode("y", 0.3, short=True) == emitter("short").encode("y", 0.3) == short
    for found, short_op, expected, dtype in (
        (emitter(), False, full, np.int32),
        (emitter(), True, short, np.uint16),
        (emitter("short"), False, short, np.uint16),
        (emitter("short"), True, short, np.uint16),
    ):
        found.requantizer("y", np.array([0.3, 0.3]), short_op)
        assert found.constants["y.mult"].dtype == dtype and found.constants["y.shift"].dtype == np.uint8
        assert (
            found.constants["y.mult"].tolist() == [expected[0]] * 2 and found.constants["y.shift"].tolist() == [expected[1]] * 2
        )


def test_multipliers_are_16_bits_only_if_all_are() -> None:
    found = emitter()
    found.requantizer("x", np.array([0.3]))  # what is no codes keeps all bits
    assert found.constants["x.mult"].tolist() == [multiplier(0.3)[0]]
    found.requantizer("y", np.array([0.3, 40000.0]), short=True)  # the second has no room to lose 15 bits of shift
    assert found.constants["y.mult"].dtype == np.int32
    assert found.constants["y.mult"].tolist() == [_shortened(*multiplier(0.3))[0], multiplier(40000.0)[0]]
    found.requantizer("z", np.array([2.0**15 * (1 - 2.0**-20)]), short=True)
    assert found.constants["z.mult"].dtype == np.uint16 and found.constants["z.mult"].tolist() == [2**16 - 1]


@pytest.mark.parametrize("ratio", [2.0**30, float("nan"), float("inf"), -1.0])
def test_ratios_that_no_multiplier_holds_are_refused_by_name(ratio: float) -> None:
    with pytest.raises(FqvitError, match="^here: the ratio of its scales is .* no multiplier holds"):
        emitter().encode("here", ratio)


@given(st.lists(RATIOS.map(lambda r: r / 2), min_size=1, max_size=5), st.booleans())
def test_terms_of_a_sum_share_the_finest_shift_that_leaves_their_room(ratios: list[float], short: bool) -> None:
    room, largest = 15 if short else 29, max(ratios)
    found = emitter("short" if short else "full")
    if largest >= 2.0 ** (room - 1):
        with pytest.raises(FqvitError, match="^sum: the ratio of its scales is"):
            found.shared_shift("sum", [np.array(ratios)])
        return
    # In two terms: the largest of either decides.
    mults, shift = found.shared_shift("sum", [np.array(ratios), np.array(ratios[::-1][:1])])
    exact = [r * 2.0**shift for r in (*ratios, ratios[-1])]
    assert [m for mult in mults for m in mult.tolist()] == [int(np.floor(x + 0.5)) for x in exact]
    assert 1 <= shift <= 47 and max(exact) <= 2.0**room
    assert shift == 47 or max(exact) >= 2.0 ** (room - 1)


@pytest.mark.parametrize("short, room", [(False, 29), (True, 15)])
def test_the_ends_of_a_sums_shift(short: bool, room: int) -> None:
    found = emitter("short" if short else "full")
    below = np.nextafter(2.0 ** (room - 1), 0)
    assert found.shared_shift("sum", [np.array([below])]) == ([np.array([2**room])], 1)
    with pytest.raises(FqvitError, match="no multiplier holds"):
        found.shared_shift("sum", [np.array([2.0 ** (room - 1)])])
    assert found.shared_shift("sum", [np.array([2.0**-60])])[1] == 47
    assert found.shared_shift("sum", [np.array([2.0 ** (room - 47)])])[1] == 46


@pytest.mark.parametrize(
    "gain, offset, g_fraction, b_fraction",
    [
        ([1.0, -0.3], [0.7, -1.0], 21, 20),
        ([0.3, -1.0], [-1023.0, 3.0], 21, 20),  # 30 - 10
        ([0.3, -3.0], [1024.3, 3.0], 20, 19),
        ([2.0**22, 1.0], [-(2.0**20), 0.3], 0, 9),
        ([2.0**25, 1.0], [-(2.0**25), 0.3], 0, 4),
        ([2.0**-9, 2.0**-12], [0.0, 0.0], 28, 20),
        ([2.0**-6, 2.0**-12], [0.0, 1.0], 27, 20),
        ([0.0, 0.0], [3.0, 0.3], 21, 20),
    ],
)
def test_affine_is_the_nearest_integers_at_its_shifts(
    gain: list[float], offset: list[float], g_fraction: int, b_fraction: int
) -> None:
    found = emitter()
    shift, b_shift = found.affine("norm", np.array(gain), np.array(offset))
    assert (shift - 24, shift - b_shift) == (g_fraction, b_fraction)
    both = found.constants["norm.affine"]
    assert both.dtype == np.int32 and both.shape == (2, 2)
    assert both[0].tolist() == [int(np.floor(x * 2**g_fraction + 0.5)) for x in gain]
    assert both[1].tolist() == [int(np.floor(x * 2**b_fraction + 0.5)) for x in offset]


def test_what_does_not_fit_32_bits_is_refused_by_name() -> None:
    ends = np.array([2**31 - 1, 1 - 2**31])
    assert emitter().int32("y", "bias", ends).tolist() == ends.tolist()
    for wrong in (2**31, -(2**31)):
        with pytest.raises(FqvitError, match="^y: bias does not fit 32 bits"):
            emitter().int32("y", "bias", np.array([0, wrong]))
    with pytest.raises(FqvitError, match="^norm: gamma or beta does not fit 32 bits"):
        emitter().affine("norm", np.array([2.0**31]), np.array([1.0]))


def test_what_is_added_to_a_sum_is_a_fraction_of_its_step_where_multipliers_are_short() -> None:
    for bits, fraction in ((8, 8), (13, 3), (14, 2), (15, 2), (16, 2)):
        found = emitter("short")
        found.sums["y"] = params([0.5], [3], bits)
        assert found.sum_unit("y") == 0.5 / 2**fraction and found.sum_unit("other") is None
    found = emitter()
    found.sums["y"] = params([0.5], [3])
    assert found.sum_unit("y") is None


@pytest.mark.parametrize(
    "zero, expected",
    [
        ([7] * 6, 7),
        ([7], 7),
        ([1, 1, 2, 2, 3, 3], (1, 2, 3)),
        ([1, 2, 3], (1, 2, 3)),
        ([1, 1, 2, 2, 3, 4], "zero.0"),
        ([1, 2, 1, 2, 1, 2], "zero.0"),
        ([1, 2, 3, 4], "zero.0"),
        ([1, 1, 1, 2], "zero.0"),
    ],
)
def test_zero_points_are_one_number_or_three_or_a_constant(zero: list[int], expected: object) -> None:
    found = emitter()
    assert found.zero(params([0.5] * len(zero), zero)) == expected
    assert [x.tolist() for x in found.constants.values()] == ([zero] if expected == "zero.0" else [])


@pytest.mark.parametrize("bits, dtype", [(8, np.uint8), (9, np.uint16), (16, np.uint16)])
def test_zero_points_have_the_type_of_their_codes(bits: int, dtype: type) -> None:
    found = emitter()
    zero = [0, (1 << bits) - 1, 1, 2]
    name = found.zero(params([0.5] * 4, zero, bits))
    assert isinstance(name, str) and found.constants[name].dtype == dtype and found.constants[name].tolist() == zero


def test_equal_constants_of_a_kind_are_stored_once() -> None:
    found = emitter()
    a, b = np.array([1, 2, 3, 4], np.uint8), np.array([1, 2, 3, 5], np.uint8)
    names = [found.shared(*one) for one in (("a", a), ("a", a.copy()), ("a", b), ("b", a), ("a", a.reshape(2, 2)), ("a", b))]
    assert names == ["a.0", "a.0", "a.1", "b.0", "a.2", "a.1"]
    assert set(found.constants) == {"a.0", "a.1", "a.2", "b.0"} and found.constants["a.2"].shape == (2, 2)


def test_weights_are_those_of_an_earlier_op_only_if_every_part_is_equal() -> None:
    found, leaf = emitter(), Leaf("norm")
    w, e = np.ones((2, 2), np.int8), np.zeros((2, 1), np.uint8)
    assert found.weights("first", leaf, {"w": w, "exponent": e}) is None
    assert found.weights("second", leaf, {"w": w, "exponent": e}) == "first"
    assert found.weights("third", leaf, {"w": w, "exponent": e + 1}) is None
    assert found.weights("fourth", leaf, {"w": w, "exponent": e + 1}) is None  # only the first is an owner
    assert found.weights("other", Leaf("norm"), {"w": w, "exponent": e}) is None
    assert set(found.constants) == {
        f"{op}.{part}" for op in ("first", "third", "fourth", "other") for part in ("w", "exponent")
    }


def test_moves_are_written_down_where_the_size_may_change() -> None:
    found = emitter()
    found.move("y", "windows", (7, 3))
    assert found.moves == {}
    found.resizable = True
    found.move("y", "windows", (7, 3))
    found.move("z", "grid")
    found.move("up", "enlarged", of="large")
    assert found.moves == {"y": Move("windows", 7, 3), "z": Move("grid"), "up": Move("enlarged", of="large")}


def test_an_accumulator_is_no_codes() -> None:
    q = params([0.5], [3])
    assert LoweredValue("y", (4,), q).codes() is q
    with pytest.raises(FqvitError, match="^y: an accumulator where codes are needed"):
        LoweredValue("y", (4,)).codes()


def test_steps_that_are_powers_of_two_apart() -> None:
    finest, alpha, zeros = powers(params([0.3, 1.2, 0.3, 2.4], [5, 9, 5, 11]))
    assert (finest, alpha.tolist(), zeros) == (0.3, [0, 2, 0, 3], (5, 0, 9, 11))
    assert alpha.dtype == np.uint8
    assert powers(params([0.3] * 4, [5] * 4)) == (0.3, pytest.approx(np.zeros(4)), (5,))


def test_sites_say_how_to_read_every_kind_of_codes() -> None:
    many = [0.25, 0.5, 0.5, 1.0]
    sites = {
        "log2": (Leaf("attention"), params([1.0], [0], 4, log2=True, zero_code=True)),
        "levels": (Leaf("attention"), params([1.0], [0], 2, levels=(4, 2, 1, 0))),
        "gelu": (Leaf("gelu"), params(many, [1, 2, 2, 3])),
        "gelu of one": (Leaf("gelu"), params([0.5], [3])),
        "norm": (Leaf("norm"), params(many, [4] * 4)),
        "norm of zeros": (Leaf("norm"), params(many, [1, 2, 3, 5])),
        "qkv": (Leaf("qkv"), params([0.1, 0.1, 0.2, 0.2, 0.25, 0.5], [1, 1, 2, 2, 3, 3])),
        "thirds": (Leaf("qkv"), params([0.1, 0.2, 1 / 3], [1, 2, 3])),
        "ptf": (Leaf("residual"), params([0.5], [3], alpha=np.array([0, 1, 2, 3], np.uint8))),
        "not calibrated": (Leaf("norm"), params([0.5], [3])),
        "sum": (Leaf("norm"), None),
    }
    found = emitter(**{name: q for name, (_, q) in sites.items() if q is not None and name != "not calibrated"})
    found.values = {name: LoweredValue(name, (4,), q) for name, (_, q) in sites.items()}
    read = found.sites(Graph(tuple(Node(name, leaf, ()) for name, (leaf, _) in sites.items()), "sum"))
    assert read == {
        "log2": Site("attention", 4, log2=True, zero_code=True),
        "levels": Site("attention", 2, levels=(4, 2, 1, 0)),
        "gelu": Site("gelu", 8, (0.25,), (1, 2, 3), "alpha.0"),
        "gelu of one": Site("gelu", 8, (0.5,), (3,)),
        "norm": Site("norm", 8, read["norm"].scale, (4,), steps="steps.0"),
        "norm of zeros": Site("norm", 8, read["norm"].scale, "zero.0", steps="steps.0"),
        "qkv": Site("qkv", 8, read["qkv"].scale, (1, 2, 3), steps="steps.1"),
        "thirds": Site("qkv", 8, (0.1, 0.2, 0.333333333), (1, 2, 3)),
        "ptf": Site("residual", 8, (0.5,), (3,), "alpha.1"),
    }
    # Q and K have one step each.
    assert read["qkv"].scale[:2] == (0.1, 0.2) and len(found.constants["steps.1"]) == 2
    for name in ("gelu", "norm", "norm of zeros", "qkv"):
        q = sites[name][1]
        assert q is not None
        scale, zero = read[name].scales_and_zeros(found.constants)
        np.testing.assert_allclose(scale, q.scale, rtol=1e-4)  # counts of units
        np.testing.assert_array_equal(np.repeat(zero, len(q.zero) // len(zero)), q.zero)
