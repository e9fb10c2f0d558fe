"""Types and functions that the handlers of ATen ops share: Reader, values inside a normalisation, layouts of views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fqvit.frontend.draft import Kind, Step, View, positions

Operand = View | Tensor | float | int


@dataclass
class Reader:
    """The state while a graph is read. path: the path of the module that the current op belongs to"""

    path: str = ""

    def step(self, kind: Kind, inputs: list[View], shape: tuple[int, ...], **data: Any) -> Step:
        return Step(kind, self.path, inputs, shape, data)


@dataclass(frozen=True)
class Pending:
    """A value that is supported only inside a normalisation: x^2, its mean over an axis, or the Euclidean norm.

    kind: "square", "mean" (of squares), "norm" or "inverse" (1 / sqrt(mean + eps))   axis: the axis over which x is normalised
    """

    kind: str
    view: View
    axis: int = -1
    eps: float = 0.0
    shape: tuple[int, ...] = field(default=())


def drop_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
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
    shape = drop_leading_ones(view.shape) or (1,)
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


def double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()
