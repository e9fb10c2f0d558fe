"""Handlers of average pooling and interpolation: every output is a weighted sum of input positions, with constant weights.

Each axis has a matrix of weights, which torch computes from unit vectors: y = A_h @ x @ A_w^T per channel. Positions with
the same weights share the taps of one depthwise step: each distinct list of weights has its own taps, and a position leaves the
taps of the other lists empty. An average over the valid neighbours of a 3x3 window, for example, has 9 taps of 1/9, 6 of 1/6
and 4 of 1/4. If all lists together have more than MAX_TAPS taps, two linear layers replace the
depthwise step, one over the positions of each axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fqvit.frontend.draft import View
from fqvit.frontend.elementwise import linear
from fqvit.frontend.operands import Reader, drop_leading_ones
from fqvit.frontend.spatial import Pair, mean, pair

MAX_TAPS = 64
Taps = list[tuple[float, int]]  # weight and input position


def resample(reader: Reader, x: View, rows: Tensor, columns: Tensor) -> View:
    """[N, C, H, W] -> [N, C, h, w] with the weights rows [h, H] and columns [w, W]"""
    if x.shape[0] != 1:
        raise NotImplementedError("of several images is not supported")
    taps = _joint(_taps(rows), _taps(columns), x.shape[3])
    patterns = _patterns(taps)
    count = sum(map(len, patterns))
    if count > MAX_TAPS:
        return linear(reader, linear(reader, x, columns).transposed(2, 3), rows).transposed(2, 3)
    starts = {weights: sum(map(len, patterns[:i])) for i, weights in enumerate(patterns)}
    index = torch.full((len(taps), count), -1)
    for position, own in enumerate(taps):
        start = starts[_weights(own)]
        index[position, start : start + len(own)] = torch.tensor([source for _, source in own])
    channels, height, width = x.shape[1], len(rows), len(columns)

    def gather(t: Tensor, empty: float) -> Tensor:
        flat = F.pad(t.reshape(channels, -1), (0, 1), value=empty)  # index -1 is the last column
        return flat[:, index].permute(1, 2, 0)

    shape = (*drop_leading_ones((height * width,)), channels)
    views = x.moved(lambda t: t, gather).reshaped(*shape[:-1], count, channels)
    weight = torch.tensor([w for weights in patterns for w in weights], dtype=torch.float64)
    step = reader.step("depthwise", [views], shape, weight=weight[:, None].repeat(1, channels), bias=None)
    return step.view().reshaped(1, height, width, channels).moved(lambda t: t.permute(0, 3, 1, 2))


def _taps(matrix: Tensor) -> list[Taps]:
    """Return the weights and positions of each row.

    A single weight is split in the proportions of the first row with several weights, so that both rows can share taps.
    """
    taps = [[(float(row[i]), int(i)) for i in torch.nonzero(row.abs() > 1e-9).flatten()] for row in matrix]
    shared = next((own for own in taps if len(own) > 1), None)
    if shared is None:
        return taps
    total = sum(weight for weight, _ in shared)
    return [[(own[0][0] * weight / total, own[0][1]) for weight, _ in shared] if len(own) == 1 else own for own in taps]


def _joint(rows: list[Taps], columns: list[Taps], width: int) -> list[Taps]:
    """Return the taps of each position of the output in row-major order, the largest weight first."""
    result = []
    for row in rows:
        for column in columns:
            own = [(a * b, i * width + j) for a, i in row for b, j in column]
            result.append(sorted(own, key=lambda tap: -round(tap[0], 9)))
    return result


def _weights(taps: Taps) -> tuple[float, ...]:
    return tuple(round(weight, 9) for weight, _ in taps)


def _patterns(taps: list[Taps]) -> list[tuple[float, ...]]:
    return list(dict.fromkeys(_weights(own) for own in taps))


def _matrix(size: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the matrix [M, size] of a linear function of vectors. function: [1, size, size, 1] -> [1, size, M, 1]"""
    units = torch.eye(size, dtype=torch.float64).view(1, size, size, 1)
    return function(units)[0, :, :, 0].T.contiguous()


def avg_pool2d(
    reader: Reader,
    x: View,
    kernel: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> View:
    if divisor_override is not None:
        raise NotImplementedError("with divisor_override is not supported")
    matrices = []
    for size, k, s, p in zip(x.shape[2:], pair(kernel), pair(stride or kernel), pair(padding), strict=True):
        args = ((k, 1), (s, 1), (p, 0), ceil_mode, count_include_pad)
        matrices.append(_matrix(size, lambda t, args=args: F.avg_pool2d(t, *args)))  # type: ignore[misc]
    return resample(reader, x, *matrices)


def adaptive_avg_pool2d(reader: Reader, x: View, size: Pair) -> View:
    h, w = pair(size)
    if (h, w) == (1, 1):
        result = mean(reader, x, [2, 3], True)
        assert isinstance(result, View)
        return result
    rows = _matrix(x.shape[2], lambda t: F.adaptive_avg_pool2d(t, (h, 1)))
    columns = _matrix(x.shape[3], lambda t: F.adaptive_avg_pool2d(t, (w, 1)))
    return resample(reader, x, rows, columns)


def adaptive_avg_pool1d(reader: Reader, x: View, size: Sequence[int]) -> View:
    result = adaptive_avg_pool2d(reader, x.reshaped(*x.shape, 1), (size[0], 1))
    return result.reshaped(*x.shape[:2], size[0])


def upsample_nearest2d(reader: Reader, x: View, size: Any, *factors: Any) -> View:
    scale = None if size is not None else next(f for f in factors if f is not None)
    return x.moved(lambda t: F.interpolate(t.double(), size=size, scale_factor=scale, mode="nearest").to(t.dtype))


def _interpolation(operator: Any) -> Callable[..., View]:
    """Return the handler of an interpolation op. factors: the scale factors of both axes, as one list or as two numbers"""

    def handler(reader: Reader, x: View, size: Sequence[int] | None, align_corners: bool, *factors: Any) -> View:
        if len(factors) == 1 and not isinstance(factors[0], float):
            factors = (None, None) if factors[0] is None else tuple(factors[0])
        factors = (*factors, None, None)[:2]
        matrices = []
        for i, (n, factor) in enumerate(zip(x.shape[2:], factors, strict=True)):
            m = size[i] if size is not None else math.floor(n * factor)
            matrices.append(_matrix(n, lambda t, m=m, f=factor: operator(t, [m, 1], align_corners, f, None)))  # type: ignore[misc]
        return resample(reader, x, *matrices)

    return handler


HANDLERS: dict[str, Callable[..., Any]] = {
    "adaptive_avg_pool1d": adaptive_avg_pool1d, "adaptive_avg_pool2d": adaptive_avg_pool2d, "avg_pool2d": avg_pool2d,
    "upsample_nearest2d": upsample_nearest2d,
    "upsample_bilinear2d": _interpolation(torch.ops.aten.upsample_bilinear2d.default),
    "upsample_bicubic2d": _interpolation(torch.ops.aten.upsample_bicubic2d.default),
}  # fmt: skip
