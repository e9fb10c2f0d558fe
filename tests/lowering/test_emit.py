"""Tests of lowering/emit.py: constants have the right names and dtypes, and equal ones are stored once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from fqvit.errors import FqvitError
from fqvit.ir.fixed import multiplier
from fqvit.lowering.emit import Emitter, LoweredValue
from fqvit.lowering.encode import encode_ratio
from fqvit.models.layers import Leaf
from fqvit.quant.qparams import QParams


def params(scale: list[float], zero: list[int], bits: int = 8, **more: Any) -> QParams:
    return QParams(bits, np.array(scale), np.array(zero, np.int64), **more)


def test_requantizer_writes_full_or_short_multipliers() -> None:
    for short, expected, dtype in (
        (False, multiplier(0.3), np.int32),
        (True, encode_ratio("y", 0.3, short=True), np.uint16),
    ):
        found = Emitter()
        found.requantizer("y", np.array([0.3, 0.3]), short)
        assert found.constants["y.mult"].dtype == dtype and found.constants["y.shift"].dtype == np.uint8
        assert found.constants["y.mult"].tolist() == [expected[0]] * 2
        assert found.constants["y.shift"].tolist() == [expected[1]] * 2


def test_multipliers_are_stored_in_16_bits_only_if_all_fit() -> None:
    found = Emitter()
    found.requantizer("x", np.array([0.3]), short=False)  # full multipliers keep all bits
    assert found.constants["x.mult"].tolist() == [multiplier(0.3)[0]]
    found.requantizer("y", np.array([0.3, 40000.0]), short=True)  # a 16-bit multiplier for 40000 would need a shift below 1
    assert found.constants["y.mult"].dtype == np.int32
    assert found.constants["y.mult"].tolist() == [encode_ratio("y", 0.3, short=True)[0], multiplier(40000.0)[0]]
    found.requantizer("z", np.array([2.0**15 * (1 - 2.0**-20)]), short=True)
    assert found.constants["z.mult"].dtype == np.uint16 and found.constants["z.mult"].tolist() == [2**16 - 1]


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
def test_zero_points_are_one_number_three_numbers_or_a_constant(zero: list[int], expected: object) -> None:
    found = Emitter()
    assert found.zero(params([0.5] * len(zero), zero)) == expected
    assert [x.tolist() for x in found.constants.values()] == ([zero] if expected == "zero.0" else [])


@pytest.mark.parametrize("bits, dtype", [(8, np.uint8), (9, np.uint16), (16, np.uint16)])
def test_zero_points_have_the_dtype_of_their_codes(bits: int, dtype: type) -> None:
    found = Emitter()
    zero = [0, (1 << bits) - 1, 1, 2]
    name = found.zero(params([0.5] * 4, zero, bits))
    assert isinstance(name, str) and found.constants[name].dtype == dtype and found.constants[name].tolist() == zero


def test_equal_constants_of_the_same_kind_are_stored_once() -> None:
    found = Emitter()
    a, b = np.array([1, 2, 3, 4], np.uint8), np.array([1, 2, 3, 5], np.uint8)
    names = [found.shared(*one) for one in (("a", a), ("a", a.copy()), ("a", b), ("b", a), ("a", a.reshape(2, 2)), ("a", b))]
    assert names == ["a.0", "a.0", "a.1", "b.0", "a.2", "a.1"]
    assert set(found.constants) == {"a.0", "a.1", "a.2", "b.0"} and found.constants["a.2"].shape == (2, 2)


def test_weights_are_shared_with_an_earlier_op_only_if_all_parts_are_equal() -> None:
    found, leaf = Emitter(), Leaf("norm")
    w, e = np.ones((2, 2), np.int8), np.zeros((2, 1), np.uint8)
    assert found.weights("first", leaf, {"w": w, "choice": e}) is None
    assert found.weights("second", leaf, {"w": w, "choice": e}) == "first"
    assert found.weights("third", leaf, {"w": w, "choice": e + 1}) is None
    assert found.weights("fourth", leaf, {"w": w, "choice": e + 1}) is None  # only the first op of a leaf shares its weights
    assert found.weights("other", Leaf("norm"), {"w": w, "choice": e}) is None
    assert set(found.constants) == {f"{op}.{part}" for op in ("first", "third", "fourth", "other") for part in ("w", "choice")}


def test_an_accumulator_is_rejected_where_codes_are_expected() -> None:
    q = params([0.5], [3])
    assert LoweredValue("y", (4,), q).codes() is q
    with pytest.raises(FqvitError, match="^y: holds accumulators, expected codes"):
        LoweredValue("y", (4,)).codes()
