"""Fixed-point powers of two, softmax and sigmoid, compared with real arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fqvit.detect.fixed.exp import HIGH, LOW, MIDDLE, power_below_one, power_of_two, sigmoid, softmax
from fqvit.detect.float.proposals import sigmoid as float_sigmoid
from fqvit.detect.float.proposals import softmax as float_softmax

LOG = 2**27
LOGITS = st.integers(-40 * LOG, 40 * LOG) | st.sampled_from([0, 2**60, -(2**60), 1, -1])


def test_table_entries_are_rounded_to_nearest() -> None:
    getcontext().prec = 40
    for table, bits in ((HIGH, 9), (MIDDLE, 18), (LOW, 27)):
        for i in range(512):
            exact = (Decimal(2).ln() * i / 2**bits).exp() * 2**30
            assert abs(exact - int(table[i])) <= Decimal("0.500001")


@given(st.integers(-(2**40), 2**40) | st.integers(-9 * LOG, 9 * LOG))
def test_powers_have_a_small_relative_error(x: int) -> None:
    mantissa, exponent = (int(y) for y in power_of_two(np.array(x, np.int64)))
    assert exponent == x // LOG and 2**30 <= mantissa < 2**31
    exact = 2.0 ** (x % LOG / LOG) * 2**30
    assert abs(mantissa - exact) <= 2.5 * exact / 2**30 + 1e-6


def test_integer_powers_are_exact() -> None:
    whole = np.arange(-29, 1, dtype=np.int64)
    assert power_below_one(whole * LOG).tolist() == [2 ** (30 + int(i)) for i in whole]
    assert power_below_one(np.array([-40 * LOG, -(2**62), -(2**62) - 5])).tolist() == [0, 0, 0]


@given(st.lists(LOGITS, min_size=1, max_size=90))
def test_softmax_is_close_to_real_arithmetic(logits: list[int]) -> None:
    found = softmax(np.array([logits], np.int64))[0]
    # Logits are taken relative to the largest one, because float64 cannot represent small differences at 2^60.
    exact = float_softmax(np.array([max(x - max(logits), -(2**40)) / LOG * math.log(2) for x in logits]))
    assert np.abs(found / 2**24 - exact).max() < 2**-24
    assert abs(int(found.sum()) - 2**24) <= len(logits) / 2 + 1
    assert (found >= 0).all() and (found <= 2**24).all()


@given(st.lists(LOGITS, min_size=1, max_size=20))
def test_sigmoid_is_close_to_real_arithmetic(logits: list[int]) -> None:
    found = sigmoid(np.array(logits, np.int64))
    exact = float_sigmoid(np.array(logits) / LOG * math.log(2))
    assert np.abs(found / 2**15 - exact).max() <= 2**-16 + 2**-28
    assert (found >= 0).all() and (found <= 2**15).all()


def test_equal_logits_get_equal_scores_and_large_ones_do_not_overflow() -> None:
    assert softmax(np.full((1, 4), -(2**61) + 1)).tolist() == [[2**22] * 4]
    assert softmax(np.array([[2**61 - 1, -(2**61) + 1]])).tolist() == [[2**24, 0]]
    assert sigmoid(np.array([0, 2**62, -(2**62)])).tolist() == [2**14, 2**15, 0]
