"""Rewrites of the draft: each turns one pattern into a form that leaf modules express, or that runs faster.

The order of REWRITES matters. Each rewrite changes the draft in place and keeps the values of all outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.frontend.draft import Draft, Step, View, positions, pruned, same_view
from fqvit.frontend.fold import (
    add_constants,
    fold_into_consumer,
    fold_into_producer,
    fold_into_scores,
    scale_channels,
    scale_terms_of_sums,
)


def prune(draft: Draft) -> None:
    """Remove from each view the steps that none of its elements refers to."""
    for step in draft.steps():
        step.inputs = [pruned(view) for view in step.inputs]
    draft.outputs = [pruned(view) for view in draft.outputs]


def sort_columns(draft: Draft) -> None:
    """Sort the columns of a linear layer if its input then consists of runs of neighbouring elements (see `runs`)."""
    for step in draft.steps():
        if step.kind != "linear" or len(step.inputs[0].steps) != 1:
            continue
        view = step.inputs[0]
        if runs(view) > 1 or view.shape[-1] == 1:
            continue
        rows = view.index.reshape(-1, view.shape[-1])
        order = rows[(rows >= 0).sum(1).argmax()].argsort(stable=True)
        candidate = view.moved(lambda x, order=order: x[..., order])  # type: ignore[misc]
        if runs(candidate) > 1:
            step.inputs = [candidate]
            step.data["weight"] = step.data["weight"][:, order].contiguous()
            step.data.pop("window", None)


def runs(view: View) -> int:
    """Return the largest length such that a view consists of aligned runs of neighbouring elements of one step.

    The length divides the view's last axis, and it divides the step's channels or is a multiple of them.
    """
    last, channels = view.shape[-1], view.step.shape[-1]
    size = view.step.size
    for width in _divisors(last):
        if size % width or (channels % width and width % channels):
            continue
        rows = view.index.reshape(-1, width)
        first = rows[:, :1]
        steps = torch.arange(width)
        whole = (rows == first + steps) & (first % width == 0)
        if bool((whole | ((first < 0) & (rows < 0))).all()):
            return width
    return 1


def _divisors(n: int) -> list[int]:
    return [d for d in range(n, 0, -1) if n % d == 0]


def leave_windows_before_linear(draft: Draft) -> None:
    """Move a gather of rows from the output of a linear layer to its input, where it moves bytes instead of accumulators."""
    for step, readers in draft.readers().items():
        if step.kind != "linear" or len(readers) != 1 or readers[0][0] is None or reads_images(step):
            continue
        reader, i = readers[0]
        assert reader is not None
        view = draft.get(reader, i)
        if reader.kind not in ("add", "embed") or not view.is_plain or view.is_identity():
            continue
        outputs = step.shape[-1]
        if view.shape[-1] != outputs or runs(view) % outputs or bool((view.index < 0).any()):
            continue
        rows = view.index.reshape(-1, outputs)[:, 0] // outputs
        inner = step.inputs[0]
        gathered = inner.moved(lambda x, rows=rows: x.reshape(-1, x.shape[-1])[rows])  # type: ignore[misc]
        step.inputs = [gathered.reshaped(*view.shape[:-1], inner.shape[-1])]
        step.shape = view.shape
        draft.set(reader, i, step.view())


def reads_images(step: Step) -> bool:
    return any(source.kind == "images" for view in step.inputs for source in view.steps)


def merge_qkv(draft: Draft) -> None:
    """Merge the linear layers of Q, K and V, if they read the same value, into one."""
    readers = draft.readers()
    for context in [step for step in readers if step.kind == "context"]:
        found = attention_operands(context)
        if found is None:
            continue
        parts = [view.step for view in found if view.is_plain and view.is_whole() and view.step.kind == "linear"]
        if len(parts) != 3 or len({id(part) for part in parts}) != 3 or any(len(readers[part]) != 1 for part in parts):
            continue
        q, k, v = parts
        if not (q.shape == k.shape == v.shape and same_view(q.inputs[0], k.inputs[0]) and same_view(q.inputs[0], v.inputs[0])):
            continue
        width = q.shape[-1]
        weight = torch.cat([part.data["weight"] for part in parts])
        biases = [torch.zeros(width, dtype=torch.float64) if p.data["bias"] is None else p.data["bias"] for p in parts]
        path = _common(q.path, k.path)
        merged = Step("linear", f"{path}.qkv" if path else "qkv", q.inputs, (*q.shape[:-1], 3 * width))
        merged.data = {"weight": weight, "bias": torch.cat(biases)}
        softmax = context.inputs[0].step
        scores = softmax.inputs[0].step
        for number, (owner, i) in enumerate(((scores, 0), (scores, 1), (context, 1))):
            index = owner.inputs[i].index
            owner.inputs[i] = View((merged,), index // width * (3 * width) + number * width + index % width)


def _common(a: str, b: str) -> str:
    """Return the path of the innermost module that contains both."""
    parts = []
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        parts.append(x)
    return ".".join(parts)


def attention_operands(context: Step) -> tuple[View, View, View] | None:
    """Return Q, K and V of an attention whose softmax reads scores directly; None if there is something in between."""
    attention, v = context.inputs
    if len(attention.steps) != 1 or attention.step.kind != "softmax" or not attention.is_identity():
        return None
    scores = attention.step.inputs[0]
    if len(scores.steps) != 1 or scores.step.kind != "scores":
        return None
    return (*scores.step.inputs, v)  # type: ignore[return-value]


def splits_heads(view: View, part: int) -> bool:
    """Return whether a view is part 0, 1 or 2 of a linear layer's output [..., T, 3 * H * D], as [..., H, T, D]."""
    if not view.is_plain or len(view.shape) < 3:
        return False
    *front, heads, tokens, width = view.shape
    if view.step.size != 3 * view.index.numel() or view.step.shape != (*front, tokens, 3 * heads * width):
        return False
    full = positions(view.step.size).view(*front, tokens, 3, heads, width)
    return torch.equal(view.index, full.select(-3, part).transpose(-2, -3))


def split_linear(draft: Draft) -> None:
    """Split a linear layer whose readers use different channels: gated MLPs, Q, K and V with norms or rotary positions."""
    for step, readers in draft.readers().items():
        if step.kind != "linear" or len(readers) < 2:
            continue
        views = [draft.get(reader, i) for reader, i in readers]
        if any(len(view.steps) != 1 for view in views) or is_attention_input(draft, step, readers):
            continue
        outputs = step.shape[-1]
        used = [torch.unique(view.index[view.index >= 0] % outputs) for view in views]
        if all(len(channels) == outputs for channels in used):
            continue
        parts: list[tuple[Tensor, Step]] = []
        for (reader, i), view, channels in zip(readers, views, used, strict=True):
            part = next((known for own, known in parts if torch.equal(own, channels)), None)
            if part is None:
                bias = step.data["bias"]
                name = f"{step.path}@{len(parts)}" if parts else step.path
                part = Step("linear", name, step.inputs, (*step.shape[:-1], len(channels)))
                part.data = {"weight": step.data["weight"][channels], "bias": None if bias is None else bias[channels]}
                parts.append((channels, part))
            number = torch.full((outputs,), -1)
            number[channels] = torch.arange(len(channels))
            index = view.index // outputs * len(channels) + number[view.index % outputs]
            draft.set(reader, i, replace(view, steps=(part,), index=torch.where(view.index >= 0, index, -1)))


def is_attention_input(draft: Draft, step: Step, readers: list[tuple[Step | None, int]]) -> bool:
    """Return whether the readers are Q, K and V of one attention, in the layout that the engine fuses."""
    contexts = [reader for reader, _ in readers if reader is not None and reader.kind == "context"]
    if len(readers) != 3 or len(contexts) != 1:
        return False
    found = attention_operands(contexts[0])
    return found is not None and all(view.steps == (step,) and splits_heads(view, i) for i, view in enumerate(found))


def rotate_before_heads(draft: Draft) -> None:
    """Put the channels of all heads side by side where rotary positions differ between heads: [H, T, D] -> [T, H * D]"""
    for step, readers in draft.readers().items():
        if step.kind != "rotary" or len(step.shape) != 3 or not any(_differs(view) for view in step.inputs):
            continue
        heads, tokens, width = step.shape
        step.shape = (tokens, heads * width)
        step.inputs = [view.transposed(0, 1).reshaped(*step.shape) for view in step.inputs]
        new = positions(step.size).view(tokens, heads, width).transpose(0, 1).flatten()
        for reader, i in readers:
            view = draft.get(reader, i)
            if view.steps != (step,):
                raise FqvitError(f"{step.path or 'model'}: rotary positions that differ between heads are not supported here.")
            draft.set(reader, i, replace(view, index=torch.where(view.index >= 0, new[view.index], -1)))


def _differs(view: View) -> bool:
    return view.scale is not None and not bool((view.scale == view.scale[:1]).all())


REWRITES: tuple[Callable[[Draft], None], ...] = (
    prune,
    scale_terms_of_sums,
    fold_into_producer,
    fold_into_consumer,
    fold_into_scores,
    merge_qkv,
    split_linear,
    sort_columns,
    scale_channels,
    add_constants,
    leave_windows_before_linear,
    rotate_before_heads,
)
