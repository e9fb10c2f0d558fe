"""Choose the role of each step from its readers. Roles decide how recipes quantize a site (quant/plan.py)."""

from __future__ import annotations

import torch

from fqvit.frontend.draft import Step
from fqvit.frontend.rewrite import splits_heads
from fqvit.models.layers import Role

Readers = list[tuple[Step | None, int]]
# Steps that read 8-bit codes of their inputs.
PRODUCTS = ("linear", "depthwise", "affine", "multiply", "scores", "context", "rotary")
SUMS = ("add", "embed")


def role_of(step: Step, readers: Readers) -> Role:
    """Return the role of a step. readers: the steps that read it, None for an output of the model"""
    kinds: set[str] = {reader.kind for reader, _ in readers if reader is not None}
    if step.kind == "softmax":
        return "attention" if kinds == {"context"} else "probability"
    if step.kind == "context":
        return "context"
    if kinds == {"softmax"}:
        return "scores"
    if step.kind == "scores":
        return "inner"
    if step.kind == "rotary" or kinds == {"scores"}:
        keys = {i for reader, i in readers if reader is not None and reader.kind == "scores"}
        return "key" if keys == {1} else "query"
    if step.kind == "linear":
        return _linear(step, readers, kinds)
    if step.kind == "mean":
        return "pooled"
    if step.kind == "activation":
        gelu = step.data["name"] in ("gelu", "gelu_tanh", "x*sigmoid(1.702x+0)")
        return "gelu" if gelu and kinds == {"linear"} else "activation"
    if step.kind == "multiply":
        return "product"
    if step.kind == "norm":
        return "residual" if kinds & {*SUMS, "norm"} else "norm"
    if step.kind in SUMS:
        return "residual" if kinds & {*SUMS, "norm", "mean"} or not kinds else "inner"
    # depthwise, affine, max
    if kinds == {"activation"}:
        return "hidden"
    if not kinds:
        return "residual" if len(step.shape) == 1 else "inner"  # a vector that the model returns, such as logits
    return "residual" if kinds <= {*SUMS, "norm"} else "inner"


def _linear(step: Step, readers: Readers, kinds: set[str]) -> Role:
    if not kinds:
        if len(step.shape) > 1:
            return "inner"
        # A classifier has a bias; the projection of CLIP and its relatives has none, and its output is an embedding.
        return "logits" if step.data["bias"] is not None else "pooled"
    if None in [reader for reader, _ in readers]:
        return "residual" if len(step.shape) == 1 and kinds <= {*SUMS} else "inner"
    if kinds == {"scores", "context"}:
        return "qkv" if all(reader is not None and _is_part(reader, i) for reader, i in readers) else "inner"
    if kinds == {"context"}:
        return "value"
    if kinds <= {*SUMS}:
        # Accumulators are added as they are, but not rearranged.
        plain = all(reader is not None and _keeps_order(reader, i) for reader, i in readers)
        return ("patch" if "embed" in kinds else "branch") if plain else "residual"
    if kinds == {"activation"}:
        return "hidden"
    return "residual" if kinds <= {*SUMS, "norm"} else "inner"


def _is_part(reader: Step, i: int) -> bool:
    """Return whether a product of attention reads its own third of the channels: Q, K or V."""
    part = 2 if reader.kind == "context" else i
    return splits_heads(reader.inputs[i], part)


def _keeps_order(reader: Step, i: int) -> bool:
    """Return whether a sum reads a linear layer's output as it is, or after a prefix of constant rows."""
    view = reader.inputs[i]
    if reader.kind == "embed" and view.is_plain and len(view.shape) == 2 and len(view.step.shape) == 2:
        first = view.index.shape[0] - view.step.shape[0]
        return (
            first >= 0
            and view.shape[1] == view.step.shape[1]
            and bool((view.index[first:].flatten() == torch.arange(view.step.size)).all())
        )
    return view.is_plain and view.shape == view.step.shape and view.is_identity()
