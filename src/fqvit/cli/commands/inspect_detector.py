"""`fqvit inspect` of a detector: show its parts, its overflow proofs, and the steps that are not integer-only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fqvit.cli.commands.inspect import counts, say_lists
from fqvit.cli.output import say, say_json
from fqvit.detect.fixed.constants import SCORE_FRACTION
from fqvit.detect.program import DetectorProgram
from fqvit.evaluate.inspect import Inspection, bits_of, inspect_part
from fqvit.system.text import facts, size, table

OUTSIDE = "decoding of image files (Pillow), and conversion of integer results to pixels and scores"
OUTSIDE_OPENCV = OUTSIDE.replace(", and", ", interpolation weights of resizing (float32, as in OpenCV), and")
RESIZES = {"rounded": "bilinear, rounded once", "opencv": "bilinear, bit-exact with OpenCV"}


def run(file: Path, sites: bool, ops: bool, proofs: bool, as_json: bool) -> None:
    detector = DetectorProgram.load(file)
    parts = {name: inspect_part(program) for name, program in detector.parts()}
    if as_json:
        say_json(_summary(detector, parts, file, {"sites": sites, "ops": ops, "proofs": proofs}))
        return
    say(_text(detector, parts, file))
    for name, found in parts.items():
        say_lists(found, sites, ops, proofs, f" of {name}")


def _summary(d: DetectorProgram, parts: dict[str, Inspection], file: Path, wanted: dict[str, bool]) -> dict[str, Any]:
    header = d.pyramid.header
    return {
        "file": str(file),
        "version": d.header.version,
        "kind": "detector",
        "model": d.model,
        "source": d.source,
        "recipe": header.recipe,
        "calibration_images": header.images,
        "stages": d.stages,
        "classes": d.classes,
        "settings": msgspec.to_builtins(d.settings),
        "resize": d.resize,
        "bytes": file.stat().st_size,
        "float_ops": sum(found.floats for found in parts.values()),
        "outside": _outside(d),
        "fingerprint": d.fingerprint(),
        "between": _between(d),
        "parts": {name: _part(found, wanted) for name, found in parts.items()},
    }


def _outside(d: DetectorProgram) -> str:
    return OUTSIDE_OPENCV if d.resize == "opencv" else OUTSIDE


def _between(d: DetectorProgram) -> list[dict[str, Any]]:
    """Return the overflow proofs of the integer steps between the parts."""
    return [{"step": proof.buffer, "what": proof.what, "bound": proof.bound, "bits": proof.bits} for proof in d.between.check()]


def _part(found: Inspection, wanted: dict[str, bool]) -> dict[str, Any]:
    rows: dict[str, Sequence[msgspec.Struct]] = {"sites": found.sites, "ops": found.ops, "proofs": found.proofs}
    return {
        **counts(found),
        **{key: [msgspec.to_builtins(row) for row in rows[key]] for key, asked in wanted.items() if asked},
    }


def _text(d: DetectorProgram, parts: dict[str, Inspection], file: Path) -> str:
    header, s, b = d.pyramid.header, d.settings, d.between
    bits = bits_of(header.recipe)
    names = "with names" if s.classes else "without names"
    floats = sum(found.floats for found in parts.values())
    rows = [
        ("file", f"{file}, {size(file.stat().st_size)} (detector, format {d.header.version})"),
        ("model", f"{d.model}, {'1 stage' if d.stages == 1 else f'{d.stages} stages'}, {d.classes} classes {names}"),
        ("source", d.source),
        ("recipe", f"{header.recipe.get('name')} {bits} (weights/activations/attention), {header.images} calibration images"),
        ("input", f"images of any size, resized to {s.short} x {s.long} at most, sides padded to multiples of 32"),
        ("resize", RESIZES[d.resize]),
        ("output", f"at most {b.detections} boxes with class, score and mask; scores above {b.score / 2**SCORE_FRACTION:.6g}"),
        ("floats", f"{floats} floating-point ops, {floats} float buffers"),
        ("outside", _outside(d)),
        ("fingerprint", d.fingerprint()),
    ]
    lines = [
        (
            name,
            str(len(found.ops)),
            str(len(found.sites)),
            f"{sum(found.weights_by_bits.values()):,}",
            f"{found.total:,}",
            str(len(found.proofs)),
            f"{found.tightest()[0].headroom:.1f} bits" if found.proofs else "-",
        )
        for name, found in parts.items()
    ]
    head = ("part", "ops", "sites", "weights", "bytes", "proofs", "least headroom")
    steps = [
        (proof.buffer, proof.what, f"{proof.bound:,}", f"2^{proof.bits}", f"{proof.bits - math.log2(proof.bound):.1f} bits")
        for proof in d.between.check()
    ]
    return "\n".join(
        (
            facts(rows),
            "",
            table(head, lines),
            "",
            "No overflow: proved for each part from its weights; --proofs lists the proofs. Between the parts:",
            table(("step", "value", "at most", "limit", "headroom"), steps, left=2),
        )
    )
