"""Describe the outputs of a program: one description for the engine, ONNX Runtime and every export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fqvit.ir.program import Header, Program, Verified


@dataclass(frozen=True)
class OutputInfo:
    """One output of a program: value = (integer - zero) * scale * 2^alpha[c].

    name: as `quantize --output` names it, such as tokens@9   kind: logits, tokens, embedding, ... (docs/reference/format.md)
    dtype: u8, u16 or i32   shape: shape for one image   alpha: one exponent per channel; empty if all are 0
    """

    name: str
    kind: str
    scale: float
    zero: int
    dtype: str
    shape: tuple[int, ...]
    alpha: tuple[int, ...] = ()


def unique_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels, all different: the second output that is called `tokens` becomes `tokens.2`, and so on."""
    names: list[str] = []
    for label in labels:
        name, count = label, 1
        while name in names or (count > 1 and name in labels):
            count += 1
            name = f"{label}.{count}"
        names.append(name)
    return tuple(names)


def output_names(header: Header) -> tuple[str, ...]:
    """Return one name per output, in order, all different. An output without a name is named after its kind."""
    return unique_names([output.label for output in header.outputs])


def describe_outputs(program: Program, verified: Verified) -> tuple[OutputInfo, ...]:
    """Return the descriptions of all outputs, in order."""
    found = []
    for name, output in zip(output_names(program.header), program.header.outputs, strict=True):
        value = verified.buffers[output.buffer]
        alpha = () if output.alpha is None else tuple(program.constants[output.alpha].tolist())
        found.append(OutputInfo(name, output.kind, output.scale, output.zero, value.dtype, value.shape, alpha))
    return tuple(found)
