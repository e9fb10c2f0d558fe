"""Write the text of model.h and model.c: one struct per op and one function per stage of the plan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fqvit.export.c.ops import Structs
from fqvit.export.c.outputs import COutputs
from fqvit.export.c.plan import BYTES, Plan, Stage, row_bytes, rows_of
from fqvit.export.c.text import Arrays, Identifiers, Prefix, comment
from fqvit.ir.attention import Attend, LogSoftmax, MatMul, RowCodes, ShiftMatMul, Softmax
from fqvit.ir.elementwise import Depthwise, Max, Multiply, Rotary
from fqvit.ir.moves import Concat, Permute, Take
from fqvit.ir.ops import Add, Mean
from fqvit.ir.program import INPUT, AnyOp, Output, Program, Verified
from fqvit.ir.value import NAMES


class CEmitter:
    """Writes the code of one program. code() collects the program's constants in `arrays`."""

    def __init__(self, program: Program, verified: Verified, plan: Plan, prefix: Prefix) -> None:
        self.program, self.values, self.plan, self.prefix = program, verified.buffers, plan, prefix
        self.identifier = Identifiers()  # for buffers and the ops that write them
        self.arrays = Arrays(Identifiers(), prefix)
        self.structs = Structs(program, verified, self.arrays)
        self.outputs = COutputs(program, verified, self.arrays, prefix)

    def code(self) -> str:
        """Return the text of model.c."""
        stages = [self.stage(i, stage) for i, stage in enumerate(self.plan.stages)]
        runs = "".join(f"    {line}\n" for line in self.run_lines(stages))
        structs = "".join(self.struct(op) for stage in self.plan.stages for op in stage.ops if not isinstance(op, Concat))
        return (
            '#include "model.h"\n\n#include "fqvit_ops.h"\n#include "weights.h"\n\n'
            "/* ---- offsets of buffers in the arena; some buffers hold only one row or slice at a time ---- */\n"
            f"{''.join(self.offsets())}\n/* ---- the ops and their constants ---- */\n\n{structs}"
            f"/* ---- stages: each runs all its ops for row 0, then for row 1, and so on ---- */\n\n{''.join(stages)}"
            f"{self.outputs.signature()}\n{{\n{runs}}}\n"
        )

    def run_lines(self, stages: list[str]) -> Iterator[str]:
        """Yield the statements of model_run: the stages, and a copy of every output after the stage that writes it."""
        waiting = [(self.plan.root(output.buffer), copy) for output, copy in self.output_copies()]
        yield from (copy for root, copy in waiting if root == INPUT)
        for i, (stage, text) in enumerate(zip(self.plan.stages, stages, strict=True)):
            yield f"stage_{i}({'pixels, ' if 'const uint8_t *pixels' in text else ''}arena);"
            written = {op.y for op in stage.ops}
            yield from (copy for root, copy in waiting if root in written)
        if not self.plan.allocations:
            yield "(void)arena;"

    def output_copies(self) -> Iterator[tuple[Output, str]]:
        """Yield every output with the statement that copies it from the arena to the caller's array."""
        for item in self.outputs.items:
            name = item.output.buffer
            load = f"fqvit_load({self.pointer(self.plan.root(name))}, {self.structs.type(name)}, i)"
            yield item.output, self.outputs.copy(item, load)

    def offsets(self) -> Iterator[str]:
        for stage in self.plan.stages:
            for op in stage.ops:
                memory, value = self.plan.allocations[op.y], self.values[op.y]
                part = "" if memory.kind == "whole" else f", one {memory.kind} of {memory.bytes} bytes"
                note = f"{value.dtype} {list(value.shape)}{part}"
                yield f"#define AT_{self.identifier(op.y)} {memory.offset}u /* {note} */\n"

    def struct(self, op: AnyOp) -> str:
        kind, fields = self.structs.of(op)
        reads = ", ".join(f"{name} {list(self.values[name].shape)}" for name in op.inputs() if name in self.values)
        value = self.values[op.y]
        tag = op.__struct_config__.tag
        lines = "".join(f"    .{name} = {value},\n" for name, value in fields.items())
        head = comment(f"{op.y}: {tag} of {reads} -> {value.dtype} {list(value.shape)}")
        return f"/* {head} */\nstatic const fqvit_{kind}_op op_{self.identifier(op.y)} = {{\n{lines}}};\n\n"

    def stage(self, number: int, stage: Stage) -> str:
        if isinstance(stage.ops[0], Concat):
            body = "".join(f"    {line}\n" for line in self.concat(stage.ops[0]))
        elif stage.rows == 1:
            body = "".join(f"    {line}\n" for op in stage.ops for line in self.calls(op, "0"))
        else:
            lines = "".join(f"        {line}\n" for op in stage.ops for line in self.calls(op, "row"))
            body = f"    for (uint32_t row = 0; row < {stage.rows}; ++row) {{\n{lines}    }}\n"
        if all(line.lstrip().startswith("/*") for line in body.splitlines()):
            body += "    (void)arena;\n"  # all parts of a concat are in place: avoid a warning about the unused parameter
        code = re.sub(r"/\*.*?\*/", "", body)  # names in comments may contain any word
        pixels = "const uint8_t *pixels, " if re.search(r"\bpixels\b", code) else ""
        first, last = stage.ops[0].y, stage.ops[-1].y
        what = comment(f"{first} .. {last}" if first != last else first)
        return f"/* {what} */\nstatic void stage_{number}({pixels}uint8_t *arena)\n{{\n{body}}}\n\n"

    def calls(self, op: AnyOp, row: str) -> Iterator[str]:
        """Yield the calls that compute one row of the buffer that op writes."""
        call = f"fqvit_{op.__struct_config__.tag}(&op_{self.identifier(op.y)}"
        y = self.row_pointer(op.y, row)
        if isinstance(op, Permute):
            x = self.pointer(self.plan.root(op.x))
            if op.y in self.plan.sliced:
                yield from self.slice_calls(op, f"{call}, {x}, {self.pointer(op.y)}", row)
            else:
                count = self.values[op.y].channels
                yield f"{call}, {x}, {y}, {times(row, count)}, {count}u);"
        elif isinstance(op, Take | Depthwise):
            yield f"{call}, {self.pointer(self.plan.root(op.x))}, {y}, {row});"
        elif isinstance(op, MatMul | ShiftMatMul | Attend):
            first, second = op.inputs()
            last = f", {row}" if isinstance(op, MatMul) else ""
            rows = self.values[op.y].shape[-2]
            yield f"{call}, {self.row_pointer(first, row)}, {self.slice_pointer(second, row, rows)}, {y}{last});"
        elif isinstance(op, Add):
            terms = [self.row_pointer(term.x, row) if term.x in self.values else "NULL" for term in op.terms]
            yield f"{call}, {', '.join(terms)}, {y}, {row});"
        elif isinstance(op, Mean | Max):
            rows, channels = self.values[op.x].shape[-2:]
            first = times(row, rows * channels * BYTES[self.values[op.x].dtype])
            x = self.pointer(self.plan.root(op.x))
            yield f"{call}, {x if first == '0' else f'{x} + {first}'}, {y});"
        elif isinstance(op, Multiply):
            b = self.repeated_pointer(op.b, row, rows_of(self.values[op.y]))
            yield f"{call}, {self.row_pointer(op.a, row)}, {b}, {y});"
        elif isinstance(op, LogSoftmax | Softmax | RowCodes | Rotary):
            yield f"{call}, {self.row_pointer(op.x, row)}, {y}, {row});"
        else:
            (x,) = op.inputs()
            yield f"{call}, {self.row_pointer(x, row)}, {y});"

    def slice_calls(self, op: Permute, call: str, row: str) -> Iterator[str]:
        """Yield the call that permutes K or V of one head. It runs only for the first row of that head."""
        reader = next(r for stage in self.plan.stages for r in stage.ops if self.plan.root(r.inputs()[-1]) == op.y)
        rows = self.values[reader.y].shape[-2]
        count = math.prod(self.values[reader.inputs()[-1]].shape[-2:])
        first = "0" if row == "0" else f"row / {rows}u * {count}u"
        condition = "" if row == "0" else f"if (row % {rows}u == 0) "
        yield f"{condition}{call}, {first}, {count}u);"

    def slice_pointer(self, name: str, row: str, rows: int) -> str:
        root = self.plan.root(name)
        value = self.values[name]
        if root in self.plan.sliced or row == "0":
            return self.pointer(root)
        return f"{self.pointer(root)} + row / {rows}u * {math.prod(value.shape[-2:]) * BYTES[value.dtype]}u"

    def pointer(self, root: str) -> str:
        """Return a C pointer to a buffer, or to its only row or slice that is kept in memory."""
        return "pixels" if root == INPUT else f"arena + AT_{self.identifier(root)}"

    def row_pointer(self, name: str, row: str) -> str:
        """Return a C pointer to a row of a buffer."""
        root, value = self.plan.root(name), self.values[name]
        whole = root == INPUT or self.plan.allocations[root].kind == "whole"
        if not whole or row == "0" or rows_of(value) == 1:
            return self.pointer(root)
        return f"{self.pointer(root)} + {times(row, row_bytes(value))}"

    def repeated_pointer(self, name: str, row: str, rows: int) -> str:
        """Return a C pointer to a row of a buffer whose rows repeat until there are `rows` of them."""
        own = rows_of(self.values[name])
        return self.row_pointer(name, row if own in (1, rows) else f"(row % {own}u)")

    def concat(self, op: Concat) -> Iterator[str]:
        offset = 0
        for name in op.xs:
            to = f"{self.pointer(op.y)} + {offset}u"
            if name not in self.values:
                x = self.program.constants[name]
                kind = f"FQVIT_{NAMES[x.dtype].upper()}"
                yield f"fqvit_copy_constant({self.arrays.add(name, x)}, {kind}, {x.size}u, {to}); /* {comment(name)} */"
                offset += x.nbytes
                continue
            size = rows_of(self.values[name]) * row_bytes(self.values[name])
            if self.plan.root(name) in self.plan.concat_offsets:
                yield f"/* {comment(name)} is already at byte {offset} */"
            else:
                yield f"fqvit_copy({self.pointer(self.plan.root(name))}, {size}u, {to});"
            offset += size

    def header(self) -> str:
        """Return the text of model.h. Call code() first, which collects the constants."""
        height, width, channels = self.program.input_shape
        sizes = (
            "#ifndef FQVIT_MODEL_H\n#define FQVIT_MODEL_H\n\n#include <stdint.h>\n\n"
            f"#define FQVIT_HEIGHT {height}\n#define FQVIT_WIDTH {width}\n#define FQVIT_CHANNELS {channels}\n"
            f"#define FQVIT_PIXELS {height * width * channels} /* bytes per image: rows of pixels, channels interleaved */\n"
            f"#define FQVIT_ARENA_BYTES {self.plan.arena_bytes} /* working memory of one run */\n"
            f"#define FQVIT_CONSTANT_BYTES {self.arrays.bytes} /* weights and tables, read-only */\n\n"
        )
        outputs, comment = self.outputs.macros(), self.prefix.apply(self.outputs.comment())
        return f"{self.prefix.apply(sizes)}{outputs}\n{comment}{self.outputs.signature()};\n\n#endif\n"


def times(row: str, size: int) -> str:
    return "0" if row == "0" else row if size == 1 else f"{row} * {size}u"
