"""Tests of GELU tables: every entry, at many scales and zero points, against x * Phi(x) with 60 decimal digits."""

from __future__ import annotations

from decimal import ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fqvit.lowering.context import LoweringContext
from fqvit.lowering.emit import Emitter, LoweredValue
from fqvit.lowering.rules import lower_node
from fqvit.lowering.rules.base import Lowering
from fqvit.models import layers
from fqvit.models.graph import Node
from fqvit.quant.qparams import QParams

NEAR = Decimal("1e-9")  # in codes: within this distance of a half, float64 may round either way
# (scale, zero point) of the input and of the output: typical, very coarse and very fine ones, zero points at both ends.
SETTINGS = [
    (0.05, 128, 0.02, 12),
    (0.031, 100, 0.017, 10),
    (0.1, 255, 0.001, 170),
    (0.1, 0, 0.1, 0),
    (1.0, 128, 0.5, 0),
    (1e-4, 128, 1e-4, 128),
    (0.02, 90, 0.3, 1),
    (0.0078125, 128, 0.00390625, 43),
    (0.25, 200, 1e-3, 255),
]


def exact_gelu(x: Decimal) -> Decimal:
    """Return x * Phi(x), where Phi(x) = 1/2 + phi(x) * (x + x^3 / 3 + x^5 / 15 + ...) and phi is the normal density.

    All terms of the sum have the same sign.
    """
    if abs(x) > 14:  # phi is below 1e-42 there
        return x if x > 0 else Decimal(0)
    term = total = x
    k = 1
    while abs(term) > Decimal("1e-58") * (1 + abs(total)):
        k += 2
        term = term * x * x / k
        total += term
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    density = (-x * x / 2).exp() / (2 * pi).sqrt()
    return x * (Decimal(1) / 2 + density * total)


def table_of(q_x: QParams, q: QParams) -> tuple[dict[str, Any], Any]:
    """Return the constants and the op that lowering emits for a GELU between two sites."""
    calibration: Any = SimpleNamespace(recipe=SimpleNamespace(mult="full"), sites={"g": q})
    context = LoweringContext(calibration, SimpleNamespace())  # type: ignore[arg-type]
    emit = Emitter()
    low = Lowering(context, emit, Node("g", layers.Gelu(), ("x",)), [LoweredValue("x", (4, len(q.scale)), q_x)])
    lower_node(low)
    return emit.constants, emit.ops[0]


def codes_of(value: Decimal, scale: float, zero: int, last: int) -> set[int]:
    """Return clip(floor(value / scale + 1/2) + zero, 0, last); both neighbours if float64 may round either way."""
    code = value / Decimal(scale) + Decimal("0.5")
    floors = {int((code + d).to_integral_value(ROUND_FLOOR)) for d in (-NEAR, NEAR)}
    return {min(max(floor + zero, 0), last) for floor in floors}


@pytest.mark.parametrize("x_bits", [8, 10])
@pytest.mark.parametrize("s_x, z_x, s_y, z_y", SETTINGS)
def test_every_entry_is_the_rounded_gelu_of_its_code(s_x: float, z_x: int, s_y: float, z_y: int, x_bits: int) -> None:
    q_x = QParams(x_bits, np.array([s_x]), np.array([z_x]))
    constants, _ = table_of(q_x, QParams(8, np.array([s_y]), np.array([z_y])))
    table = constants["g.table"]
    assert table.dtype == np.uint8 and len(table) == 2**x_bits
    with localcontext(prec=80):
        for code in range(2**x_bits):
            value = exact_gelu((code - z_x) * Decimal(s_x))
            assert int(table[code]) in codes_of(value, s_y, z_y, 255), code


@pytest.mark.parametrize("s_x, z_x, s_y", [(0.05, 128, 0.02), (0.1, 255, 0.001), (1e-4, 128, 1e-4), (0.5, 128, 1e-3)])
def test_with_per_channel_powers_of_two_every_result_is_rounded_once(s_x: float, z_x: int, s_y: float) -> None:
    """The table holds floor(2 * value / finest scale); Lookup's shift rounds the entry to the scale of each channel."""
    powers = np.arange(5)
    q = QParams(8, s_y * 2.0**powers, np.array([12, 8, 7, 3, 1]))
    constants, op = table_of(QParams(8, np.array([s_x]), np.array([z_x])), q)
    table, alpha = constants["g.table"], constants[op.alpha]
    assert table.dtype == (np.int16 if max(abs(int(e)) for e in table) < 2**15 else np.int32)
    assert alpha.tolist() == powers.tolist() and op.y_zero == (12, 8, 7, 3, 1)
    with localcontext(prec=80):
        for code in range(256):
            value = exact_gelu((code - z_x) * Decimal(s_x))
            floors = {int((2 * value / Decimal(s_y) + d).to_integral_value(ROUND_FLOOR)) for d in (-NEAR, NEAR)}
            assert int(table[code]) in floors, code
            for channel, power in enumerate(alpha.tolist()):
                rounded = (Fraction(int(table[code]), 2 ** (power + 1)) + Fraction(1, 2)).__floor__()
                found = min(max(rounded + op.y_zero[power], 0), 255)
                assert found in codes_of(value, float(q.scale[channel]), int(q.zero[channel]), 255), (code, channel)
