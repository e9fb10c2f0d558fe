"""Choose the scale and zero point of every buffer in a QDQ graph.

A buffer has the scales and zero points of its site (ir/program.py). If a matrix product reads it, per-channel scales
are replaced by their mean and per-channel zero points by the middle code. See also: graph.py, writer.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fqvit.export.qdq.graph import Floats, Ints, QdqParams, collapsed
from fqvit.ir.attention import Attend, MatMul, ShiftMatMul
from fqvit.ir.elementwise import Max
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, Linear, Zero
from fqvit.ir.program import AnyOp, Program, Site

MOVES = (Permute, Take, Concat, Max)  # their outputs have the scales and zero points of their inputs


class BufferScales:
    """Scales, zero points, shapes and readers of a program's buffers.

    symmetric: buffers that only linear ops read get the middle code as zero point
    """

    def __init__(self, program: Program, symmetric: bool) -> None:
        self.program, self.symmetric = program, symmetric
        self.constants, self.sites = program.constants, program.header.sites
        self.shapes = {name: value.shape for name, value in program.verify().buffers.items()}
        self.outputs = {output.buffer: output.scale for output in program.header.outputs}
        self.readers: dict[str, list[AnyOp]] = {name: [] for name in self.shapes}
        for op in program.ops:
            for name in op.inputs():
                if name in self.readers:
                    self.readers[name].append(op)
        self.factors: dict[str, float] = {}  # multiplied into the scale of Q, so that scores need no Mul
        for op in program.ops:
            if isinstance(op, MatMul) and isinstance(op.mult, int) and not op.b_rows and len(self.readers[op.a]) == 1:
                y, a, b = self.params(op.y, op.y_zero), self.qkv_params(op.a), self.qkv_params(op.b)
                if a is not None and b is not None:
                    self.factors[op.a] = op.mult / 2.0**op.shift * float(y.scale[0] / (a.scale[0] * b.scale[0]))

    def final_readers(self, name: str) -> Iterator[AnyOp]:
        """Yield the ops that read a buffer, directly or through ops that only move values."""
        for op in self.readers[name]:
            if isinstance(op, MOVES):
                yield from self.final_readers(op.y)
            else:
                yield op

    def is_split_qkv(self, op: Linear) -> bool:
        """Return whether every reader of a linear op selects Q, K or V from its result, which is not itself an output."""
        count = self.shapes[op.y][-1]
        return (
            bool(self.readers[op.y])
            and op.y not in self.outputs
            and all(
                isinstance(reader, Permute)
                and reader.select is not None
                and len(reader.view) > 3
                and reader.select[0] == len(reader.view) - 3
                and reader.view[-3] == 3
                and int(np.prod(reader.view[-3:])) == count
                for reader in self.readers[op.y]
            )
        )

    def qkv_params(self, name: str) -> QdqParams | None:
        """Return the parameters of Q, K or V for the permute op that writes `name`; None if another kind of op writes it."""
        op = next(op for op in self.program.ops if op.y == name)
        source = next((o for o in self.program.ops if isinstance(op, Permute) and o.y == op.x), None)
        if not isinstance(op, Permute) or op.select is None or not isinstance(source, Linear) or not self.is_split_qkv(source):
            return None
        scale, zero = self._site_scale(source.y, source.y_zero)
        size = self.shapes[source.y][-1] // 3
        rows = slice(op.select[1] * size, (op.select[1] + 1) * size)
        return self._params(name, per_channel(scale, 3 * size)[rows], per_channel(zero, 3 * size)[rows], source.bits)

    def params(self, name: str, zero: Zero | None = None, bits: int = 8) -> QdqParams:
        """Return the parameters of a buffer. zero: y_zero of the op that writes it; None: the zero points of its site."""
        return self._params(name, *self._site_scale(name, zero), bits)

    def _params(self, name: str, scale: Floats, zero: Ints, bits: int) -> QdqParams:
        readers = list(self.final_readers(name))
        product = any(isinstance(op, Linear | MatMul | ShiftMatMul | Attend) for op in readers)
        linear = bool(readers) and all(isinstance(op, Linear) for op in readers)
        middle = np.array([1 << (bits - 1)], np.int64)
        if linear:
            # Weights and bias of the linear ops already contain the scales and zero points of their input.
            mean, zeros = np.array([scale.mean()]), collapsed(zero)
            return QdqParams(mean, middle if self.symmetric or len(zeros) > 1 else zeros, bits, product)
        if product and (len(collapsed(scale)) > 1 or len(collapsed(zero)) > 1):
            scale, zero = np.array([scale.mean()]), collapsed(zero) if len(collapsed(zero)) == 1 else middle
        return QdqParams(collapsed(scale) * self.factors.get(name, 1.0), collapsed(zero), bits, product)

    def _site_scale(self, name: str, zero: Zero | None) -> tuple[Floats, Ints]:
        """Return scales and zero points of the buffer's site (1 and 128 without a site). `zero` overrides its zero points."""
        site = self._find_site(name)
        if site is None or not site.scale:
            scale, zeros = np.ones(1), np.array([128])
        else:
            scale, zeros = site.scales_and_zeros(self.constants)
            if site.alpha is not None and len(scale) == 1:
                scale = scale * np.exp2(self.constants[site.alpha].astype(np.float64))
        return scale, zeros if zero is None else self.zero_points(zero)

    def _find_site(self, name: str) -> Site | None:
        """Return the site of a buffer or of a moved copy: attention times V has its site only after the heads are merged."""
        if name in self.sites:
            return self.sites[name]
        moved = (self._find_site(op.y) for op in self.readers[name] if isinstance(op, MOVES))
        return next((site for site in moved if site is not None), None)

    def zero_points(self, zero: Zero) -> Ints:
        if isinstance(zero, str):
            return self.constants[zero].astype(np.int64)
        return np.atleast_1d(np.array(zero, np.int64))

    def multiplier(self, op: MatMul) -> Floats:
        """Return the multiplier of a matrix product as [1], or as [H, 1, 1] if every head has its own."""
        if isinstance(op.mult, int):
            return np.array([float(op.mult)])
        return self.constants[op.mult].astype(np.float64)[:, None, None]

    def accumulator_scale(self, name: str, channels: int) -> Floats:
        """Return per-channel scales [C] of an accumulator, chosen so that the Add that reads it needs no Mul."""
        adds = [op for op in self.final_readers(name) if isinstance(op, Add)]
        for term in adds[0].terms if len(adds) == 1 else ():
            if term.x == name or any(op.y == term.x for op in self._moves_after(name)):
                mult = self.constants[term.mult] if isinstance(term.mult, str) else np.array([term.mult])
                ratio = mult.astype(np.float64) / 2.0 ** adds[0].shift
                return per_channel(np.where(ratio > 0, ratio, 1.0) * self.sum_scale(adds[0]), channels)
        return np.ones(channels)

    def _moves_after(self, name: str) -> Iterator[AnyOp]:
        for op in self.readers[name]:
            if isinstance(op, MOVES):
                yield op
                yield from self._moves_after(op.y)

    def sum_scale(self, op: Add) -> float:
        """Return the scale of the codes that an Add writes, without 2^y_alpha."""
        scale, _ = self._site_scale(op.y, op.y_zero)
        alpha = 0 if op.y_alpha is None else int(self.constants[op.y_alpha][0])
        return float(scale[0]) / 2.0**alpha


def per_channel(values: np.ndarray, channels: int) -> np.ndarray:
    """Expand one value per tensor or per group of channels to one value per channel."""
    return np.repeat(values, channels // len(values))
