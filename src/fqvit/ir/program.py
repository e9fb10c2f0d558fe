"""The integer program: a flat list of ops on named buffers, its constants, and what people need to know of it.

verify() is the only gate: whatever it accepts runs without float, without overflow and without reading outside a buffer.
Saving and loading are in file.py; running in runtime/. docs/format.md is the page for readers in other languages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean
from fqvit.ir.value import DAMAGED, MAX_AXES, MAX_CHANNELS, MAX_CODE, MAX_ELEMENTS, NAMES, Constant, Proof, Scope, Value

AnyOp = (
    Lookup | Linear | LayerNorm | Add | Take | Permute | Concat | Mean
    | MatMul | LogSoftmax | Softmax | ShiftMatMul | RowCodes | Attend
)  # fmt: skip
INPUT = "pixels"
CLASSES = "classes"  # the constant with the class names: UTF-8, one a line


Bits = Annotated[int, msgspec.Meta(ge=1, le=16)]
Scale = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]  # finite, and so is a code's value
Code = Annotated[int, msgspec.Meta(ge=0, le=MAX_CODE)]


class Site(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How to read the codes of a buffer: value = (code - zero) scale steps[c] 2^alpha[c]; log2 codes: 2^-code; with levels:
    levels[code] over the sum of its row.

    Information for people and for `compare`; running never looks at it. scale is one number, or one a group of channels of
    equal size (Q, K and V have three), and so is zero, which may also have one number for each alpha. alpha names a u8 [C]
    constant. steps names a u16 [C] constant: how many times the scale a channel's step is; beside three scales it has C / 3
    entries, for the last group. With steps zero may name a u8 or u16 [C] constant. zero_code: the last log2 code means 0.
    """

    role: str
    bits: Bits
    scale: tuple[Scale, ...] = ()
    zero: tuple[Code, ...] | str = ()
    alpha: str | None = None
    log2: bool = False
    zero_code: bool = False
    steps: str | None = None
    levels: tuple[Code, ...] = ()

    def scales_and_zeros(self, constants: Mapping[str, Constant]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """One number each a group of channels; a channel where there are steps, or several zero points beside alpha."""
        zero = (constants[self.zero] if isinstance(self.zero, str) else np.array(self.zero)).astype(np.int64)
        scale = np.array(self.scale, np.float64)
        if self.alpha is not None and len(zero) > 1:
            alpha = constants[self.alpha]
            return scale[0] * np.exp2(alpha.astype(np.float64)), zero[alpha]
        if self.steps is not None:
            last = constants[self.steps] * scale[-1]
            scale = np.concatenate([*(np.full(len(last), one) for one in scale[:-1]), last])
            zero = np.repeat(zero, len(scale) // len(zero))
        return scale, zero

    def check(self, scope: Scope, codes: Value) -> None:
        scope.check(codes.hi < 1 << self.bits, f"{self.bits} bits for codes up to {codes.hi}")
        alpha = scope.alpha(self.alpha, codes.channels)
        groups = len(self.scale)
        kinds = self.log2 + bool(self.levels) + (self.steps is not None)
        scope.check(kinds <= 1, "more than one of log2, steps and levels")
        scope.check(self.steps is not None or not isinstance(self.zero, str), "zero is a name, but there are no steps")
        if self.levels:
            scope.check(codes.hi < len(self.levels), f"{len(self.levels)} levels for codes up to {codes.hi}")
            scope.check(max(self.levels) > 0, "no level above 0")
        elif self.steps is not None:
            scope.check(groups in (1, 3) and codes.channels % groups == 0, f"{groups} scales beside steps")
            steps = scope.constant(self.steps, ("u16",), (codes.channels // groups,))
            scope.check(int(steps.min()) > 0, f"constant {self.steps!r} has a step of 0")
            scope.zero(self.zero, codes.channels)
        elif not self.log2:
            several = self.alpha is not None and groups == 1 and len(self.zero) == alpha + 1
            scope.check(several or groups == len(self.zero), f"{groups} scales and {len(self.zero)} zero points")
            scope.check(groups > 0 and codes.channels % groups == 0, f"{groups} scales for {codes.channels} channels")


# What kinds of outputs are: their types, and how many axes they can have.
CODES, NUMBERS = ("u8", "u16"), ("i32",)
Kind = Literal["logits", "tokens", "pooled", "map", "scores", "deltas"]
KINDS: dict[Kind, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "logits": (NUMBERS, (1,)),  # [classes]
    "tokens": (CODES, (2,)),  # [T, C]
    "pooled": (CODES, (1,)),  # [C]
    "map": (("u8",), (3,)),  # [h, w, C]
    "scores": (NUMBERS, (3,)),  # [h, w, O], logits of every place
    "deltas": (NUMBERS, (1, 3)),  # [O] or [h, w, O], box regressions
}


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A buffer that a run returns. value = (code - zero) scale 2^alpha[c]; alpha names a u8 [C] constant, if any."""

    buffer: str
    kind: Kind
    scale: Scale
    zero: Code = 0
    alpha: str | None = None

    def features(self) -> Literal["logits", "tokens", "pooled"]:
        """The kind, of a classifier's output."""
        if self.kind == "logits" or self.kind == "tokens" or self.kind == "pooled":
            return self.kind
        raise FqvitError(f"{self.buffer}: the output is of kind {self.kind}: a part of a detector, not a classifier.")

    def check(self, scope: Scope) -> Value:
        """Refuses what is not of its kind."""
        dtypes, axes = KINDS[self.kind]
        value = scope.buffer(self.buffer, dtypes)
        if dtypes == NUMBERS:
            scope.check(self.zero == 0 and self.alpha is None, f"{self.kind} have neither zero point nor alpha")
        expected = " or ".join(map(str, axes))
        scope.check(len(value.shape) in axes, f"{self.kind} of shape {list(value.shape)}, expected {expected} axes")
        scope.alpha(self.alpha, value.channels)
        return value


class CodeInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a program takes instead of pixels: u8 codes [N, *shape], value = (code - zero) scale. N are boxes, not images.

    bits: codes were calibrated as 0 .. 2^bits - 1; all others run too.
    """

    shape: tuple[int, int, int]
    scale: Scale
    zero: Annotated[int, msgspec.Meta(ge=0, le=255)]
    bits: Annotated[int, msgspec.Meta(ge=1, le=8)] = 8


MoveKind = Literal["patches", "grid", "windows", "tokens", "merge", "neighbours", "enlarged", "second"]


class Move(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an op follows from the image's size, for making the same program for another one (resize.py). Running never looks
    at it. window, shift: of windows and tokens   of: the buffer whose size an enlarged map gets"""

    kind: MoveKind
    window: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    shift: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    of: str = ""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything of a program but its constants: the JSON of the file."""

    version: int
    model: str
    preprocess: Preprocess
    ops: Annotated[tuple[AnyOp, ...], msgspec.Meta(max_length=8192)]  # native/engine.cpp compares each with all others
    output: Output
    sites: dict[str, Site]
    recipe: dict[str, object]
    source: str
    images: int  # calibration images seen
    # Parts of detectors: outputs after the first, and codes of squares as input. Programs without them have neither field.
    others: tuple[Output, ...] = ()
    input: CodeInput | None = None
    # By the buffer that an op writes. A program that has them can be made for other image sizes.
    moves: dict[str, Move] = {}

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (self.output, *self.others)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the pixels, or of the codes."""
        if self.input is not None:
            return self.input.shape
        return self.preprocess.height, self.preprocess.width, self.preprocess.channels


@dataclass(frozen=True)
class Verified:
    """What verify() found: every buffer's value and every proof."""

    buffers: Mapping[str, Value]
    proofs: tuple[Proof, ...]


@dataclass(frozen=True)
class Program:
    """A network as integer ops: what a .fqvit file holds. constants: integer arrays by name, weights and tables"""

    header: Header
    constants: Mapping[str, Constant] = field(repr=False)

    @property
    def ops(self) -> tuple[AnyOp, ...]:
        """In the order in which they run."""
        return self.header.ops

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        return self.header.input_shape

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names in the order of the logits, where the file has them."""
        if CLASSES not in self.constants:
            return None
        return tuple(self.constants[CLASSES].tobytes().decode("utf-8", "replace").split("\n"))

    def verify(self) -> Verified:
        """Infer every buffer and prove every accumulator, or raise FqvitError naming the op at fault."""
        written = {INPUT, *(op.y for op in self.ops)}
        for name, array in self.constants.items():
            if name in written:
                raise FqvitError(f"constant {name!r} has the name of a buffer. {DAMAGED}")
            if array.dtype not in NAMES:
                raise FqvitError(f"constant {name!r} is {array.dtype}: only integers may be in a program. {DAMAGED}")
        shape = self.input_shape
        if min(shape) < 1 or math.prod(shape) >= MAX_ELEMENTS:
            raise FqvitError(f"input of shape {list(shape)} is impossible. {DAMAGED}")
        # What packed weights are made of is its op's alone, since unpacking replaces it.
        packed = {op.part(part) for op in self.ops if _is_packed(op) for part in ("w", "exponent")}
        common = {name: array for name, array in self.constants.items() if name not in packed}
        buffers: dict[str, Value] = {INPUT: Value("u8", shape, 0, 255)}
        proofs: list[Proof] = []
        linears: dict[str, Linear] = {}
        for op in self.ops:
            scope = Scope(buffers, self.constants if _is_packed(op) else common, op.y)
            scope.check(op.y not in buffers, "written twice")
            if isinstance(op, Linear):
                _check_owner(op, scope, linears)
                linears[op.y] = op
            value, found = op.infer(scope)
            scope.check(len(value.shape) <= MAX_AXES, f"shape {list(value.shape)} has more than {MAX_AXES} axes")
            scope.check(math.prod(value.shape) < MAX_ELEMENTS, f"shape {list(value.shape)} is too large")
            moved = isinstance(op, Permute | Concat)
            scope.check(moved or value.channels <= MAX_CHANNELS, f"{value.channels} channels, at most {MAX_CHANNELS} can be")
            for proof in found:
                if not proof.holds:
                    raise FqvitError(
                        f"{op.y}: {proof.what} can reach {proof.bound}, which does not fit {proof.bits} bits."
                        " Lower the bit widths of this site or its weights."
                    )
            buffers[op.y] = value
            proofs.extend(found)
        named = [output.buffer for output in self.header.outputs]
        for output in self.header.outputs:
            scope = Scope(buffers, self.constants, "output")
            scope.check(named.count(output.buffer) == 1, f"{output.buffer!r} is an output twice")
            output.check(scope)
        result = buffers[self.header.output.buffer]
        for name, site in self.header.sites.items():
            scope = Scope(buffers, self.constants, f"site {name}")
            site.check(scope, scope.buffer(name))
        if self.header.output.kind == "logits" and self.classes is not None and len(self.classes) != result.channels:
            raise FqvitError(f"{len(self.classes)} class names for {result.channels} logits. {DAMAGED}")
        return Verified(buffers, tuple(proofs))

    def check_plain(self, use: str) -> None:
        """Refuses a part of a detector, where only programs from pixels to one output are taken."""
        if self.header.others or self.header.input is not None:
            raise FqvitError(f"{self.header.model}: a part of a detector (codes in, or several outputs); {use} takes none yet.")

    def unpacked(self) -> Program:
        """The same values with every weight a byte, verified: what runners take, so that no kernel knows of packing."""
        buffers = self.verify().buffers
        ops, constants = list(self.ops), dict(self.constants)
        for i, op in enumerate(self.ops):
            if _is_packed(op):
                constants[op.part("w")] = op.weights(Scope(buffers, self.constants, op.y))
                constants.pop(op.part("exponent"), None)  # ops that share weights share this
                ops[i] = msgspec.structs.replace(op, group=0)
        return Program(msgspec.structs.replace(self.header, ops=tuple(ops)), constants)

    def fingerprint(self) -> str:
        """SHA-256 over the header's JSON and every constant: equal programs, equal fingerprints.

        It guards against damage, not against malice: anybody can compute it.
        """
        return fingerprint(encode_header(self.header), self.constants)

    def save(self, path: str | Path) -> None:
        """Verified, whole or not at all: FqvitError where that cannot be."""
        from fqvit.ir.file import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Program:
        """Of a file that passes every check; FqvitError says what is wrong with others."""
        from fqvit.ir.file import load

        return load(Path(path))


def _is_packed(op: AnyOp) -> TypeGuard[Linear]:
    return isinstance(op, Linear) and op.group != 0


def _check_owner(op: Linear, scope: Scope, earlier: Mapping[str, Linear]) -> None:
    """Weights are those of an earlier op that has its own, stored in the same way and read by as many inputs: the packed bytes
    of one more input would be the same."""
    if op.weights_of is None:
        return
    owner = earlier.get(op.weights_of)
    if owner is None or owner.weights_of is not None:
        scope.fail(f"has the weights of {op.weights_of!r}, which is no earlier linear op with its own")
    scope.check(owner.group == op.group, f"has the weights of {op.weights_of!r}, which are packed otherwise")
    same = scope.buffer(owner.x).channels == scope.buffer(op.x).channels
    scope.check(same, f"has the weights of {op.weights_of!r}, which reads another number of channels")


def encode_header(header: Header) -> bytes:
    return msgspec.json.encode(plain_header(header))


def plain_header(header: Header) -> dict[str, Any]:
    """As JSON has it, keys of dicts sorted."""
    plain: dict[str, Any] = msgspec.to_builtins(header, order="deterministic")
    for site in plain["sites"].values():
        # Sites had seven fields at first. Without empty ones after those, a file of that time keeps its fingerprint.
        while len(site) > 7 and not site[-1]:
            site.pop()
    return plain


def fingerprint(text: bytes, constants: Mapping[str, Constant]) -> str:
    """Of a header as written and its constants, in order of name."""
    digest = hashlib.sha256(text)
    for name in sorted(constants):
        array = np.ascontiguousarray(constants[name])
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        shape = ",".join(map(str, array.shape))
        digest.update(f"\n{name} {NAMES[array.dtype]} {shape}\n".encode())
        digest.update(little.tobytes())
    return digest.hexdigest()
