"""Summarize a .fqvit file without running it: ops, sites, bytes, headroom of accumulators.

Needs no torch. See also: ir/program.py (`verify` proves the bounds), cli/commands/inspect.py (prints the summary).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fqvit.ir.ops import Linear
from fqvit.ir.program import CLASSES, AnyOp, Program, encode_header
from fqvit.ir.value import Proof, Value

OTHER, PROGRAM, NAMES = "indices", "program text", "class names"
# {last part of a constant's name: kind of constant}. The names of shared constants end in a number: alpha.0, alpha.1, ...
KINDS = {
    "w": "weights",
    "exponent": "weight exponents",
    "choice": "codebooks",
    "codebooks": "codebooks",
    "bias": "biases",
    "mult": "multipliers",
    "mult0": "multipliers",
    "mult1": "multipliers",
    "shift": "multipliers",
    "affine": "LayerNorm",
    "table": "tables",
    "positions": "embeddings",
    "prefix": "embeddings",
    "alpha": "power-of-two factors",
    "steps": "channel scales",
    "zero": "zero points",
    CLASSES: NAMES,
}


class OpRow(msgspec.Struct, frozen=True):
    """One op: the buffer y that it writes, with type, shape and range lo..hi, and the buffers that it reads."""

    op: str
    y: str
    dtype: str
    shape: tuple[int, ...]
    lo: int
    hi: int
    inputs: tuple[str, ...]


class ProofRow(msgspec.Struct, frozen=True):
    """Overflow proof: |what| <= bound < 2^bits inside the `op` that writes `buffer`. headroom: bits - log2(bound)."""

    op: str
    buffer: str
    what: str
    bound: int
    bits: int
    headroom: float


class SiteRow(msgspec.Struct, frozen=True):
    """One quantized site. codes: "affine", "by channel", "power-of-two", "log2" or "relative".

    scale, zero: one entry per group of channels. "by channel": only the smallest and the largest. "power-of-two": the scales do
        not include the factor 2^alpha, and zero may have one entry per value of alpha. "log2" and "relative": empty
    alpha_max: exponent of the largest Power-of-Two Factor   lowest, highest: the range of real values
    """

    site: str
    role: str
    bits: int
    codes: str
    scale: tuple[float, ...]
    zero: tuple[int, ...]
    alpha_max: int
    lowest: float
    highest: float


@dataclass(frozen=True)
class Inspection:
    """Summary of a program.

    bytes: {kind of constant: bytes in the file}
    floats: number of float constants, float buffers and floats in fields of ops; must be 0
    weights_by_bits: {bits: number of weights stored in that many bits}   groups: group sizes of packed weights
    linear: bytes of the weights of all linear ops, with exponents and codebooks
    packed: the same, of the linear ops with packed weights
    """

    ops: list[OpRow]
    sites: list[SiteRow]
    proofs: list[ProofRow]
    bytes: dict[str, int]
    floats: int
    weights_by_bits: dict[int, int]
    groups: tuple[int, ...]
    linear: int
    packed: int

    @property
    def op_kinds(self) -> dict[str, int]:
        return dict(Counter(op.op for op in self.ops).most_common())

    @property
    def weights(self) -> int:
        """Bytes of the weights as stored, exponents and codebooks not included."""
        return self.bytes.get("weights", 0)

    @property
    def bits_per_weight(self) -> float:
        """Mean stored bits per weight of the linear ops, including exponents and codebooks."""
        return 8 * self.linear / max(sum(self.weights_by_bits.values()), 1)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @property
    def names(self) -> int:
        """Bytes of the class names."""
        return self.bytes.get(NAMES, 0)

    @property
    def extra(self) -> int:
        """Bytes that the format adds to the weights. Class names are not included: users choose their length."""
        return self.total - self.weights - self.names

    @property
    def overhead(self) -> float:
        """`extra` in percent of the weights as stored."""
        return 100 * self.extra / max(self.weights, 1)

    def tightest(self) -> list[ProofRow]:
        """Return the proof with the least headroom for each pair of op and value (`op`, `what`), tightest first."""
        worst: dict[tuple[str, str], ProofRow] = {}
        for proof in self.proofs:
            key = (proof.op, proof.what)
            if key not in worst or proof.headroom < worst[key].headroom:
                worst[key] = proof
        return sorted(worst.values(), key=lambda proof: proof.headroom)


def inspect(program: Program, path: Path) -> Inspection:
    """Summarize a program that was loaded from `path`."""
    return _inspect(program, path.stat().st_size - sum(array.nbytes for array in program.constants.values()))


def inspect_part(program: Program) -> Inspection:
    """Summarize one program of a detector, which is not stored in a separate file."""
    return _inspect(program, len(encode_header(program.header)))


def part_name(part: str, name: str) -> str:
    """Return the name of a site or buffer among those of all programs of a detector."""
    return name if part == "pyramid" else f"{part}/{name}"


def merged(parts: Mapping[str, Inspection], file_bytes: int) -> Inspection:
    """Combine the summaries of all programs of a detector, by the names of the programs. file_bytes: size of the file"""
    sizes: Counter[str] = Counter()
    bits: Counter[int] = Counter()
    for found in parts.values():
        sizes.update(found.bytes)
        bits.update(found.weights_by_bits)
    sizes[PROGRAM] = 0
    sizes[PROGRAM] = file_bytes - sizes.total()

    def rename(kind: str, field: str) -> list[Any]:
        return [
            msgspec.structs.replace(row, **{field: part_name(part, getattr(row, field))})
            for part, found in parts.items()
            for row in getattr(found, kind)
        ]

    return Inspection(
        ops=rename("ops", "y"),
        sites=rename("sites", "site"),
        proofs=rename("proofs", "buffer"),
        bytes=dict(sizes.most_common()),
        floats=sum(found.floats for found in parts.values()),
        weights_by_bits=dict(sorted(bits.items())),
        groups=tuple(sorted({group for found in parts.values() for group in found.groups})),
        linear=sum(found.linear for found in parts.values()),
        packed=sum(found.packed for found in parts.values()),
    )


def _inspect(program: Program, text: int) -> Inspection:
    """Summarize a program. text: number of bytes of the file that hold no constants."""
    verified = program.verify()
    buffers = verified.buffers
    sizes: Counter[str] = Counter()
    for name, array in program.constants.items():
        sizes[kind_of(name)] += array.nbytes
    sizes[PROGRAM] = text
    kinds = {op.y: _tag(op) for op in program.ops}
    return Inspection(
        ops=[_op_row(op, buffers[op.y]) for op in program.ops],
        sites=[_site_row(program, op.y) for op in program.ops if op.y in program.header.sites],
        proofs=[_proof_row(proof, kinds[proof.buffer]) for proof in verified.proofs],
        bytes=dict(sizes.most_common()),
        floats=_floats(program, buffers.values()),
        weights_by_bits=_weights_by_bits(program, buffers),
        groups=tuple(sorted({op.group for op in program.ops if isinstance(op, Linear) and op.group})),
        linear=_weight_bytes(program, (False, True)),
        packed=_weight_bytes(program, (True,)),
    )


def kind_of(constant: str) -> str:
    """Return the kind of a constant, such as "weights" or "tables", from its name."""
    parts = constant.split(".")
    return KINDS.get(parts[-1]) or (KINDS.get(parts[0]) if len(parts) == 2 and parts[1].isdigit() else None) or OTHER


def _weights_by_bits(program: Program, buffers: Mapping[str, Value]) -> dict[int, int]:
    """Count the stored weights of linear ops. Ops that use the weights of another op store none."""
    found: Counter[int] = Counter()
    for op in program.ops:
        if isinstance(op, Linear) and op.weights_of is None:
            found[op.weight_bits] += buffers[op.x].channels * buffers[op.y].channels
    return dict(sorted(found.items()))


def _weight_bytes(program: Program, packed: tuple[bool, ...]) -> int:
    """Return the bytes of all constants that store weights of linear ops. packed: the values of op.packed to include"""
    linears = [op for op in program.ops if isinstance(op, Linear) and op.packed in packed]
    names = {op.part(part) for op in linears for part in op.weight_parts}
    return sum(program.constants[name].nbytes for name in names)


def _op_row(op: AnyOp, value: Value) -> OpRow:
    return OpRow(_tag(op), op.y, value.dtype, value.shape, value.lo, value.hi, op.inputs())


def _proof_row(proof: Proof, op: str) -> ProofRow:
    headroom = proof.bits - math.log2(max(proof.bound, 1))  # Python's log2 takes integers of any size
    return ProofRow(op, proof.buffer, proof.what, proof.bound, proof.bits, round(headroom, 2))


def _tag(op: AnyOp) -> str:
    return str(type(op).__struct_config__.tag)


def _site_row(program: Program, name: str) -> SiteRow:
    site = program.header.sites[name]
    last = 2**site.bits - 1
    if site.log2:
        smallest = 0.0 if site.zero_code else 2.0**-last
        return SiteRow(name, site.role, site.bits, "log2", (), (), 0, smallest, 1.0)
    if site.levels:
        return SiteRow(name, site.role, site.bits, "relative", (), (), 0, 0.0, 1.0)
    scale, zero = site.scales_and_zeros(program.constants)
    lowest, highest = float((-zero * scale).min()), float(((last - zero) * scale).max())
    codes, alpha = "affine", 0
    if site.alpha is not None:
        codes, alpha = "power-of-two", int(program.constants[site.alpha].max())
        if len(site.zero) > 1 and len(site.scale) == 1:  # one zero point per value of alpha: the scales include 2^alpha
            scale, zero = np.array(site.scale), np.array(site.zero)
        else:
            lowest, highest = lowest * 2**alpha, highest * 2**alpha
    if site.steps is not None:
        codes, scale, zero = "by channel", np.array([scale.min(), scale.max()]), np.array([zero.min(), zero.max()])
    return SiteRow(name, site.role, site.bits, codes, tuple(scale.tolist()), tuple(zero.tolist()), alpha, lowest, highest)


def _floats(program: Program, buffers: Iterable[Value]) -> int:
    constants = sum(not np.issubdtype(array.dtype, np.integer) for array in program.constants.values())
    values = sum(value.dtype.startswith("f") for value in buffers)
    return constants + values + sum(_floats_in(msgspec.to_builtins(op)) for op in program.ops)


def _floats_in(value: object) -> int:
    if isinstance(value, dict):
        return sum(map(_floats_in, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_floats_in, value))
    return int(isinstance(value, float))


def bits_of(recipe: Mapping[str, object]) -> str:
    """Return the bits of weights/activations/attention, such as "8/8/4". A field that the file omits has its default."""
    bits = (("weight_bits", 8), ("activation_bits", 8), ("attention_bits", 4))
    return "/".join(str(recipe.get(key, default)) for key, default in bits)
