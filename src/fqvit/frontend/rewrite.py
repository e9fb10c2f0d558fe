"""Rewrites of the draft: each turns one pattern into a form that leaf modules express, or that runs faster.

The order of REWRITES matters. Each rewrite changes steps and views in place and keeps the values of all outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.frontend.draft import Step, View, factor_per_head, pruned


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


def prune(draft: Draft) -> None:
    """Remove steps from views that no element of the view refers to."""
    for step in draft.steps():
        step.inputs = [pruned(view) for view in step.inputs]
    draft.outputs = [pruned(view) for view in draft.outputs]


def fold_into_producer(draft: Draft) -> None:
    """Fold a factor and a term per channel into the linear layer, convolution or norm before: LayerScale, batch norm.

    Every reader must see the same factors, except that readers of other channels do not count.
    """
    for step, readers in draft.readers().items():
        if step.kind not in ("linear", "depthwise", "norm"):
            continue
        views = [draft.get(reader, i) for reader, i in readers]
        if any(len(view.steps) > 1 for view in views):
            continue
        channels = step.shape[-1]
        scale, term = torch.ones(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.float64)
        known = torch.zeros(channels, dtype=torch.bool)
        if all(view.scale is None and view.offset is None for view in views) or not all(
            _per_channel(view, channels, scale, term, known) for view in views
        ):
            continue
        axis = (-1, 1) if step.kind == "linear" else (-1,)
        step.data["weight"] = step.data["weight"] * scale.view(axis)
        bias = step.data["bias"]
        step.data["bias"] = term if bias is None else bias * scale + term
        for (reader, i), view in zip(readers, views, strict=True):
            outside = view.index < 0  # a constant in a view has no producer: it keeps its term
            offset = None if view.offset is None else torch.where(outside, view.offset, 0.0)
            draft.set(reader, i, replace(view, scale=None, offset=None if offset is None or not offset.any() else offset))


def _per_channel(view: View, channels: int, scale: Tensor, term: Tensor, known: Tensor) -> bool:
    """Collect the factor and the term of each channel; return False if they differ within a channel."""
    inside = view.index >= 0
    channel = (view.index % channels)[inside]
    own = []
    for values, empty in ((view.scale, 1.0), (view.offset, 0.0)):
        own.append(torch.full(channel.shape, empty, dtype=torch.float64) if values is None else values[inside])
    candidate = [scale.clone(), term.clone()]
    for target, values in zip(candidate, own, strict=True):
        fresh = target.clone()
        fresh[channel] = values
        if not torch.equal(fresh[channel], values) or not torch.equal(fresh[known], target[known]):
            return False
        target.copy_(fresh)
    scale.copy_(candidate[0])
    term.copy_(candidate[1])
    known[channel] = True
    return True


def fold_into_consumer(draft: Draft) -> None:
    """Fold a factor and a term per input channel into the linear layer after: batch norm before a layer, normalised pixels."""
    for step in draft.steps():
        if step.kind not in ("linear", "depthwise"):
            continue
        (view,) = step.inputs
        if view.scale is None and view.offset is None:
            continue
        weight, bias = step.data["weight"], step.data["bias"]
        columns = view.shape[-1] if step.kind == "linear" else view.shape[-2] * view.shape[-1]
        scale, offset = view.scale, view.offset
        inside = (view.index >= 0).reshape(-1, columns)
        if offset is not None:
            rows = offset.reshape(-1, columns)
            if not bool((rows == rows[:1]).all()):
                continue
            first = rows[0]
            added = weight @ first if step.kind == "linear" else (weight * first.view(weight.shape)).sum(0)
            bias = added if bias is None else bias + added
        if scale is not None:
            rows = scale.reshape(-1, columns)
            best = rows[inside.sum(1).argmax()]
            if not bool(((rows == best) | ~inside).all()):
                continue
            weight = weight * best if step.kind == "linear" else weight * best.view(weight.shape)
        step.data["weight"], step.data["bias"] = weight, bias
        step.inputs = [View(view.steps, view.index)]


def sort_columns(draft: Draft) -> None:
    """Reorder the columns of a linear layer so that its input consists of whole rows of channels, if any order does."""
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
    """Return the largest number of neighbouring elements that a view of one step always moves together, by alignment.

    It divides both the step's channels (or is a multiple of them) and the view's last axis.
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
        if step.kind != "linear" or len(readers) != 1 or readers[0][0] is None:
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


def same_view(a: View, b: View) -> bool:
    """Whether two views have the same values in the same order."""

    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return (x is None) == (y is None) and (x is None or y is None or torch.equal(x.flatten(), y.flatten()))

    return a.steps == b.steps and equal(a.index, b.index) and equal(a.scale, b.scale) and equal(a.offset, b.offset)


def splits_heads(view: View, part: int) -> bool:
    """Whether a view is part 0, 1 or 2 of a linear layer's output [..., T, 3 H D], as [..., H, T, D]."""
    if not view.is_plain or len(view.shape) < 3:
        return False
    *front, heads, tokens, width = view.shape
    if view.step.size != 3 * view.index.numel() or view.step.shape != (*front, tokens, 3 * heads * width):
        return False
    full = torch.arange(view.step.size).view(*front, tokens, 3, heads, width)
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
    """Whether the readers are Q, K and V of one attention, in the layout that the engine fuses."""
    contexts = [reader for reader, _ in readers if reader is not None and reader.kind == "context"]
    if len(readers) != 3 or len(contexts) != 1:
        return False
    found = attention_operands(contexts[0])
    return found is not None and all(view.steps == (step,) and splits_heads(view, i) for i, view in enumerate(found))


def add_constants(draft: Draft) -> None:
    """Turn terms that remain, such as position embeddings and class tokens, into steps of their own; each only once."""
    made: list[tuple[View, Step]] = []
    for reader in [*draft.steps(), None]:
        for i, view in enumerate(draft.outputs if reader is None else reader.inputs):
            if view.offset is None:
                continue
            if not view.steps:
                raise FqvitError("model: an output or operand does not depend on the image, which is not supported.")
            if view.scale is not None:
                continue
            known = next((step for other, step in made if same_view(other, view)), None)
            if known is None:
                inner = replace(view, offset=None)
                path = f"{reader.path}.input" if reader is not None else "output"
                known = Step("embed", path, [inner], view.shape, {"offset": view.offset})
                made.append((view, known))
            draft.set(reader, i, known.view().reshaped(*view.shape))


def fold_into_scores(draft: Draft) -> None:
    """Make factors and terms between scores and softmax part of them: scale per head, relative position bias, mask."""
    readers = draft.readers()
    for softmax in [step for step in readers if step.kind == "softmax"]:
        (view,) = softmax.inputs
        scores = view.step if len(view.steps) == 1 else None
        if scores is None or scores.kind != "scores" or len(readers[scores]) != 1 or not view.is_identity():
            continue
        heads = scores.shape[-3]
        if view.scale is not None:
            per_head = factor_per_head(view.scale)
            if per_head is None:
                raise FqvitError(f"{softmax.path}: scores with factors that differ within a head are not supported.")
            scores.data["scale"] = scores.data["scale"] * per_head
        if view.offset is not None:
            bias, mask = _bias_and_mask(view.offset, softmax.path)
            if bool(bias.any()):
                scores.data["bias"] = bias
            if not bool(mask.all()):
                softmax.data["mask"] = mask
        softmax.inputs = [View(view.steps, view.index)]


MASKED = -80.0  # a term at most this low removes a pair of tokens: exp(-80) is far below float32's precision


def _bias_and_mask(offset: Tensor, path: str) -> tuple[Tensor, Tensor]:
    """Split a term of the scores [W, H, M, N] or [H, M, N] into a bias [H, M, N] and a mask [W, M, N], False if masked."""
    terms = offset if offset.ndim == 4 else offset[None]
    allowed = terms > MASKED
    if not bool((allowed == allowed[:, :1]).all()):
        raise FqvitError(f"{path}: a mask that differs between heads is not supported.")
    best = torch.where(allowed, terms, -torch.inf).amax(0)
    bias = torch.where(best.isfinite(), best, 0.0)
    if not bool(((terms - bias).abs()[allowed] <= 1e-4 * bias.abs().max() + 1e-9).all()):
        raise FqvitError(f"{path}: a bias that differs between windows is not supported.")
    return bias, allowed[:, 0]


def scale_channels(draft: Draft) -> None:
    """Turn factors that remain into a step with one factor and one term per channel."""
    made: list[tuple[View, Step]] = []
    for reader in [*draft.steps(), None]:
        for i, view in enumerate(draft.outputs if reader is None else reader.inputs):
            if view.scale is None or (reader is not None and reader.kind == "rotary"):
                continue
            channels = view.step.shape[-1]
            scale, term = torch.ones(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.float64)
            without_term = replace(view, offset=None)
            if not _per_channel(without_term, channels, scale, term, torch.zeros(channels, dtype=torch.bool)):
                where = reader.path if reader is not None else "output"
                raise FqvitError(f"{where}: multiplies by a constant that differs between positions, which is not supported.")
            source = view.step
            known = next((s for v, s in made if v.step is source and torch.equal(s.data["weight"][0], scale)), None)
            if known is None:
                known = Step("affine", f"{source.path}.scaled", [source.view()], source.shape, {"weight": scale[None], "bias": term})
                made.append((view, known))
            draft.set(reader, i, View((known,), view.index, None, view.offset))


REWRITES: tuple[Callable[[Draft], None], ...] = (
    prune,
    fold_into_producer,
    fold_into_consumer,
    fold_into_scores,
    merge_qkv,
    split_linear,
    sort_columns,
    scale_channels,
    add_constants,
    leave_windows_before_linear,
)
