"""Quantize activations and weights so that gradients flow through (fake quantization).

Rounding has the gradient of the identity (straight-through estimator); scales and zero points get the gradients of the
decoded value (LSQ, Esser 2020; LSQ+, Bhalgat 2020). See also: reconstruct.py (learns with these).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Affine(torch.autograd.Function):
    """y = (clip(floor(x / scale + 1/2) + zero, 0, last) - zero) * scale for x [..., C], scale and zero [C] or [1]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, last: int) -> Tensor:
        whole = zero.round()
        ratio = x / scale
        codes = (ratio + 0.5).floor_()
        steps = codes.clamp(-whole, last - whole)
        inside = steps == codes
        ctx.save_for_backward(inside, torch.where(inside, steps - ratio, steps), scale, zero)
        return steps * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        inside, slope, scale, zero = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        by_scale = (rows * slope.reshape(rows.shape)).sum(0)
        passed = grad * inside
        by_zero = -scale * (rows.sum(0) - passed.reshape(rows.shape).sum(0))
        return passed, _like(by_scale, scale), _like(by_zero, zero), None


class _Grid(torch.autograd.Function):
    """y = (the value of `steps` nearest to x / scale) * scale for x of any shape; scale: [1].

    A table with the nearest step of each integer is much faster than a search.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, steps: Tensor) -> Tensor:
        ratio = x / scale
        first, last = int(steps[0]), int(steps[-1])
        table = steps[torch.bucketize(torch.arange(first, last + 1.0), (steps[1:] + steps[:-1]) / 2, right=True)]
        index = (ratio - first).round_().clamp_(0, last - first).int()
        nearest = table.index_select(0, index.flatten()).view_as(x)
        inside = (ratio >= steps[0]) & (ratio <= steps[-1])
        ctx.save_for_backward(inside, torch.where(inside, nearest - ratio, nearest), scale)
        return nearest * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        inside, slope, _ = ctx.saved_tensors
        return grad * inside, (grad * slope).sum().reshape(1), None


def fake_quantize_grid(x: Tensor, scale: Tensor, steps: Tensor) -> Tensor:
    """Round x / scale to an integer, then to the nearest value in `steps` [L]; rescale. x and scale [1] get gradients."""
    found: Tensor = _Grid.apply(x, scale, steps)  # type: ignore[no-untyped-call]
    return found


def _like(grad: Tensor, parameter: Tensor) -> Tensor:
    return grad if grad.shape == parameter.shape else grad.sum().reshape(1)


def fake_quantize(x: Tensor, scale: Tensor, zero: Tensor, last: int) -> Tensor:
    """Return decode(encode(x)) for x [..., C]; scale and zero are [C] or [1]. All three get gradients."""
    found: Tensor = _Affine.apply(x, scale, zero, last)  # type: ignore[no-untyped-call]
    return found


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the gradient of x."""
    return x + (value - x).detach()
