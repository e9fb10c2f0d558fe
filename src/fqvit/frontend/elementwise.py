"""Handlers of elementwise ATen ops and linear layers: each returns a view of a new step, or a new view of an existing step.

A handler raises NotImplementedError with the reason if it does not support its arguments; read.py adds module and op.
See also: norms.py, attention.py (matrix products, softmax), spatial.py (convolutions, reductions, max pooling), resample.py
(average pooling, interpolation).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fqvit.frontend.draft import Kind, Step, View, broadcast_shape, pruned, uniform
from fqvit.frontend.norms import normalised
from fqvit.frontend.operands import Operand, Pending, Reader, as_tensor, double, drop_leading_ones, in_layout, natural

# Elementwise ops


def add(reader: Reader, a: Operand | Pending, b: Operand, alpha: float = 1) -> View | Pending:
    if isinstance(a, Pending):
        constant = as_tensor(b)
        assert constant is not None
        return replace(a, eps=a.eps + float(constant))
    x, y = as_tensor(a), as_tensor(b)
    if y is not None:
        assert isinstance(a, View)
        return a.shifted(alpha * y)
    assert isinstance(b, View)
    if alpha != 1:
        b = b.scaled(torch.tensor(float(alpha)))
    if x is not None:
        return b.shifted(x)
    assert isinstance(a, View)
    shape = broadcast_shape(a.shape, b.shape)
    a, b = pruned(a.broadcast(shape)), pruned(b.broadcast(shape))
    if _rotates(a, b):
        return _rotary(reader, a, b)
    return _binary(reader, "add", a, b)


def _rotates(a: View, b: View) -> bool:
    """Return whether a + b rotates pairs of channels: both are the same values in another order, with constant factors."""
    same = len(a.steps) == 1 and a.steps == b.steps and a.offset is None and b.offset is None
    return same and (a.scale is not None or b.scale is not None) and not torch.equal(a.index, b.index)


def _rotary(reader: Reader, a: View, b: View) -> View:
    shape = drop_leading_ones(a.shape)
    step = reader.step("rotary", [a.reshaped(*shape), b.reshaped(*shape)], shape)
    return step.view().reshaped(*a.shape)


def _binary(reader: Reader, kind: Kind, a: View, b: View) -> View:
    """Combine two views in the layout of one of them, preferably a whole view that is not a linear layer's output."""

    def suits(view: View) -> tuple[bool, ...]:
        whole = view.is_whole()
        return whole, whole and view.step.kind != "linear", whole and view.is_identity()

    first, second = (a, b) if suits(a) >= suits(b) else (b, a)
    left, restore = natural(first)
    if first.is_whole():
        right = in_layout(second, first.inverse(), first.step.shape)
    else:
        right = second.reshaped(*left.shape)
    inputs = [left, right] if first is a else [right, left]
    return restore(reader.step(kind, inputs, left.shape))


def sub(reader: Reader, a: Operand, b: Operand, alpha: float = 1) -> View | Pending:
    if isinstance(b, View):
        return add(reader, a, b.scaled(torch.tensor(-float(alpha))))
    return add(reader, a, b, -alpha)


def rsub(reader: Reader, a: Operand, b: Operand, alpha: float = 1) -> View | Pending:
    return sub(reader, b, a, alpha)


def neg(reader: Reader, x: View) -> View:
    return x.scaled(torch.tensor(-1.0))


def mul(reader: Reader, a: Operand | Pending, b: Operand | Pending) -> View | Pending:
    if isinstance(a, Pending) or isinstance(b, Pending):
        pending, other = (a, b) if isinstance(a, Pending) else (b, a)
        if isinstance(other, View) and isinstance(pending, Pending) and pending.kind == "inverse":
            return normalised(reader, other, pending, math.sqrt)
        raise NotImplementedError("of a norm and another value is not supported")
    x, y = as_tensor(a), as_tensor(b)
    if y is not None:
        assert isinstance(a, View)
        return a.scaled(y)
    if x is not None:
        assert isinstance(b, View)
        return b.scaled(x)
    assert isinstance(a, View) and isinstance(b, View)
    if a.shape == b.shape:
        if a.is_plain and b.is_plain and a.steps == b.steps and torch.equal(a.index, b.index):
            return Pending("square", a)
        gated = _gated(reader, a, b) or _gated(reader, b, a)
        if gated is not None:
            return gated
    shape = broadcast_shape(a.shape, b.shape)
    return _binary(reader, "multiply", pruned(a.broadcast(shape)), pruned(b.broadcast(shape)))


def _gated(reader: Reader, value: View, gate: View) -> View | None:
    """If gate = f(value), return x * f(x) as one function, such as x * sigmoid(1.702 * x); otherwise None."""
    if not (value.is_plain and gate.is_plain) or gate.step.kind != "activation":
        return None
    inner = gate.step.inputs[0]
    if not inner.is_plain or inner.steps != value.steps or not torch.equal(inner.index.flatten()[gate.index], value.index):
        return None
    f, name = gate.step.data["function"], gate.step.data["name"]
    return _apply(reader, inner, f"x*{name}", lambda x: x * f(x), lambda step: View((step,), gate.index))


def div(reader: Reader, a: Operand, b: Operand | Pending, rounding_mode: str | None = None) -> View:
    if isinstance(b, Pending):
        assert isinstance(a, View)
        if b.kind == "norm":
            return normalised(reader, a, b, lambda size: 1.0)
        raise NotImplementedError("by a mean of squares is not supported")
    y = as_tensor(b)
    if y is None or not isinstance(a, View) or rounding_mode is not None:
        raise NotImplementedError("by a value that depends on the image, or with a rounding mode, is not supported")
    return a.scaled(1 / y)


# Activations


def _apply(
    reader: Reader, x: View, name: str, function: Callable[[Tensor], Tensor], restore: Callable[[Step], View] | None = None
) -> View:
    """Apply a function of one variable to every element. A scale and offset that all elements share become part of it."""
    x = pruned(x)
    if restore is None:
        x, restore = natural(x)
    scale = x.scalar_scale()
    offset = 0.0 if x.offset is None else uniform(x.offset)
    if scale is not None and offset is not None and (scale, offset) != (1.0, 0.0):
        inner, factor, term = function, scale, offset
        function, name = (lambda v: inner(factor * v + term)), f"{name}({factor:g}x{term:+g})"
        x = replace(x, scale=None, offset=None)
    step = reader.step("activation", [x], x.shape, name=name, function=function)
    return restore(step)


def _function(name: str, function: Callable[..., Tensor]) -> Callable[..., View]:
    def handler(reader: Reader, x: View, *args: Any, **kwargs: Any) -> View:
        return _apply(reader, x, name, lambda v: function(v, *args, **kwargs))

    return handler


def gelu(reader: Reader, x: View, approximate: str = "none") -> View:
    name = "gelu" if approximate == "none" else "gelu_tanh"
    return _apply(reader, x, name, lambda v: F.gelu(v, approximate=approximate))


def clamp(
    reader: Reader, x: View | Pending, low: float | None = None, high: float | None = None, **bounds: Any
) -> View | Pending:
    low, high = bounds.get("min", low), bounds.get("max", high)
    if isinstance(x, Pending):
        if high is not None:
            raise NotImplementedError("of a norm with an upper bound is not supported")
        return replace(x, eps=float(low or 0.0))
    return _apply(reader, x, f"clamp({low}, {high})", lambda v: v.clamp(low, high))


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu, "relu6": F.relu6, "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid, "hardtanh": F.hardtanh, "leaky_relu": F.leaky_relu, "elu": F.elu, "mish": F.mish,
    "softplus": F.softplus, "exp": torch.exp, "abs": torch.abs, "celu": F.celu, "selu": F.selu, "log_sigmoid": F.logsigmoid,
}  # fmt: skip


def masked_fill(reader: Reader, x: View, mask: Tensor, value: Any) -> View:
    """Fill with a very negative number: a mask of attention scores."""
    number = float(value)
    if not isinstance(mask, Tensor) or number > -1e4:
        raise NotImplementedError("with a value that does not mask attention is not supported")
    return x.shifted(torch.where(mask, -torch.inf, 0.0))


def linear(reader: Reader, x: View, weight: Tensor, bias: Tensor | None = None) -> View:
    if not isinstance(weight, Tensor):
        raise NotImplementedError("with weights that depend on the image is not supported")
    outputs, inputs = weight.shape
    rows = drop_leading_ones(x.shape[:-1])
    step = reader.step("linear", [x.reshaped(*rows, inputs)], (*rows, outputs), weight=weight.double(), bias=double(bias))
    return step.view().reshaped(*x.shape[:-1], outputs)


HANDLERS: dict[str, Callable[..., Any]] = {
    "add": add, "sub": sub, "rsub": rsub, "neg": neg, "mul": mul, "multiply": mul, "div": div, "divide": div,
    "true_divide": div, "gelu": gelu, "clamp": clamp, "clamp_min": clamp, "masked_fill": masked_fill, "linear": linear,
    **{name: _function(name, function) for name, function in ACTIVATIONS.items()},
}  # fmt: skip
