"""Rewrites that fold constant factors and terms into the steps before or after them, or turn them into separate steps.

Each rewrite changes the draft in place and keeps the values of all outputs. See also: rewrite.py (their order).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.frontend.draft import Draft, Step, View, factor_per_head, same_view

FOLDING = ("linear", "depthwise", "norm")  # steps with a factor and a term per output channel


def scale_terms_of_sums(draft: Draft) -> None:
    """Apply a factor of a sum to its terms if it can be folded into the layers that compute them, as in a mean of two heads."""
    readers = draft.readers()

    def folds(view: View) -> bool:
        if len(view.steps) != 1 or len(readers[view.step]) != 1:
            return False
        return view.step.kind in FOLDING or (view.step.kind == "add" and all(folds(term) for term in view.step.inputs))

    for step in reversed(readers):
        if step.kind != "add" or not all(folds(view) for view in step.inputs):
            continue
        views = [draft.get(reader, i) for reader, i in readers[step]]
        factors = {view.scalar_scale() if len(view.steps) == 1 else None for view in views}
        factor = next(iter(factors))
        if len(factors) != 1 or factor is None or factor == 1.0:
            continue
        step.inputs = [view.scaled(torch.tensor(factor)) for view in step.inputs]
        for (reader, i), view in zip(readers[step], views, strict=True):
            draft.set(reader, i, replace(view, scale=None))


def fold_into_producer(draft: Draft) -> None:
    """Fold per-channel factors and terms (LayerScale, batch norm) into the linear layer, convolution or norm before them.

    All readers of a channel must apply the same factor and the same term to it.
    """
    for step, readers in draft.readers().items():
        if step.kind not in FOLDING:
            continue
        views = [draft.get(reader, i) for reader, i in readers]
        channels = step.shape[-1]
        scale, term = torch.ones(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.float64)
        known = torch.zeros(channels, dtype=torch.bool)
        if all(view.scale is None and view.offset is None for view in views) or not all(
            _per_channel(view, step, scale, term, known) for view in views
        ):
            continue
        axis = (-1, 1) if step.kind == "linear" else (-1,)
        step.data["weight"] = step.data["weight"] * scale.view(axis)
        bias = step.data["bias"]
        step.data["bias"] = term if bias is None else bias * scale + term
        for (reader, i), view in zip(readers, views, strict=True):
            draft.set(reader, i, view.without_constants(view.part(step)[0]))


def _per_channel(view: View, step: Step, scale: Tensor, term: Tensor, known: Tensor) -> bool:
    """Collect the factor and the term of each channel of a step; return False if they differ within a channel."""
    inside, index = view.part(step)
    channel = index % step.shape[-1]
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
    """Fold factors and terms per input channel into the linear layer or depthwise convolution after them.

    Examples: batch norm before a layer, normalised pixels.
    """
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


def fold_into_scores(draft: Draft) -> None:
    """Fold factors and terms between scores and softmax into these two: scale per head, relative position bias, mask."""
    readers = draft.readers()
    for softmax in [step for step in readers if step.kind == "softmax"]:
        (view,) = softmax.inputs
        scores = view.step if len(view.steps) == 1 else None
        if scores is None or scores.kind != "scores" or len(readers[scores]) != 1 or not view.is_identity():
            continue
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


MASKED = -80.0  # a term of this value or lower masks a pair of tokens: exp(-80) is far below float32's precision


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
    """Turn the remaining factors, and terms next to them, into steps with one factor and one term per channel."""
    made: list[tuple[Step, Step]] = []
    for reader in [*draft.steps(), None]:
        for i, view in enumerate(draft.outputs if reader is None else reader.inputs):
            if view.scale is None or (reader is not None and reader.kind == "rotary"):
                continue
            for source in view.steps:
                view = _scaled_source(view, source, made)
            if view.scale is not None:
                view = _scaled_axis(view, reader.path if reader is not None else "output")
            draft.set(reader, i, view)


def _scaled_source(view: View, source: Step, made: list[tuple[Step, Step]]) -> View:
    """Read a scaled copy of a step instead of the step, if the view has one factor per channel of the step."""
    inside, _ = view.part(source)
    if view.scale is None or bool((view.scale[inside] == 1).all()):
        return view
    for candidate in (view, replace(view, offset=None)):
        scale, term, known = _empty(source.shape[-1])
        if _per_channel(candidate, source, scale, term, known):
            break
    else:
        return view
    data = {"weight": scale[None], "bias": term}
    step = next((s for of, s in made if of is source and all(torch.equal(s.data[key], data[key]) for key in data)), None)
    if step is None:
        step = Step("affine", f"{source.path}.scaled", [source.view()], source.shape, data)
        made.append((source, step))
    kept = candidate.without_constants(inside)
    steps = tuple(step if s is source else s for s in view.steps)
    return View(steps, view.index, kept.scale, kept.offset if candidate is view else view.offset)


def _empty(channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a factor of 1 and a term of 0 per channel, and a mask that marks no channel as known."""
    ones = torch.ones(channels, dtype=torch.float64)
    return ones, torch.zeros_like(ones), torch.zeros(channels, dtype=torch.bool)


def _scaled_axis(view: View, path: str) -> View:
    """Scale a view along one of its axes, which becomes the last axis of a new step."""
    assert view.scale is not None
    for axis in reversed(range(len(view.shape))):
        rows = view.scale.movedim(axis, -1).reshape(-1, view.shape[axis])
        if bool((rows == rows[:1]).all()):
            moved = View(view.steps, view.index.movedim(axis, -1))
            data = {"weight": rows[:1].clone(), "bias": torch.zeros_like(rows[0])}
            step = Step("affine", f"{path}.scaled", [moved], moved.shape, data)
            return View((step,), step.view().index.movedim(-1, axis), None, view.offset)
    raise FqvitError(f"{path}: multiplies by a constant that differs between positions, which is not supported.")


def add_constants(draft: Draft) -> None:
    """Turn the remaining terms, such as position embeddings and class tokens, into separate steps; equal ones share a step."""
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
