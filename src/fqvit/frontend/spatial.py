"""Handlers of convolutions, reductions and max pooling: gather windows, then apply a linear layer, mean or maximum.

The text of a NotImplementedError is the second half of a sentence: read.py puts the name of the op in front of it.
See also: resample.py (average pooling, interpolation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fqvit.frontend.draft import View
from fqvit.frontend.operands import Pending, Reader, double, drop_leading_ones

Pair = int | Sequence[int]


def pair(x: Pair) -> tuple[int, int]:
    if isinstance(x, int):
        return x, x
    return (x[0], x[0]) if len(x) == 1 else (x[0], x[1])


def neighbourhoods(view: View, kernel: Pair, stride: Pair, padding: Pair | str, dilation: Pair = 1) -> View:
    """Gather the window of every output position: [N, C, H, W] -> [N, h, w, kernel, kernel, C]"""
    (kh, kw), (sh, sw), (dh, dw) = pair(kernel), pair(stride), pair(dilation)
    if padding == "same":
        total_h, total_w = dh * (kh - 1), dw * (kw - 1)
        pads = (total_w // 2, total_w - total_w // 2, total_h // 2, total_h - total_h // 2)
    else:
        ph, pw = (0, 0) if isinstance(padding, str) else pair(padding)
        pads = (pw, pw, ph, ph)

    def unfold(x: Tensor, empty: float) -> Tensor:
        x = F.pad(x, pads, value=empty)
        x = x.unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)[..., ::dh, ::dw]
        return x.permute(0, 2, 3, 4, 5, 1)

    return view.moved(lambda x: x, unfold)


def _as_map(view: View, n: int, h: int, w: int) -> View:
    """[n * h * w, C] -> [n, C, h, w]"""
    return view.reshaped(n, h, w, view.shape[-1]).moved(lambda x: x.permute(0, 3, 1, 2))


def conv2d(
    reader: Reader,
    x: View,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> View:
    channels, outputs = x.shape[1], weight.shape[0]
    kernel = (weight.shape[2], weight.shape[3])
    weight = weight.double()
    if groups > 1 and groups == channels:  # depthwise, with one or more outputs per channel
        repeats = outputs // channels
        wide = x if repeats == 1 else x.moved(lambda t: t.repeat_interleave(repeats, 1))
        views = neighbourhoods(wide, kernel, stride, padding, dilation)
        n, h, w = views.shape[:3]
        rows = drop_leading_ones((n, h * w))
        inputs = views.reshaped(*rows, kernel[0] * kernel[1], outputs)
        weights = weight.reshape(outputs, -1).T.contiguous()
        step = reader.step("depthwise", [inputs], (*rows, outputs), weight=weights, bias=double(bias))
        return _as_map(step.view(), n, h, w)
    if groups > 1:  # a dense convolution whose weights are 0 between groups
        part_in, part_out = channels // groups, outputs // groups
        dense = weight.new_zeros(outputs, channels, *kernel)
        for g in range(groups):
            dense[g * part_out : (g + 1) * part_out, g * part_in : (g + 1) * part_in] = weight[
                g * part_out : (g + 1) * part_out
            ]
        weight = dense
    views = neighbourhoods(x, kernel, stride, padding, dilation)
    n, h, w = views.shape[:3]
    rows = drop_leading_ones((n, h * w)) or (1,)
    flat = weight.permute(0, 2, 3, 1).reshape(outputs, -1).contiguous()
    data = {"weight": flat, "bias": double(bias), "window": kernel, "stride": pair(stride)}
    step = reader.step("linear", [views.reshaped(*rows, flat.shape[1])], (*rows, outputs), **data)
    return _as_map(step.view(), n, h, w)


def conv_transpose2d(
    reader: Reader,
    x: View,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    groups: int = 1,
    dilation: Pair = 1,
) -> View:
    channels, outputs, kh, kw = weight.shape
    if pair(stride) != (kh, kw) or pair(padding) != (0, 0) or pair(output_padding) != (0, 0) or groups != 1:
        raise NotImplementedError("with overlapping windows, padding or groups is not supported")
    n, _, h, w = x.shape
    rows = x.moved(lambda t: t.permute(0, 2, 3, 1)).reshaped(n * h * w, channels)
    flat = weight.double().permute(2, 3, 1, 0).reshape(-1, channels).contiguous()
    terms = None if bias is None else bias.double().repeat(kh * kw)
    step = reader.step("linear", [rows], (n * h * w, kh * kw * outputs), weight=flat, bias=terms)
    view = step.view().reshaped(n, h, w, kh, kw, outputs)
    return view.moved(lambda t: t.permute(0, 5, 1, 3, 2, 4)).reshaped(n, outputs, h * kh, w * kw)


def _reduce(reader: Reader, kind: Any, x: View, dims: Sequence[int], keepdim: bool) -> View:
    """Reduce axes to their mean or maximum.

    The last axis of the step is a kept one with contiguous elements, usually the channels.
    """
    axes = [d % len(x.shape) for d in dims]
    kept = [d for d in range(len(x.shape)) if d not in axes]
    wide = [d for d in kept if x.shape[d] > 1]
    if not wide:
        raise NotImplementedError("over all axes is not supported")
    channel = next((d for d in wide if _is_contiguous(x.index, d)), wide[-1])
    others = [d for d in kept if d != channel]
    count = math.prod(x.shape[d] for d in axes)
    moved = x.moved(lambda t: t.permute(*others, *axes, channel))
    front = drop_leading_ones([x.shape[d] for d in others])
    step = reader.step(kind, [moved.reshaped(*front, count, x.shape[channel])], (*front, x.shape[channel]))
    order = [*others, channel]
    result = step.view().reshaped(*(x.shape[d] for d in order))
    back = [order.index(d) for d in kept]
    result = result.moved(lambda t: t.permute(*back))
    return result.reshaped(*(1 if d in axes else x.shape[d] for d in range(len(x.shape)))) if keepdim else result


def _is_contiguous(index: Tensor, axis: int) -> bool:
    first = index.narrow(axis, 0, 2)
    return bool((first.select(axis, 1) - first.select(axis, 0) == 1).all())


def mean(reader: Reader, x: View | Pending, dim: Any = None, keepdim: bool = False, **rest: Any) -> View | Pending:
    value = x.view if isinstance(x, Pending) else x
    dims = list(range(len(value.shape))) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if isinstance(x, Pending):
        if x.kind != "square" or len(dims) != 1 or not keepdim:
            raise NotImplementedError("of squares other than over one axis with keepdim is not supported")
        return Pending("mean", x.view, dims[0] % len(x.view.shape) - len(x.view.shape))
    if all(x.shape[d] == 1 for d in dims):
        return x if keepdim else x.reshaped(*(s for d, s in enumerate(x.shape) if d not in {e % len(x.shape) for e in dims}))
    return _reduce(reader, "mean", x, dims, keepdim)


def sum_(reader: Reader, x: View, dim: Any = None, keepdim: bool = False, **rest: Any) -> View:
    if isinstance(x, Pending):
        raise NotImplementedError("of squares is not supported")
    dims = [dim] if isinstance(dim, int) else list(dim or range(len(x.shape)))
    count = math.prod(x.shape[d] for d in dims)
    result = mean(reader, x, dims, keepdim)
    assert isinstance(result, View)
    return result.scaled(torch.tensor(float(count)))


def amax(reader: Reader, x: View, dim: Any = None, keepdim: bool = False) -> View:
    return _reduce(reader, "max", x, [dim] if isinstance(dim, int) else list(dim), keepdim)


def max_pool2d(
    reader: Reader,
    x: View,
    kernel: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> View:
    if ceil_mode:
        raise NotImplementedError("with ceil_mode is not supported")
    views = neighbourhoods(_without_infinity(x), kernel, stride or kernel, padding, dilation)
    n, h, w, kh, kw, channels = views.shape
    rows = drop_leading_ones((n, h * w)) or (1,)
    step = reader.step("max", [views.reshaped(*rows, kh * kw, channels)], (*rows, channels))
    return _as_map(step.view(), n, h, w)


def _without_infinity(x: View) -> View:
    """Remove the offset -infinity of padded elements: a maximum leaves these elements out anyway."""
    if x.offset is None:
        return x
    offset = torch.where((x.index < 0) & (x.offset == -torch.inf), 0.0, x.offset)
    return replace(x, offset=offset if offset.any() else None)


HANDLERS: dict[str, Callable[..., Any]] = {
    "conv2d": conv2d, "conv_transpose2d": conv_transpose2d, "mean": mean, "sum": sum_, "amax": amax, "max_pool2d": max_pool2d,
}  # fmt: skip
