"""Handlers of normalisations, including those written as several ops: x / sqrt(mean(x^2) + eps), x / norm(x)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fqvit.frontend.draft import View, positions
from fqvit.frontend.operands import Pending, Reader, drop_leading_ones, natural


def normalised(reader: Reader, x: View, pending: Pending, gain: Callable[[float], float]) -> View:
    """Divide x by its root mean square (gain(C) = sqrt(C)) or by its Euclidean norm (gain(C) = 1).

    The step itself divides by the root mean square, so its weight is gain(C) / sqrt(C).
    """
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
    rows = (*drop_leading_ones(x.shape[:-1]), size)
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


def group_norm(
    reader: Reader,
    x: View,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> View:
    """Normalise each group of channels over all its channels and positions: one row of a layer norm per group."""
    channels, space = x.shape[1], x.shape[2:]
    per_channel = (1, channels) + (1,) * len(space)
    scale, term = _ones(weight, (channels,)).double(), _zeros(bias, (channels,)).double()
    if groups == 1:
        size = x.index.numel()
        flat, restore = natural(x)
        layout = x.inverse() if x.is_whole() else positions(size)
        data = [t.view(per_channel).expand(x.shape).reshape(-1)[layout] for t in (scale, term)]
        step = reader.step("norm", [flat.reshaped(size)], (size,), weight=data[0], bias=data[1], eps=eps, center=True)
        return restore(step)
    width = channels // groups
    rows = x.reshaped(groups, width, -1).transposed(1, 2)
    count = rows.shape[1]
    step = _norm(
        reader, rows.reshaped(groups, count * width), torch.ones(count * width), torch.zeros(count * width), eps, True
    ).step
    normalised = step.view().reshaped(groups, count, width).transposed(0, 1).reshaped(count, 1, channels)
    scaled = reader.step("depthwise", [normalised], (count, channels), weight=scale[None], bias=term)
    return scaled.view().transposed(0, 1).reshaped(*x.shape)


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
        raise NotImplementedError("other than the Euclidean norm over one axis with keepdim is not supported")
    return Pending("norm", x, axes[0] % len(x.shape) - len(x.shape))


HANDLERS: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm, "rms_norm": rms_norm, "batch_norm": batch_norm, "group_norm": group_norm, "pow": pow_,
    "square": lambda r, x: Pending("square", x), "rsqrt": rsqrt, "linalg_vector_norm": vector_norm, "norm": vector_norm,
}  # fmt: skip
