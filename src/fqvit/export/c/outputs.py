"""Write the outputs of a program in C: the signature of model_run, the macros of model.h and the copies out of the arena.

For a program with one output, model_run has the signature of version 0.1.0: the output array is int32_t, whatever the type of
the output. With several outputs, model_run takes one pointer per output, in order, to the output's own type; NULL omits it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fqvit.export.c.text import C_TYPES, Arrays, Identifiers, Prefix
from fqvit.ir.program import Output, Program, Verified
from fqvit.runtime.outputs import output_names

UNSAFE = r"[^A-Za-z0-9@:._+-]"  # characters unsafe in comments and string literals; names in files have none


@dataclass(frozen=True)
class COutput:
    """One output: its parameter of model_run and that parameter's C type, its integers per image, and its exponents.

    alpha: the name of the array with one exponent per channel, or None
    """

    output: Output
    name: str
    parameter: str
    type: str
    dtype: str
    shape: tuple[int, ...]
    alpha: str | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class COutputs:
    """The outputs of one program."""

    def __init__(self, program: Program, verified: Verified, arrays: Arrays, prefix: Prefix) -> None:
        outputs, identifier = program.header.outputs, Identifiers()
        self.prefix = prefix
        self.items: list[COutput] = []
        for name, output in zip(output_names(program.header), outputs, strict=True):
            value = verified.buffers[output.buffer]
            # The prefix keeps names apart from keywords of C and C++, such as class.
            parameter, kind = ("output", "int32_t") if len(outputs) == 1 else (f"out_{identifier(name)}", C_TYPES[value.dtype])
            alpha = None if output.alpha is None else arrays.add(output.alpha, program.constants[output.alpha])
            self.items.append(COutput(output, re.sub(UNSAFE, "_", name), parameter, kind, value.dtype, value.shape, alpha))

    @property
    def is_single(self) -> bool:
        return len(self.items) == 1

    def signature(self) -> str:
        """Return the declaration of model_run without the final semicolon."""
        parameters = ", ".join(f"{item.type} *{item.parameter}" for item in self.items)
        return f"void {self.prefix.names}_run(const uint8_t *pixels, uint8_t *arena, {parameters})"

    def copy(self, item: COutput, load: str) -> str:
        """Return the statement that copies an output. load: the C expression of its i-th integer"""
        loop = f"for (uint32_t i = 0; i < {item.size}u; ++i) {item.parameter}[i] ="
        return f"{loop} {load};" if self.is_single else f"if ({item.parameter} != NULL) {loop} ({item.type}){load};"

    def macros(self) -> str:
        """Return the part of model.h that describes the outputs."""
        macro = f"#define {self.prefix.macros}_OUTPUT"
        lines = [f"{macro}_COUNT {len(self.items)}"]
        if self.is_single:
            lines.append(f"{macro}S {self.items[0].size} /* integers of the output */")
        for i, item in enumerate(self.items):
            shape = ", ".join(map(str, item.shape))
            lines += [
                f"/* output {i}: {item.name}, {item.output.kind}, {item.dtype} [{shape}]; {meaning(item)} */",
                f"{macro}_{i}_SIZE {item.size}",
                f"{macro}_{i}_SCALE {item.output.scale!r}",
                f"{macro}_{i}_ZERO {item.output.zero}",
            ]
            if item.alpha is not None:
                lines.append(f"{macro}_{i}_ALPHA {item.alpha} /* uint8_t [{item.shape[-1]}], declared in weights.h */")
        lines.append("/* Expands X(number, C type of the array, number of integers, name) once per output. */")
        each = (f'X({i}, {item.type}, {item.size}, "{item.name}")' for i, item in enumerate(self.items))
        lines.append(f"#define {self.prefix.macros}_EACH_OUTPUT(X) \\\n    " + " \\\n    ".join(each))
        return "\n".join(lines) + "\n"

    def comment(self) -> str:
        """Return the comment above the declaration of model_run, with the default prefix."""
        arrays = "output [FQVIT_OUTPUTS]"
        if not self.is_single:
            arrays = "one array per output, of FQVIT_OUTPUT_0_SIZE integers and so on; NULL for an output that is not needed"
        return (
            f"/* pixels [FQVIT_PIXELS] -> {arrays}.\n * arena [FQVIT_ARENA_BYTES] needs no initialization.\n"
            " * No state is kept: calls with different arenas may run in parallel. */\n"
        )


def meaning(item: COutput) -> str:
    """Return what an integer of an output means."""
    output = item.output
    if output.kind == "signs":
        return "one bit per channel, the first in the most significant bit of a byte; 1 means above 0"
    value = "integer" if item.dtype == "i32" else f"(code - {output.zero})"
    return f"value = {value} * {output.scale:.6g}{'' if item.alpha is None else ' * 2^alpha[channel]'}"
