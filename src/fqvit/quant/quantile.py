"""Compute a quantile near an end of a tensor's range, without sorting all elements."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def tail(flat: Tensor, quantile: float, largest: bool) -> float:
    """Return the upper (or lower) quantile of [n] elements, interpolated linearly.

    Exact without a full sort: of elements arranged in columns, the k largest lie in the k columns with the largest maxima.
    Returns NaN if an element is NaN, or infinite on the side of the quantile.
    """
    size = flat.numel()
    rank = (size - 1) * (1 - quantile)
    whole = int(rank)
    k = min(whole + 2, size)
    rows = 64
    columns = size // rows
    candidates = flat
    if 4 * k < columns:
        table = flat[: rows * columns].view(rows, columns)
        extremes = table.amax(0) if largest else table.amin(0)
        if not bool(extremes.isfinite().all()):
            return math.nan
        best = extremes.topk(k, largest=largest, sorted=False).indices
        candidates = torch.cat([table[:, best].reshape(-1), flat[rows * columns :]])
    if not bool(candidates.isfinite().all()):
        return math.nan
    top = candidates.topk(k, largest=largest).values.tolist()
    near, far = float(top[whole]), float(top[min(whole + 1, size - 1)])
    return near + (far - near) * (rank - whole)
