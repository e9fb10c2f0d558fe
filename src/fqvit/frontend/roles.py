"""Choose the role of each step from its readers. Roles decide how recipes quantize a site (quant/plan.py)."""

from __future__ import annotations

from fqvit.frontend.draft import Step
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
    if step.kind in ("scores", "context"):
        return "scores" if step.kind == "scores" else "context"
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
    # depthwise, affine
    if kinds == {"activation"}:
        return "hidden"
    return "residual" if kinds and kinds <= {*SUMS, "norm"} else "inner"


def _linear(step: Step, readers: Readers, kinds: set[str]) -> Role:
    if not kinds:
        return "logits"
    if None in [reader for reader, _ in readers]:
        return "inner"
    if kinds <= {"scores", "context"}:
        return "qkv" if kinds == {"scores", "context"} else "value"
    if kinds <= {*SUMS}:
        return "patch" if "embed" in kinds else "branch"
    if kinds == {"activation"}:
        return "hidden"
    return "residual" if kinds <= {*SUMS, "norm"} else "inner"
