"""`fqvit inspect`: show the contents and size of a .fqvit file, and the proofs that it cannot overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fqvit.cli.output import say, say_json
from fqvit.evaluate.inspect import NAMES, Inspection, ProofRow, SiteRow, bits_of, inspect
from fqvit.ir.file import DETECTOR, kind_of
from fqvit.ir.program import Output, Program
from fqvit.system.text import facts, size, table


def run(file: Path, sites: bool, ops: bool, proofs: bool, as_json: bool) -> None:
    if kind_of(file) == DETECTOR:
        from fqvit.cli.commands import inspect_detector

        inspect_detector.run(file, sites, ops, proofs, as_json)
        return
    program = Program.load(file)
    found = inspect(program, file)
    if as_json:
        result = _summary(program, found, file)
        for wanted, key, rows in ((sites, "sites", found.sites), (ops, "ops", found.ops), (proofs, "proofs", found.proofs)):
            if wanted:
                result[key] = msgspec.to_builtins(rows)
        say_json(result)
        return
    say(_text(program, found, file))
    say_lists(found, sites, ops, proofs)


def say_lists(found: Inspection, sites: bool, ops: bool, proofs: bool, of: str = "") -> None:
    """Print the requested tables of sites, ops and proofs. of: text after each title, such as the part of a detector."""
    if sites:
        say(f"\nSites{of}: {len(found.sites)}")
        say(
            table(
                ("site", "role", "codes", "bits", "scale", "zero", "lowest", "highest"), list(map(_site, found.sites)), left=3
            )
        )
    if ops:
        lines = [(op.y, op.op, ", ".join(op.inputs), op.dtype, _shape(op.shape), f"{op.lo}..{op.hi}") for op in found.ops]
        say(f"\nOps{of}: {len(found.ops)}")
        say(table(("writes", "op", "reads", "type", "shape", "holds"), lines, left=3))
    if proofs:
        say(f"\nProofs{of}: {len(found.proofs)}")
        say(_proofs(found.proofs))


def _summary(program: Program, found: Inspection, file: Path) -> dict[str, Any]:
    header = program.header
    return {
        "file": str(file),
        "version": header.version,
        "model": header.model,
        "source": header.source,
        "recipe": header.recipe,
        "calibration_images": header.images,
        "input": list(program.input_shape),
        "preprocess": msgspec.to_builtins(header.preprocess),
        "output": msgspec.to_builtins(header.output),
        "outputs": [_output(program, output) for output in header.outputs],
        "classes": None if program.classes is None else len(program.classes),
        **counts(found),
        "fingerprint": program.fingerprint(),
    }


def _output(program: Program, output: Output) -> dict[str, Any]:
    """Describe one output for --json, in the same way as fqvit.Engine.outputs."""
    value = program.verify().buffers[output.buffer]
    return {
        "name": output.label,
        "kind": output.kind,
        "dtype": value.dtype,
        "shape": list(value.shape),
        "scale": output.scale,
        "zero": output.zero,
    }


def _output_line(program: Program, output: Output, names: str) -> str:
    value = program.verify().buffers[output.buffer]
    kind = output.label if output.label == output.kind else f"{output.label} ({output.kind})"
    if output.kind == "logits":
        kind += f", {names}"
    zero = f", zero {output.zero}" if output.zero else ""
    return f"{kind}, {value.dtype} {_shape(value.shape)}, scale {output.scale:.6g}{zero}"


def counts(found: Inspection) -> dict[str, Any]:
    """Count the ops, sites, weights, bytes and proofs of a program, for --json."""
    return {
        "op_count": len(found.ops),
        "ops_by_kind": found.op_kinds,
        "site_count": len(found.sites),
        "bytes": found.total,
        "bytes_by_kind": found.bytes,
        "weights_by_bits": found.weights_by_bits,
        "weight_groups": list(found.groups),
        "bits_per_weight": round(found.bits_per_weight, 4),
        "weight_bytes": found.linear,
        "packed_weight_bytes": found.packed,
        "overhead_percent": round(found.overhead, 3),
        "float_ops": found.floats,
        "proof_count": len(found.proofs),
        "tightest": msgspec.to_builtins(found.tightest()),
    }


def _text(program: Program, found: Inspection, file: Path) -> str:
    header, p = program.header, program.header.preprocess
    recipe = header.recipe
    bits = bits_of(recipe)
    names = "without class names" if program.classes is None else f"{len(program.classes)} class names"
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.op_kinds.items())
    rows = [
        ("file", f"{file} (format {header.version})"),
        ("model", header.model),
        ("source", header.source),
        ("recipe", f"{recipe.get('name')} {bits} (weights/activations/attention), {header.images} calibration images"),
        ("input", f"uint8 {_shape(program.input_shape)}, from {p.steps}"),
        *(("output", _output_line(program, output, names)) for output in header.outputs),
        ("ops", f"{len(found.ops)}: {kinds}"),
        ("floats", f"{found.floats} floating-point ops, {found.floats} float buffers"),
        ("weights", _weights(found)),
        *([("packed", _packed(found))] if found.packed else []),
        ("sites", f"{len(found.sites)} quantized, {_site_kinds(found.sites)}"),
        ("fingerprint", program.fingerprint()),
    ]
    weights = max(found.weights, 1)
    inside = {kind: count for kind, count in found.bytes.items() if kind != NAMES}
    sizes = [(kind, f"{count:,}", f"{100 * count / weights:.2f} %") for kind, count in inside.items()]
    sizes.append(("all but weights", f"{found.extra:,}", f"{found.overhead:.2f} %"))
    if found.names:
        sizes.append((f"{NAMES} (not counted above)", f"{found.names:,}", f"{100 * found.names / weights:.2f} %"))
    sizes.append(("file", f"{found.total:,}", size(found.total)))
    return "\n".join(
        (
            facts(rows),
            "",
            table(("part of the file", "bytes", "relative to weights"), sizes),
            "",
            f"No overflow, proved from the weights ({len(found.proofs)} proofs). The tightest proof of each kind:",
            _proofs(found.tightest()),
        )
    )


def _weights(found: Inspection) -> str:
    groups = " or ".join(map(str, found.groups))
    kinds = (("codebooks", "one codebook"), ("weight exponents", "one power of two"))
    shared = " or ".join(text for kind, text in kinds if found.bytes.get(kind))
    per_group = f" (in groups of {groups}: {shared} per group)" if found.groups else ""
    codes = "; ".join(f"{count:,} {bits}-bit codes" for bits, count in found.weights_by_bits.items())
    return f"{codes}{per_group}; {found.bits_per_weight:.2f} bits per weight"


def _packed(found: Inspection) -> str:
    share = 100 * found.packed / max(found.linear, 1)
    return f"{found.packed:,} bytes of packed weights, {share:.0f} % of {found.linear:,} bytes of weights"


def _proofs(rows: list[ProofRow]) -> str:
    cells = [(row.buffer, row.op, row.what, f"{row.bound:,}", f"2^{row.bits}", f"{row.headroom:.1f} bits") for row in rows]
    return table(("buffer", "op", "value", "at most", "limit", "headroom"), cells, left=3)


def _site(row: SiteRow) -> tuple[str, ...]:
    scale = " ".join(f"{scale:.4g}" for scale in row.scale) + (f" x2^0..{row.alpha_max}" if row.alpha_max else "")
    zero = " ".join(map(str, row.zero))
    return (row.site, row.role, row.codes, str(row.bits), scale, zero, f"{row.lowest:.4g}", f"{row.highest:.4g}")


def _site_kinds(rows: list[SiteRow]) -> str:
    kinds: dict[str, int] = {}
    for row in rows:
        key = f"{row.bits}-bit {row.codes}"
        kinds[key] = kinds.get(key, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1]))


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
