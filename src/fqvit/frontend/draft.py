"""The draft graph between ATen ops and leaf modules: computations connected by affine gathers.

A *step* is a computation with an output of a fixed layout, channels last. Everything that only moves, scales or shifts values
between two steps is a *view*:

    view[i] = scale[i] * value[index[i]] + offset[i]

`value` is the flattened output of one step, or those of several steps, concatenated; index -1 stands for 0. Reshaping,
permuting, slicing, rolling, padding and concatenating a view are ordinary torch functions applied to its index, scale and
offset, so no kind of data movement needs code of its own. Constants are views without a value: index -1 everywhere.

Shapes are those of one image: N = 1 during capture, and later batches repeat the same computation per image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal[
    "images",
    "linear",
    "depthwise",
    "norm",
    "activation",
    "add",
    "multiply",
    "rotary",
    "scores",
    "softmax",
    "context",
    "mean",
    "max",
    "embed",
    "affine",
]


@dataclass(eq=False)
class Step:
    """One computation. `path` is the module it belongs to, `shape` the layout of its output for one image.

    data: parameters of the kind, such as weight and bias (float64 tensors), or the name and function of an activation
    """

    kind: Kind
    path: str
    inputs: list[View]
    shape: tuple[int, ...]
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def view(self) -> View:
        """Return the output as a view with the step's own layout."""
        return View((self,), positions(self.size).view(self.shape))


class _Positions:
    """Holds 0, 1, 2, ...: one buffer that all indices with regular strides share; see positions()."""

    buffer = torch.arange(0)


def positions(size: int) -> Tensor:
    """Return 0, ..., size - 1 as a part of a shared buffer, which must not be modified.

    A view that was only reshaped, permuted, sliced or broadcast refers to this buffer too. Such an index takes no memory, and
    its strides tell what it contains.
    """
    if size > _Positions.buffer.numel():
        _Positions.buffer = torch.arange(max(size, 2 * _Positions.buffer.numel()))
    return _Positions.buffer[:size]


def forget_positions() -> None:
    """Free the shared buffer."""
    _Positions.buffer = torch.arange(0)


def _is_strided(index: Tensor) -> bool:
    """Return whether an index is a strided view of the shared buffer that starts at 0."""
    storage = _Positions.buffer.untyped_storage()
    return index.untyped_storage().data_ptr() == storage.data_ptr() and int(index.storage_offset()) == 0


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of an elementwise operation of tensors with these shapes."""
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def compact(tensor: Tensor) -> Tensor:
    """Reduce axes along which a tensor is broadcast (stride 0) to length 1."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def uniform(tensor: Tensor) -> float | None:
    """Return the value of all elements if they are equal, otherwise None."""
    values = compact(tensor)
    first = values.flatten()[0]
    return float(first) if bool((values == first).all()) else None


def factor_per_head(scale: Tensor) -> Tensor | None:
    """Return the factors [H] of values [..., H, M, N]; None if they differ within a head."""
    heads = scale.shape[-3]
    values = compact(scale)
    per_head = values.movedim(-3, 0).reshape(values.shape[-3], -1)
    return per_head[:, 0].expand(heads) if bool((per_head == per_head[:, :1]).all()) else None


@dataclass(frozen=True, eq=False)
class View:
    """An affine gather from the outputs of steps: scale * value[index] + offset.

    index: int64, any shape   scale, offset: float64, of the same shape; None stands for 1 and 0
    """

    steps: tuple[Step, ...]
    index: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.index.shape)

    @property
    def step(self) -> Step:
        assert len(self.steps) == 1
        return self.steps[0]

    @property
    def is_plain(self) -> bool:
        """Return whether the view only moves the values of one step."""
        return self.scale is None and self.offset is None and len(self.steps) == 1

    def part(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return which elements of the view belong to a step, as a mask, and the positions of those elements in the step."""
        start = sum(before.size for before in self.steps[: self.steps.index(step)])
        inside = (self.index >= start) & (self.index < start + step.size)
        return inside, self.index[inside] - start

    def without_constants(self, inside: Tensor) -> View:
        """Remove the factors and terms of some elements."""
        scale = None if self.scale is None else torch.where(inside | (self.index < 0), 1.0, self.scale)
        offset = None if self.offset is None else torch.where(inside, 0.0, self.offset)
        scale = None if scale is None or bool((scale == 1).all()) else scale
        return View(self.steps, self.index, scale, None if offset is None or not offset.any() else offset)

    def moved(self, move: Callable[[Tensor], Tensor], padding: Callable[[Tensor, float], Tensor] | None = None) -> View:
        """Apply a function that moves elements. padding(tensor, value): the same function with this value for padding."""

        def each(tensor: Tensor | None, empty: float) -> Tensor | None:
            if tensor is None:
                return None
            return padding(tensor, empty) if padding is not None else move(tensor)

        index = each(self.index, -1)
        assert index is not None
        return View(self.steps, index, each(self.scale, 1.0), each(self.offset, 0.0))

    def reshaped(self, *shape: int) -> View:
        return self.moved(lambda x: x.reshape(shape))

    def transposed(self, a: int, b: int) -> View:
        return self.moved(lambda x: x.transpose(a, b))

    def scaled(self, factor: Tensor) -> View:
        """Multiply by a constant that broadcasts against the view."""
        view = self.broadcast(broadcast_shape(self.shape, factor.shape))
        factor = factor.double().broadcast_to(view.shape)
        scale = factor if view.scale is None else view.scale * factor
        offset = None if view.offset is None else view.offset * factor
        return replace(view, scale=scale, offset=offset)

    def shifted(self, term: Tensor) -> View:
        """Add a constant that broadcasts against the view."""
        view = self.broadcast(broadcast_shape(self.shape, term.shape))
        term = term.double().broadcast_to(view.shape)
        return replace(view, offset=term if view.offset is None else view.offset + term)

    def broadcast(self, shape: Sequence[int]) -> View:
        return self if self.shape == tuple(shape) else self.moved(lambda x: x.broadcast_to(tuple(shape)))

    def scalar_scale(self) -> float | None:
        """Return the scale if it is one number, otherwise None."""
        if self.scale is None:
            return 1.0
        return uniform(self.scale)

    def is_whole(self) -> bool:
        """Return whether the view contains every element of its step exactly once."""
        if len(self.steps) != 1 or self.index.numel() != self.step.size:
            return False
        if _is_strided(self.index):
            axes = sorted((stride, size) for size, stride in zip(self.shape, self.index.stride(), strict=True) if size > 1)
            return all(stride == math.prod(size for _, size in axes[:i]) for i, (stride, _) in enumerate(axes))
        flat = self.index.flatten()
        seen = torch.zeros(self.step.size, dtype=torch.bool)
        seen[flat.clamp(min=0)] = True
        return bool(seen.all()) and bool((flat >= 0).all())

    def is_identity(self) -> bool:
        """Return whether the view is the step's output, up to its shape."""
        if len(self.steps) != 1 or self.index.numel() != self.step.size:
            return False
        if _is_strided(self.index):
            return self.index.is_contiguous()
        return torch.equal(self.index.flatten(), positions(self.step.size))

    def inverse(self) -> Tensor:
        """Return the position in this view of every element of the step: [size]. The view must be whole."""
        if self.is_identity():
            return positions(self.step.size)
        result = torch.empty(self.step.size, dtype=torch.int64)
        result[self.index.flatten()] = positions(self.step.size)
        return result


def constant(values: Tensor) -> View:
    """Return a view that is a constant."""
    return View((), torch.full(values.shape, -1), None, values.double())


def concatenate(views: Sequence[View], axis: int) -> View:
    """Concatenate views along an axis."""
    steps: list[Step] = []
    indices = []
    for view in views:
        for step in view.steps:
            if step not in steps:
                steps.append(step)
    starts = {id(step): sum(before.size for before in steps[:i]) for i, step in enumerate(steps)}
    for view in views:
        indices.append(_renumbered(view, starts))
    scale = offset = None
    if any(view.scale is not None for view in views):
        scale = torch.cat([_or(view.scale, view, 1.0) for view in views], axis)
    if any(view.offset is not None for view in views):
        offset = torch.cat([_or(view.offset, view, 0.0) for view in views], axis)
    return View(tuple(steps), torch.cat(indices, axis), scale, offset)


def _renumbered(view: View, starts: dict[int, int]) -> Tensor:
    """Return the index of a view after each of its steps has moved to position starts[id(step)]."""
    if len(view.steps) <= 1:
        start = starts[id(view.steps[0])] if view.steps else 0
        return torch.where(view.index >= 0, view.index + start, -1)
    result = torch.full(view.shape, -1)
    begin = 0
    for step in view.steps:
        inside = (view.index >= begin) & (view.index < begin + step.size)
        result = torch.where(inside, view.index - begin + starts[id(step)], result)
        begin += step.size
    return result


def _or(tensor: Tensor | None, view: View, value: float) -> Tensor:
    return torch.full(view.shape, value, dtype=torch.float64) if tensor is None else tensor


def pruned(view: View) -> View:
    """Remove steps that no element refers to."""
    if len(view.steps) <= 1:
        return view
    flat, begin = view.index, 0
    kept: list[Step] = []
    starts: dict[int, int] = {}
    for step in view.steps:
        if bool(((flat >= begin) & (flat < begin + step.size)).any()):
            starts[id(step)] = sum(before.size for before in kept)
            kept.append(step)
        else:
            starts[id(step)] = 0
        begin += step.size
    if len(kept) == len(view.steps):
        return view
    return View(tuple(kept), _renumbered(view, starts), view.scale, view.offset)


def same_view(a: View, b: View) -> bool:
    """Return whether two views have the same values in the same order."""

    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return (x is None) == (y is None) and (x is None or y is None or torch.equal(x.flatten(), y.flatten()))

    return a.steps == b.steps and equal(a.index, b.index) and equal(a.scale, b.scale) and equal(a.offset, b.offset)


@dataclass
class Draft:
    """The outputs of a model as views. All steps are reachable from them."""

    outputs: list[View]

    def steps(self) -> list[Step]:
        """Return all steps in an order in which every step follows its inputs."""
        found: list[Step] = []
        seen: set[int] = set()
        stack = [(step, False) for view in reversed(self.outputs) for step in reversed(view.steps)]
        while stack:
            step, done = stack.pop()
            if done:
                found.append(step)
            elif id(step) not in seen:
                seen.add(id(step))
                stack.append((step, True))
                stack.extend((inner, False) for view in reversed(step.inputs) for inner in reversed(view.steps))
        return found

    def readers(self) -> dict[Step, list[tuple[Step | None, int]]]:
        """Return {step: [(reader, number of the input)]}; the reader None is an output of the model."""
        result: dict[Step, list[tuple[Step | None, int]]] = {step: [] for step in self.steps()}
        for step in result:
            for i, view in enumerate(step.inputs):
                for source in view.steps:
                    result[source].append((step, i))
        for i, view in enumerate(self.outputs):
            for source in view.steps:
                result[source].append((None, i))
        return result

    def get(self, reader: Step | None, i: int) -> View:
        return self.outputs[i] if reader is None else reader.inputs[i]

    def set(self, reader: Step | None, i: int, view: View) -> None:
        if reader is None:
            self.outputs[i] = view
        else:
            reader.inputs[i] = view
