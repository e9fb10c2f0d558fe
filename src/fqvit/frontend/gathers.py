"""Build the leaf that gathers a view, and recognize views of special forms. See also: emit.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fqvit.frontend.draft import View
from fqvit.frontend.rewrite import runs
from fqvit.frontend.strides import strided
from fqvit.models import general, layers
from fqvit.models.layers import Leaf


def movement(view: View) -> Leaf:
    """Return a leaf that gathers a view of one step."""
    channels, shape = view.step.shape[-1], view.shape
    if view.is_identity():
        times = 0 if shape[-1] % channels else shape[-1] // channels
        return general.Route(shape, range(len(shape)), shape, times=times)
    width = runs(view)
    if width % channels == 0 and (len(shape) > 1 or shape[0] > 0) and len(view.step.shape) > 1:
        first = view.index.reshape(-1, channels)[:, 0]
        rows = torch.where(first >= 0, first // channels, -1)
        times = shape[-1] // channels
        if times == 1 and len(shape) > 1:
            return layers.Take(rows.view(shape[:-1]))
        return layers.Take(rows.view(*shape[:-1], times), join=True)
    found = strided(view.index, view.step.size)
    if found is not None:
        return general.Route(found.view, found.perm, shape, found.select)
    first = view.index.reshape(-1, width)[:, 0]
    return general.Gather(torch.where(first >= 0, first // width, -1), width, shape)


def joined_runs(view: View) -> int:
    """Return the number of neighbouring elements that a view of several steps moves together."""
    last = view.shape[-1]
    for width in [d for d in range(last, 0, -1) if last % d == 0]:
        if any(step.shape[-1] % width for step in view.steps):
            continue
        rows = view.index.reshape(-1, width)
        first = rows[:, :1]
        if bool((((rows == first + torch.arange(width)) & (first % width == 0)) | ((first < 0) & (rows < 0))).all()):
            return width
    return 1


def rows_and_channels(view: View) -> tuple[Tensor, Tensor] | None:
    """Return rows [...] and channels [C] if the view [..., C] is step[rows][..., channels], with 0 for row -1; else None.

    A depthwise convolution with several outputs per channel repeats channels.
    """
    inside = view.index[..., 0] >= 0
    if not bool(inside.any()):
        return None
    rows = torch.where(inside, view.index[..., 0] // view.step.shape[-1], -1)
    channels = view.index[inside][0] % view.step.shape[-1]
    wanted = torch.where(inside[..., None], rows[..., None] * view.step.shape[-1] + channels, -1)
    return (rows, channels) if torch.equal(wanted, view.index) else None


def without_repeated_axes(view: View) -> View:
    """Drop leading axes along which the view does not change."""
    for axes in range(1, len(view.shape)):
        tail = view.shape[-axes:]
        rows = view.index.reshape(-1, *tail)
        if bool((rows == rows[:1]).all()):
            return View(view.steps, rows[0])
    return view


def partners(own: Tensor, others: Tensor, used: Tensor) -> Tensor | None:
    """Return channels p [C] with others[r, c] = own[r, p[c]] in all rows r where others[r, c] is used; None if some c has none.

    own, others, used: [R, C]. Rows may be repeated (grouped-query attention).
    """
    partner = torch.arange(own.shape[1])
    for c in range(own.shape[1]):
        rows = used[:, c].nonzero().flatten()
        if not len(rows):
            continue
        found = (own[rows[0]] == others[rows[0], c]).nonzero().flatten()
        if not len(found) or not torch.equal(own[rows, found[0]], others[rows, c]):
            return None
        partner[c] = found[0]
    return partner


def skipped_rows(view: View) -> int | None:
    """Return s if the view is the rows s, s + 1, ... of its step [T, C]; otherwise None."""
    if not view.is_plain or len(view.shape) != 2 or len(view.step.shape) != 2 or view.shape[1] != view.step.shape[1]:
        return None
    skip = view.step.shape[0] - view.shape[0]
    rows = torch.arange(view.step.size).view(view.step.shape)[max(skip, 0) :]
    return skip if skip >= 0 and torch.equal(rows, view.index) else None


def constant_rows(view: View) -> int | None:
    """Return P if the view is P rows of constants followed by all rows of its step [T, C]; otherwise None."""
    if not view.is_plain or len(view.shape) != 2 or len(view.step.shape) != 2 or view.shape[1] != view.step.shape[1]:
        return None
    prefix = view.shape[0] - view.step.shape[0]
    if prefix < 0:
        return None
    fits = bool((view.index[:prefix] < 0).all()) and torch.equal(view.index[prefix:].flatten(), torch.arange(view.step.size))
    return prefix if fits else None
