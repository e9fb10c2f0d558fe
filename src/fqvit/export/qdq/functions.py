"""Recognize the function that a lookup table computes, and emit it in float: a program contains only the table.

A function is recognized if each of its values, rounded to a code, is within one code of the table's entry.
See also: writer.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fqvit.export.qdq.graph import Floats, QdqGraph

Emit = Callable[[QdqGraph, str, str], str]


@dataclass(frozen=True)
class Function:
    """A function of one variable. emit(graph, x, y): adds its nodes, whose names start with y, and returns the last one."""

    name: str
    value: Callable[[Floats], Floats]
    emit: Emit


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))


def _node(kind: str, **attributes: object) -> Emit:
    return lambda graph, x, y: graph.node(kind, [x], f"{y}.{kind.lower()}", **attributes)


def _gated(factor: float) -> Emit:
    """Emit x * sigmoid(factor * x)."""

    def emit(graph: QdqGraph, x: str, y: str) -> str:
        inner = graph.scaled(x, np.array([factor]), np.zeros(1), f"{y}.gate")
        return graph.node("Mul", [x, graph.node("Sigmoid", [inner], f"{y}.sigmoid")], f"{y}.gated")

    return emit


FUNCTIONS = (
    Function("GELU", lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))), _node("Gelu")),
    Function(
        "GELU with tanh",
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        _node("Gelu", approximate="tanh"),
    ),
    Function("quick GELU", lambda x: x * _sigmoid(1.702 * x), _gated(1.702)),
    Function("SiLU", lambda x: x * _sigmoid(x), _gated(1.0)),
    Function("hardswish", lambda x: x * np.clip(x / 6 + 0.5, 0, 1), _node("HardSwish")),
    Function("ReLU", lambda x: np.maximum(x, 0), _node("Relu")),
    Function("sigmoid", _sigmoid, _node("Sigmoid")),
    Function("hardsigmoid", lambda x: np.clip(x / 6 + 0.5, 0, 1), _node("HardSigmoid", alpha=1 / 6, beta=0.5)),
    Function("tanh", np.tanh, _node("Tanh")),
    Function("ELU", lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), _node("Elu")),
    Function("softplus", lambda x: np.logaddexp(x, 0), _node("Softplus")),
    Function("Mish", lambda x: x * np.tanh(np.logaddexp(x, 0)), _node("Mish")),
)


def recognised(table: NDArray[np.int64], x: Floats, unit: float, zero: int, last: int | None) -> Function | None:
    """Return the function closest to a table, if no entry differs by more than one code; otherwise None.

    x: [n], the real value of each input code   table: [n], codes y = round(f(x) / unit) + zero, at most `last`
    """
    best: tuple[int, Function] | None = None
    for function in FUNCTIONS:
        wanted = np.floor(function.value(x) / unit + 0.5).astype(np.int64) + zero
        if last is not None:
            wanted = np.clip(wanted, 0, last)
        off = np.abs(wanted - table)
        if off.max() <= 1 and (best is None or off.sum() < best[0]):
            best = int(off.sum()), function
    return None if best is None else best[1]
