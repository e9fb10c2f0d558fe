"""The integer program: a flat list of ops on named buffers, their constants, and metadata.

Program.verify() checks a program completely: a program that it accepts runs without float arithmetic, without overflow and
without reading outside a buffer. See also: file.py (reads and writes files), runtime/ (runs programs),
docs/reference/format.md (the format).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, LayerNorm, Linear, Lookup, Mean
from fqvit.ir.value import (
    DAMAGED,
    MAX_AXES,
    MAX_CHANNELS,
    MAX_CODE,
    MAX_ELEMENTS,
    NAMES,
    Constant,
    Int,
    Proof,
    Scope,
    Value,
    check_constant,
)

AnyOp = (
    Lookup | Linear | LayerNorm | Add | Take | Permute | Concat | Mean
    | MatMul | LogSoftmax | Softmax | ShiftMatMul | RowCodes | Attend
    | Multiply | Rotary | Depthwise | Max
)  # fmt: skip
INPUT = "pixels"
CLASSES = "classes"  # the constant with the class names: UTF-8, one per line
VERSIONS = (1, 2)  # every released format version; docs/reference/format.md promises that they stay readable


Bits = Annotated[int, msgspec.Meta(ge=1, le=16)]
Scale = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]  # finite, so that the value of every code is finite
Code = Annotated[int, msgspec.Meta(ge=0, le=MAX_CODE)]


class Site(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How to decode the codes of a buffer: value = (code - zero) * scale * steps[c] * 2^alpha[c]

    With log2: value = 2^-code. With levels: value = levels[code] / (sum of levels[code] over the row).
    `inspect`, `compare` and exporters use sites; running a program does not.

    scale: one number, or one per group of channels of equal size (three for Q, K and V)
    zero: one number, one per group, one per value of alpha, or, with steps, the name of a u8 or u16 [C] constant
    alpha: the name of a u8 [C] constant, the exponent of the Power-of-Two Factor per channel
    steps: the name of a u16 [C] constant, the scale of each channel in units of `scale`; with three scales it has C / 3
        entries and applies to V only
    zero_code: the last log2 code means 0
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
        """Return scales and zero points: one per group of channels, without alpha.

        With steps, or with one zero point per value of alpha: one per channel; the scales then include steps or 2^alpha.
        """
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
        """Reject a site that does not describe the codes of its buffer."""
        scope.check(codes.hi < 1 << self.bits, f"{self.bits} bits for codes up to {codes.hi}")
        alpha = scope.alpha(self.alpha, codes.channels)
        groups = len(self.scale)
        kinds = self.log2 + bool(self.levels) + (self.steps is not None)
        scope.check(kinds <= 1, "more than one of log2, steps and levels")
        scope.check(self.steps is not None or not isinstance(self.zero, str), "zero names a constant, but there are no steps")
        if self.levels:
            scope.check(codes.hi < len(self.levels), f"{len(self.levels)} levels for codes up to {codes.hi}")
            scope.check(max(self.levels) > 0, "no level above 0")
        elif self.steps is not None:
            scope.check(
                groups in (1, 3) and codes.channels % groups == 0,
                f"{groups} scales with steps for {codes.channels} channels, expected 1, or 3 if channels are a multiple of 3",
            )
            steps = scope.constant(self.steps, ("u16",), (codes.channels // groups,))
            scope.check(int(steps.min()) > 0, f"constant {self.steps!r} has a step of 0")
            scope.zero(self.zero, codes.channels)
        elif not self.log2:
            one_per_alpha = self.alpha is not None and groups == 1 and len(self.zero) == alpha + 1
            scope.check(one_per_alpha or groups == len(self.zero), f"{groups} scales and {len(self.zero)} zero points")
            scope.check(groups > 0 and codes.channels % groups == 0, f"{groups} scales for {codes.channels} channels")


# The dtypes and the numbers of axes that each kind of output may have.
CODES, INT32 = ("u8", "u16"), ("i32",)
Kind = Literal["logits", "tokens", "pooled", "map", "scores", "deltas", "embedding", "signs"]
KINDS: dict[Kind, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "logits": (INT32, (1,)),  # [classes]
    "tokens": (CODES, (2,)),  # [T, C]
    "pooled": (CODES, (1,)),  # [C]
    "map": (("u8",), (3,)),  # [h, w, C]
    "scores": (INT32, (3,)),  # [h, w, O], logits per location
    "deltas": (INT32, (1, 3)),  # [O] or [h, w, O], box regressions
    "embedding": ((*CODES, *INT32), (1,)),  # [C], one scale and one zero point, so that dot products of codes are meaningful
    "signs": (("u8",), (1,)),  # [ceil(C / 8)], one bit per channel, most significant bit first: 1 if the value is above 0
}
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9@:._+-]{0,64}\Z")]


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A buffer that a run returns: value = (code - zero) * scale * 2^alpha[c]. alpha: the name of a u8 [C] constant, optional.

    name: what a user calls the output, such as tokens@9; empty if it is the same as the kind
    """

    buffer: str
    kind: Kind
    scale: Scale
    zero: Code = 0
    alpha: str | None = None
    name: Name = ""

    @property
    def label(self) -> str:
        """The name of the output: `name`, or the kind if `name` is empty."""
        return self.name or self.kind

    def features(self) -> Literal["logits", "tokens", "pooled"]:
        """Return the kind of the output: logits, tokens or pooled. Raises FqvitError for every other kind."""
        if self.kind == "logits" or self.kind == "tokens" or self.kind == "pooled":
            return self.kind
        raise FqvitError(f"{self.buffer}: output of kind {self.kind}, expected logits, tokens or pooled.")

    def check(self, scope: Scope) -> Value:
        """Return the Value of the output's buffer. Rejects a buffer that does not match the kind."""
        dtypes, axes = KINDS[self.kind]
        value = scope.buffer(self.buffer, dtypes)
        if value.dtype == "i32" or self.kind == "signs":
            scope.check(self.zero == 0 and self.alpha is None, f"{self.kind} with a zero point or alpha, expected neither")
        scope.check(self.kind != "embedding" or self.alpha is None, "embedding with alpha, expected one scale")
        expected = " or ".join(map(str, axes))
        scope.check(len(value.shape) in axes, f"{self.kind} of shape {list(value.shape)}, expected {expected} axes")
        scope.alpha(self.alpha, value.channels)
        return value


class CodeInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The input of a program that reads codes instead of pixels: u8 [N, *shape] for N boxes, value = (code - zero) * scale.

    bits: calibration assumed codes in 0..2^bits - 1; the program accepts all u8 codes.
    """

    shape: tuple[Int, Int, Int]
    scale: Scale
    zero: Annotated[int, msgspec.Meta(ge=0, le=255)]
    bits: Annotated[int, msgspec.Meta(ge=1, le=8)] = 8


MoveKind = Literal["patches", "grid", "windows", "tokens", "merge", "neighbours", "enlarged", "second"]


class Move(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an op depends on the image size, for rebuilding the program at another size (detect/resize.py).

    Running a program does not use it.

    window, shift: side and cyclic shift of the windows, for the kinds `windows` and `tokens`
    of: the buffer whose height and width the map is enlarged to, for the kind `enlarged`
    """

    kind: MoveKind
    window: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    shift: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    of: str = ""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A program without its constants: the JSON in the file."""

    version: Int
    model: str
    preprocess: Preprocess
    ops: Annotated[tuple[AnyOp, ...], msgspec.Meta(max_length=8192)]  # planning the arena takes quadratic time
    output: Output
    sites: dict[str, Site]
    recipe: dict[str, object]
    source: str
    images: Int  # number of calibration images
    others: tuple[Output, ...] = ()  # further outputs
    input: CodeInput | None = None  # codes instead of pixels as input; in files only for heads of detectors
    # Keyed by the buffer that the op writes. A program with moves can be rebuilt for other image sizes.
    moves: dict[str, Move] = {}

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (self.output, *self.others)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the input, which is pixels or codes."""
        if self.input is not None:
            return self.input.shape
        return self.preprocess.height, self.preprocess.width, self.preprocess.channels


@dataclass(frozen=True)
class Verified:
    """The result of verify(): the Value (dtype, shape, range) of every buffer and all overflow proofs."""

    buffers: Mapping[str, Value]
    proofs: tuple[Proof, ...]


@dataclass(frozen=True, repr=False)
class Program:
    """A network as integer ops: the contents of a .fqvit file. constants: integer arrays by name (weights, tables, ...)"""

    header: Header
    constants: Mapping[str, Constant]

    def __repr__(self) -> str:
        height, width, channels = self.input_shape
        gives = ", ".join(output.label for output in self.header.outputs)
        weights = sum(array.nbytes for array in self.constants.values()) / 1e6
        text = f"{self.header.model}, {height} x {width} x {channels} -> {gives}, {len(self.ops)} ops, {weights:.2f} MB"
        return f"Program({text}, recipe {self.header.recipe.get('name', 'unknown')})"

    @property
    def ops(self) -> tuple[AnyOp, ...]:
        """The ops in execution order."""
        return self.header.ops

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the input, which is pixels or codes."""
        return self.header.input_shape

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in the order of the logits; None if the program has none."""
        if CLASSES not in self.constants:
            return None
        return tuple(self.constants[CLASSES].tobytes().decode("utf-8", "replace").split("\n"))

    def verify(self) -> Verified:
        """Infer the Value of every buffer and prove that nothing overflows. Raises FqvitError that names the faulty op."""
        written = {INPUT, *(op.y for op in self.ops)}
        for name, array in self.constants.items():
            if name in written:
                raise FqvitError(f"constant {name!r} has the name of a buffer. {DAMAGED}")
            if array.dtype not in NAMES:
                raise FqvitError(f"constant {name!r} is {array.dtype}: only integers may be in a program. {DAMAGED}")
            check_constant(name, array.shape)
        version, needed = self.header.version, version_of(self.ops)
        if version < needed:
            raise FqvitError(f"format version {version}, but linear ops with a width or codebooks need {needed}. {DAMAGED}")
        shape = self.input_shape
        if min(shape) < 1 or math.prod(shape) >= MAX_ELEMENTS:
            raise FqvitError(f"input shape {list(shape)} is empty or too large. {DAMAGED}")
        # Only linear ops with packed weights may read these constants, because unpacked() replaces them.
        packed = {op.part(part) for op in self.ops if _is_packed(op) for part in op.weight_parts}
        common = {name: array for name, array in self.constants.items() if name not in packed}
        buffers: dict[str, Value] = {INPUT: Value("u8", shape, 0, 255)}
        proofs: list[Proof] = []
        linears: dict[str, Linear] = {}
        for op in self.ops:
            scope = Scope(buffers, self.constants if _is_packed(op) else common, op.y)
            scope.check(op.y not in buffers, "written twice")
            if isinstance(op, Linear):
                op.check_owner(scope, linears)
                linears[op.y] = op
            value, found = op.infer(scope)
            scope.check(len(value.shape) <= MAX_AXES, f"shape {list(value.shape)} has more than {MAX_AXES} axes")
            scope.check(math.prod(value.shape) < MAX_ELEMENTS, f"shape {list(value.shape)} is too large")
            moved = isinstance(op, Permute | Concat)
            scope.check(moved or value.channels <= MAX_CHANNELS, f"too many channels: {value.channels}, at most {MAX_CHANNELS}")
            for proof in found:
                if not proof.holds:
                    raise FqvitError(
                        f"{op.y}: {proof.what} can reach {proof.bound}, which does not fit {proof.bits} bits."
                        " Lower the bit widths of this site or its weights."
                    )
            buffers[op.y] = value
            proofs.extend(found)
        named, labels = ([getattr(output, part) for output in self.header.outputs] for part in ("buffer", "label"))
        for output in self.header.outputs:
            scope = Scope(buffers, self.constants, "output")
            scope.check(named.count(output.buffer) == 1, f"{output.buffer!r} is listed as an output twice")
            scope.check(not output.name or labels.count(output.name) == 1, f"two outputs have the name {output.name!r}")
            scope.check(output.buffer in buffers, f"no op writes {output.buffer!r}")
            value = output.check(scope)
            if output.kind == "logits" and self.classes is not None and len(self.classes) != value.channels:
                raise FqvitError(f"{len(self.classes)} class names for {value.channels} logits. {DAMAGED}")
        for name, site in self.header.sites.items():
            scope = Scope(buffers, self.constants, f"site {name}")
            scope.check(name in buffers, f"no op writes {name!r}")
            site.check(scope, scope.buffer(name))
        return Verified(buffers, tuple(proofs))

    def check_pixels(self, use: str) -> None:
        """Raise FqvitError for the heads of detectors, which read codes: `use` supports only programs that read pixels."""
        if self.header.input is not None:
            raise FqvitError(f"{self.header.model}: reads codes (part of a detector), which {use} does not support.")

    def unpacked(self) -> Program:
        """Verify the program; return an equivalent one with all weights as i8, so that kernels need not unpack."""
        buffers = self.verify().buffers
        ops, constants = list(self.ops), dict(self.constants)
        for i, op in enumerate(self.ops):
            if _is_packed(op):
                constants[op.part("w")] = op.weights(Scope(buffers, self.constants, op.y))
                for part in op.weight_parts[1:]:
                    constants.pop(op.part(part), None)  # absent if an op with the same weights came before
                ops[i] = msgspec.structs.replace(op, group=0, width=0, codebooks=0)
        return Program(msgspec.structs.replace(self.header, ops=tuple(ops)), constants)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the header's JSON and all constants, in hexadecimal.

        Equal programs have equal fingerprints. A fingerprint detects damage, not tampering: anybody can compute it.
        """
        return fingerprint(encode_header(self.header), self.constants)

    def save(self, path: str | Path) -> None:
        """Verify the program and write it atomically. Raises FqvitError if either fails."""
        from fqvit.ir.file import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Program:
        """Load and validate a .fqvit file. Raises FqvitError if the file is damaged or the program does not verify."""
        from fqvit.ir.file import load

        return load(Path(path))


def version_of(ops: Iterable[AnyOp]) -> int:
    """Return the format version of a program: the first version with all fields of its ops, so that older readers accept it."""
    return 2 if any(isinstance(op, Linear) and (op.width or op.codebooks) for op in ops) else 1


def _is_packed(op: AnyOp) -> TypeGuard[Linear]:
    return isinstance(op, Linear) and op.packed


def encode_header(header: Header) -> bytes:
    """Return the header as JSON."""
    return msgspec.json.encode(plain_header(header))


def plain_header(header: Header) -> dict[str, Any]:
    """Return the header as dicts and lists for JSON, with sorted dict keys."""
    plain: dict[str, Any] = msgspec.to_builtins(header, order="deterministic")
    for site in plain["sites"].values():
        # Sites had seven fields before `steps` and `levels` were added. Omitting these two while they are empty keeps the
        # fingerprints of older files.
        while len(site) > 7 and not site[-1]:
            site.pop()
    return plain


def fingerprint(text: bytes, constants: Mapping[str, Constant]) -> str:
    """Return the SHA-256 of a header's JSON text and of its constants, sorted by name."""
    digest = hashlib.sha256(text)
    for name in sorted(constants):
        array = np.asarray(constants[name], order="C")  # np.ascontiguousarray would turn a 0-d array into a 1-d one
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        shape = ",".join(map(str, array.shape))
        digest.update(f"\n{name} {NAMES[array.dtype]} {shape}\n".encode())
        digest.update(little.tobytes())
    return digest.hexdigest()
