"""`fqvit compare`: site by site, how far the integer program and its simulation are from the float model, worst first."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fqvit.commands import inputs
from fqvit.commands.output import say, say_json, table, warn
from fqvit.ir.program import Program

BATCH = 2  # the float values of every site of a batch are in memory at once


def run(file: Path, weights: str | None, data: Path | None, limit: int, as_json: bool) -> None:
    program = Program.load(file)
    header = program.header
    inputs.require_torch("compare")
    from fqvit.evaluate.compare import Comparer
    from fqvit.models.device import one_thread

    pictures = inputs.unlabelled(data, "--data", header.model, header.preprocess, limit, BATCH)
    with one_thread():
        model = inputs.float_model(header.model, weights)
        comparer = Comparer(program, model)  # refuses other shapes; other weights of the same are compared, with a warning
        if _hash(model.source) != _hash(header.source):
            warn(f"these weights ({model.source}) are not those that {file} was made from ({header.source}).")
        for batch in pictures.batches(BATCH, "comparing"):
            comparer.add(batch.images)
    found = comparer.result()
    if as_json:
        say_json(
            {
                "file": str(file),
                "model": header.model,
                "images": found.images,
                "skipped": pictures.skipped,
                "integer_agreement": found.integer_agreement,
                "simulated_agreement": found.simulated_agreement,
                "sites": msgspec.to_builtins(found.sites),
            }
        )
        return
    rows = []
    for row in found.sites:
        decibels = (row.integer_db, row.simulated_db, row.alone_db)
        rows.append((row.site, row.role, str(row.bits), *("-" if value is None else f"{value:.1f}" for value in decibels)))
    say(f"{file} against {header.model} in float, {found.images} images ({pictures.where}).")
    say("Signal to noise in dB, worst first: the integer program, its float simulation, and this site's rounding alone.\n")
    say(table(("site", "role", "bits", "integer", "simulated", "alone"), rows, left=2))
    if found.integer_agreement is not None:
        said = f"integer {found.integer_agreement:.1f} %, simulated {found.simulated_agreement:.1f} %"
        say(f"\nSame best class as float: {said}")


def _hash(source: str) -> str:
    return source.rpartition("sha256:")[2]
