"""Handlers of ATen ops that compute: each turns views into a new step, or a new view of an existing step.

A handler that meets arguments outside its range raises NotImplementedError with the reason; read.py adds module and op.
See also: attention.py (matrix products, softmax), spatial.py (convolutions, pooling, means).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fqvit.frontend.draft import Kind, Step, View, positions, pruned, uniform

Operand = View | Tensor | float | int


@dataclass
class Reader:
    """State of reading: the path of the module that the current op belongs to."""

    path: str = ""

    def step(self, kind: Kind, inputs: list[View], shape: tuple[int, ...], **data: Any) -> Step:
        return Step(kind, self.path, inputs, shape, data)


@dataclass(frozen=True)
class Pending:
    """A value that only occurs inside a normalisation: x^2, its mean over an axis, or the Euclidean norm.

    kind "square", "mean" (of squares), "norm" or "inverse" (1 / sqrt(mean + eps))   axis: -1 unless normalised over another one
    """

    kind: str
    view: View
    axis: int = -1
    eps: float = 0.0
    shape: tuple[int, ...] = field(default=())


def lead(shape: Sequence[int]) -> tuple[int, ...]:
    """Drop leading axes of length 1."""
    shape = tuple(shape)
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


def natural(view: View) -> tuple[View, Callable[[Step], View]]:
    """Return the view in the layout of its step, and a function that puts a step of that layout back into the view's order.

    A view that leaves out or repeats elements keeps its own layout.
    """
    if view.is_identity():
        return view.reshaped(*view.step.shape), lambda step: step.view().reshaped(*view.shape)
    if view.is_whole():
        return in_layout(view, view.inverse(), view.step.shape), lambda step: View((step,), view.index)
    shape = lead(view.shape) or (1,)
    return view.reshaped(*shape), lambda step: step.view().reshaped(*view.shape)


def in_layout(view: View, layout: Tensor, shape: tuple[int, ...]) -> View:
    """Return the elements of a view at the positions `layout`."""
    if layout.data_ptr() == positions(layout.numel()).data_ptr():
        return view.reshaped(*shape)
    return view.moved(lambda x: x.reshape(-1)[layout].view(shape))


def as_tensor(x: Operand) -> Tensor | None:
    """Return the constant that an operand stands for; None if it depends on the image."""
    if isinstance(x, Tensor):
        return x.double()
    if isinstance(x, View):
        return x.offset if not x.steps else None
    return torch.tensor(float(x), dtype=torch.float64)


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
    shape = torch.broadcast_shapes(a.shape, b.shape)
    a, b = pruned(a.broadcast(shape)), pruned(b.broadcast(shape))
    if _rotates(a, b):
        return _rotary(reader, a, b)
    return _binary(reader, "add", a, b)


def _rotates(a: View, b: View) -> bool:
    """Whether a + b is a rotation of pairs of channels: both are the same values in another order, with constant factors."""
    same = len(a.steps) == 1 and a.steps == b.steps and a.offset is None and b.offset is None
    return same and (a.scale is not None or b.scale is not None) and not torch.equal(a.index, b.index)


def _rotary(reader: Reader, a: View, b: View) -> View:
    shape = lead(a.shape)
    step = reader.step("rotary", [a.reshaped(*shape), b.reshaped(*shape)], shape)
    return step.view().reshaped(*a.shape)


def _binary(reader: Reader, kind: Kind, a: View, b: View) -> View:
    """Combine two views in the layout of one of them: that of a whole one, if possible not of a linear layer's output."""
    first, second = (a, b) if a.is_whole() and (a.step.kind != "linear" or not b.is_whole()) else (b, a)
    if not first.is_whole():
        first, second = a, b
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
        if isinstance(other, View) and isinstance(pending, Pending):
            if pending.kind == "inverse":
                return _normalised(reader, other, pending, math.sqrt)
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
        for value, gate in ((a, b), (b, a)):
            function = _gated(value, gate)
            if function is not None:
                return _apply(reader, gate.step.inputs[0], function[0], function[1], lambda step: View((step,), gate.index))
    shape = torch.broadcast_shapes(a.shape, b.shape)
    return _binary(reader, "multiply", pruned(a.broadcast(shape)), pruned(b.broadcast(shape)))


def _gated(value: View, gate: View) -> tuple[str, Callable[[Tensor], Tensor]] | None:
    """If gate = f(value), return the name and the function x f(x), such as x sigmoid(1.702 x); otherwise None."""
    if not (value.is_plain and gate.is_plain) or gate.step.kind != "activation":
        return None
    inner = gate.step.inputs[0]
    if not inner.is_plain or inner.steps != value.steps or not torch.equal(inner.index.flatten()[gate.index], value.index):
        return None
    f, name = gate.step.data["function"], gate.step.data["name"]
    return f"x*{name}", lambda x: x * f(x)


def div(reader: Reader, a: Operand, b: Operand | Pending, rounding_mode: str | None = None) -> View:
    if isinstance(b, Pending):
        assert isinstance(a, View)
        if b.kind == "norm":
            return _normalised(reader, a, b, lambda size: 1.0)
        raise NotImplementedError("by a mean of squares is not supported")
    y = as_tensor(b)
    if y is None or not isinstance(a, View) or rounding_mode is not None:
        raise NotImplementedError("by a value that depends on the image is not supported")
    return a.scaled(1 / y)


# Normalisation


def _normalised(reader: Reader, x: View, pending: Pending, gain: Callable[[float], float]) -> View:
    """Divide x by the root of its mean square (gain sqrt(C) / sqrt(C)) or by its Euclidean norm (gain 1 / sqrt(C))."""
    moved = x.transposed(pending.axis, -1)
    size = moved.shape[-1]
    other = pending.view.transposed(pending.axis, -1)
    if x.steps != pending.view.steps or not torch.equal(moved.index, other.index):
        raise NotImplementedError("by the norm of another value is not supported")
    weight = torch.full((size,), gain(size) / math.sqrt(size), dtype=torch.float64)
    eps = pending.eps if pending.kind == "inverse" else pending.eps**2 / size
    return _norm(reader, moved, weight, torch.zeros(size, dtype=torch.float64), eps, center=False).transposed(pending.axis, -1)


def _norm(reader: Reader, x: View, weight: Tensor, bias: Tensor, eps: float, center: bool) -> View:
    size = x.shape[-1]
    rows = (*lead(x.shape[:-1]), size)
    data = {"weight": weight.double(), "bias": bias.double(), "eps": eps, "center": center}
    if x.is_whole() and x.is_identity() and x.step.shape[-1] == size:
        rows = x.step.shape
    step = reader.step("norm", [x.reshaped(*rows)], rows, **data)
    return step.view().reshaped(*x.shape)


def layer_norm(
    reader: Reader,
    x: View,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> View:
    if len(shape) != 1:
        raise NotImplementedError("over more than one axis is not supported")
    return _norm(reader, x, _ones(weight, shape), _zeros(bias, shape), eps, center=True)


def rms_norm(reader: Reader, x: View, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> View:
    if len(shape) != 1:
        raise NotImplementedError("over more than one axis is not supported")
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return _norm(reader, x, _ones(weight, shape), _zeros(None, shape), eps, center=False)


def _ones(x: Tensor | None, shape: Sequence[int]) -> Tensor:
    return torch.ones(tuple(shape)) if x is None else x


def _zeros(x: Tensor | None, shape: Sequence[int]) -> Tensor:
    return torch.zeros(tuple(shape)) if x is None else x


def batch_norm(
    reader: Reader,
    x: View,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *rest: Any,
) -> View:
    if training:
        raise NotImplementedError("in training mode is not supported, call eval() first")
    scale = _ones(weight, mean.shape).double() / torch.sqrt(variance.double() + eps)
    term = _zeros(bias, mean.shape).double() - mean.double() * scale
    shape = (1, -1) + (1,) * (len(x.shape) - 2)
    return x.scaled(scale.view(shape)).shifted(term.view(shape))


def pow_(reader: Reader, x: View, exponent: float) -> Pending:
    if not isinstance(x, View) or exponent != 2:
        raise NotImplementedError("other than a square is not supported")
    return Pending("square", x)


def rsqrt(reader: Reader, x: Pending) -> Pending:
    if not isinstance(x, Pending) or x.kind != "mean":
        raise NotImplementedError("outside a normalisation is not supported")
    return replace(x, kind="inverse")


def vector_norm(reader: Reader, x: View, order: float = 2, dim: Any = None, keepdim: bool = False, **rest: Any) -> Pending:
    axes = [dim] if isinstance(dim, int) else list(dim or ())
    if order != 2 or len(axes) != 1 or not keepdim:
        raise NotImplementedError("other than the Euclidean norm over one axis is not supported")
    return Pending("norm", x, axes[0] % len(x.shape) - len(x.shape))


# Activations


def _apply(
    reader: Reader, x: View, name: str, function: Callable[[Tensor], Tensor], restore: Callable[[Step], View] | None = None
) -> View:
    """Apply a function of one variable to every element. One scale and one offset for all elements become part of it."""
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


def clamp(reader: Reader, x: View | Pending, low: float | None = None, high: float | None = None) -> View | Pending:
    if isinstance(x, Pending):
        assert high is None
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
    rows = lead(x.shape[:-1])
    step = reader.step("linear", [x.reshaped(*rows, inputs)], (*rows, outputs), weight=weight.double(), bias=double(bias))
    return step.view().reshaped(*x.shape[:-1], outputs)


def double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


HANDLERS: dict[str, Callable[..., Any]] = {
    "add": add, "sub": sub, "rsub": rsub, "neg": neg, "mul": mul, "multiply": mul, "div": div, "divide": div, "true_divide": div,
    "layer_norm": layer_norm, "rms_norm": rms_norm, "batch_norm": batch_norm, "pow": pow_, "square": lambda r, x: Pending("square", x),
    "rsqrt": rsqrt, "linalg_vector_norm": vector_norm, "norm": vector_norm, "gelu": gelu, "clamp": clamp,
    "clamp_min": lambda r, x, low: clamp(r, x, low), "masked_fill": masked_fill, "linear": linear,
    **{name: _function(name, function) for name, function in ACTIVATIONS.items()},
}  # fmt: skip
