"""Choose the scales of a site that minimize the squared error, instead of scales that cover every observed value.

With few bits it pays to clip the largest values: the codes of all others become finer. Each search tries a fixed list of
factors on the observed range. The scored rows come from the quantized network, so errors of earlier sites are included.
See also: channels.py (which scales a role may have), compensate.py and reconstruct.py (the callers).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.quant.channels import GELU_DEPTH, NARROWEST, on_grid
from fqvit.quant.plan import SitePlan
from fqvit.quant.qparams import QParams

FACTORS = np.geomspace(1.0, 0.2, 20)  # factors on the observed range
ROWS = 8192  # at most this many rows are scored: outliers that the result depends on may be rare
ELEMENTS = 2**19  # about this many GELU outputs are scored
Floats = NDArray[np.float64]


def sample_rows(batches: Sequence[Tensor], rows: int = ROWS) -> Tensor:
    """Return at most `rows` rows [R, C], evenly spaced, of batches [..., C]."""
    flat = torch.cat([batch.reshape(-1, batch.shape[-1])[:: _step(batches, rows)] for batch in batches])
    return flat[:rows]


def _step(batches: Sequence[Tensor], rows: int) -> int:
    return max(1, sum(batch.numel() // batch.shape[-1] for batch in batches) // rows)


def least_error(site: SitePlan, rows: Tensor, q: QParams, importance: Tensor, spaced: bool = False) -> QParams:
    """Return parameters of the same kind as q with less squared error on rows [R, C].

    importance: [C], the weight of each channel's error   spaced: GELU outputs get unevenly spaced codes if their error is less
    """
    if site.role == "qkv" and len(q.scale) > 3:
        parts, thirds = rows.chunk(3, -1), [q.group(part) for part in range(3)]
        # If the channels of V share a scale, so does attention times V, and they must keep sharing it.
        shared = (True, True, len(thirds[2].scale) == 1)
        size = parts[0].shape[-1]
        found = []
        for part, each, one in zip(parts, thirds, shared, strict=True):
            chosen = _one_scale(part, each) if one else _symmetric_channels(part, each)
            times = size // len(chosen.scale)
            found.append(QParams(chosen.bits, np.repeat(chosen.scale, times), np.repeat(chosen.zero, times)))
        return QParams(q.bits, np.concatenate([p.scale for p in found]), np.concatenate([p.zero for p in found]))
    if site.role == "value" and len(q.scale) > 1:
        return _symmetric_channels(rows, q)
    if site.role == "context" and len(q.scale) > 1:
        return _common_factor(rows, q, importance)
    if site.role == "gelu":
        even = _gelu(rows, q, importance, site.k) if len(q.scale) > 1 else _one_scale(rows, q)
        other = _spaced_gelu(rows, site.bits, importance) if spaced else None
        found = [even] if other is None else [even, other]
        return min(found, key=lambda each: float(((each.decode(each.encode(rows)) - rows).square() * importance).sum()))
    if len(q.scale) == 1:
        return _one_scale(rows, q)
    return _affine_channels(rows, q)


def _errors(x: Tensor, scale: Tensor, zero: Tensor, last: int) -> Tensor:
    """Return the squared error of each channel: x [R, C], scale and zero [C] or [1] -> [C]"""
    codes = ((x / scale + 0.5).floor_() + zero).clamp_(0, last)
    return ((codes - zero) * scale - x).square_().sum(0)


def _one_scale(x: Tensor, q: QParams) -> QParams:
    """One scale and zero point: shrink the range."""
    low, high = -float(q.zero[0] * q.scale[0]), float((q.last - q.zero[0]) * q.scale[0])
    best, found = np.inf, q
    for factor in FACTORS:
        scale = (high - low) * factor / q.last
        for zero in {int(np.clip(np.rint(-low * factor / scale), 0, q.last))}:
            error = float(_errors(x.reshape(-1, 1), torch.tensor([scale]), torch.tensor([float(zero)]), q.last).sum())
            if error < best:
                best, found = error, QParams(q.bits, np.array([scale]), np.array([zero], np.int64))
    return found


def _search(x: Tensor, tries: list[tuple[Floats, NDArray[np.int64]]], last: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return the scale and zero point [C] of each channel with the least error. tries: [(scale [C], zero [C])]"""
    errors = torch.stack([_errors(x, _float(scale), _float(zero), last) for scale, zero in tries])
    best = errors.argmin(0).numpy()
    channel = np.arange(x.shape[1])
    return np.stack([scale for scale, _ in tries])[best, channel], np.stack([zero for _, zero in tries])[best, channel]


def _float(values: NDArray[np.float64] | NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values).float()


def _affine_channels(x: Tensor, q: QParams) -> QParams:
    """One scale and zero point per channel: shrink each range, then move its ends by single codes."""
    low, high = -q.zero * q.scale, (q.last - q.zero) * q.scale
    tries = []
    for factor in FACTORS:
        scale = (high - low) * factor / q.last
        tries.append((scale, np.clip(np.rint(-low * factor / scale), 0, q.last).astype(np.int64)))
    scale, zero = _search(x, tries, q.last)
    moved = [(scale * f, np.clip(zero + move, 0, q.last)) for move in (-2, -1, 0, 1, 2) for f in (0.9, 0.95, 1.0, 1.05, 1.1)]
    scale, zero = _search(x, moved, q.last)
    return QParams(q.bits, on_grid(np.maximum(scale, scale.max() / 2**15)), zero)


def _symmetric_channels(x: Tensor, q: QParams) -> QParams:
    scales, zeros = q.channel_scales(x.shape[1]), q.channel_zeros(x.shape[1])
    scale, zero = _search(x, [(scales * factor, zeros) for factor in FACTORS], q.last)
    return QParams(q.bits, on_grid(np.maximum(scale, scale.max() * NARROWEST)), zero)


def _common_factor(x: Tensor, q: QParams, importance: Tensor) -> QParams:
    """Multiply all scales by one factor."""

    def error(factor: float) -> float:
        return float((_errors(x, _float(q.scale * factor), _float(q.zero), q.last) * importance).sum())

    return QParams(q.bits, q.scale * min(FACTORS, key=error), q.zero)


def _gelu(x: Tensor, q: QParams, importance: Tensor, k: int) -> QParams:
    """Scales that differ by powers of two: try several largest scales; each channel takes the power with the least error."""
    widest = float(q.scale.max())
    best, found = np.inf, q
    for factor in np.exp2(-np.arange(12) / 6):  # two octaves; further factors are these times a power of two
        scales = widest * factor / np.exp2(np.arange(k + 1))
        zeros = np.minimum(np.rint(GELU_DEPTH / scales), q.last).astype(np.int64)
        errors = torch.stack(
            [_errors(x, torch.tensor([s]), torch.tensor([float(z)]), q.last) for s, z in zip(scales, zeros, strict=True)]
        )
        least = errors.min(0)
        total = float((least.values * importance).sum())
        if total < best:
            power = least.indices.numpy()
            best, found = total, QParams(q.bits, scales[power], zeros[power])
    return found


def _spaced_gelu(x: Tensor, bits: int, importance: Tensor) -> QParams | None:
    """Return 2^bits of the 256 codes of 8 bits, with one scale: dense near 0, where most outputs of GELU are. None: no fit

    Codes above the zero point are zero + (255 - zero) * ((1 - bend) * u + bend * u^3) for u in equal steps up to 1; codes
    below it are evenly spaced.
    """
    step = max(1, x.numel() // ELEMENTS)
    values, weights = x.flatten()[::step].contiguous(), importance.expand_as(x).flatten()[::step]
    usual = sorted({2**bits // 16, 2**bits // 8})
    for counts in (usual, [0]):  # of codes below zero: in a wide range there are too few for the usual ones
        tried = [
            q
            for top in np.geomspace(1.1, 0.4, 10) * float(x.max())
            for bend in (0.0, 0.3, 0.5, 0.7, 0.8, 0.9)
            for negative in counts
            if (q := _curve(bits, float(top), bend, negative)) is not None
        ]
        if tried:
            errors = [float(((q.decode(q.encode(values[:, None]))[:, 0] - values).square() * weights).sum()) for q in tried]
            return tried[int(np.argmin(errors))]
    return None


def _curve(bits: int, top: float, bend: float, negative: int) -> QParams | None:
    """Return codes for values from -GELU_DEPTH to `top`, `negative` of them below zero. None if two of them coincide."""
    scale = (top + GELU_DEPTH) / 255
    zero = int(np.ceil(GELU_DEPTH / scale))
    u = np.arange(1, 2**bits - negative) / (2**bits - negative - 1)
    above = zero + np.rint((255 - zero) * ((1 - bend) * u + bend * u**3))
    below = np.rint(zero * (1 - np.arange(negative, 0, -1) / negative)) if negative else np.zeros(0)
    grid = np.concatenate([below, [zero], above]).astype(int).tolist()
    if len(set(grid)) != 2**bits:
        return None
    return QParams(8, np.array([scale]), np.array([zero], np.int64), grid=tuple(grid))
