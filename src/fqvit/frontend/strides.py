"""Express a gather as reshape, selection of one index and permutation, which needs no table of positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_AXES = 8  # of the op Permute


@dataclass(frozen=True)
class Strided:
    """index = arange(size).reshape(view).select(*select).permute(perm), flattened. select: (axis, index) or None"""

    view: tuple[int, ...]
    perm: tuple[int, ...]
    select: tuple[int, int] | None


def strided(index: Tensor, size: int) -> Strided | None:
    """Return the permutation that gathers `index` from `size` elements, or None if one selection is not enough."""
    axes = _axes(index.flatten())
    if axes is None or int(index.min()) < 0:
        return None
    order = sorted(range(len(axes)), key=lambda i: -axes[i][1])
    base, block = int(index.flatten()[0]), size
    view: list[int] = []
    place: dict[int, int] = {}  # axis of the index -> axis of the view
    select: tuple[int, int] | None = None
    for i in order:
        count, stride = axes[i]
        extent = count * stride
        if extent == 0 or block % extent:
            return None
        if block > extent:
            if select is not None:
                return None
            select = (len(view), base // extent % (block // extent))
            view.append(block // extent)
        place[i] = len(view)
        view.append(count)
        block = stride
    if block > 1:
        if select is not None:
            return None
        select = (len(view), base % block)
        view.append(block)
    if len(view) > MAX_AXES:
        return None
    perm = tuple(place[i] - (select is not None and place[i] > select[0]) for i in range(len(axes)))
    found = Strided(tuple(view), perm, select)
    return found if torch.equal(_gathered(found, size), index.flatten()) else None


def _gathered(found: Strided, size: int) -> Tensor:
    x = torch.arange(size).view(found.view)
    if found.select is not None:
        x = x.select(*found.select)
    return x.permute(found.perm).flatten()


def _axes(flat: Tensor) -> list[tuple[int, int]] | None:
    """Factor a sequence into axes (count, stride), outermost first: flat = base + sum of i_axis * stride_axis."""
    axes: list[tuple[int, int]] = []
    while flat.numel() > 1:
        steps = flat.diff()
        stride = int(steps[0])
        breaks = torch.nonzero(steps != stride)
        count = int(breaks[0]) + 1 if len(breaks) else flat.numel()
        if flat.numel() % count:
            return None
        rows = flat.view(-1, count)
        if not torch.equal(rows, rows[:, :1] + stride * torch.arange(count)):
            return None
        axes.append((count, stride))
        flat = rows[:, 0]
    return axes[::-1]
