"""`fqvit compare`: list the error of the program and of its simulation per site, worst first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fqvit.cli import inputs
from fqvit.cli.output import say, say_json, warn
from fqvit.errors import FqvitError
from fqvit.ir.program import Program
from fqvit.system.text import table

BATCH = 2  # the float values of all sites are in memory at once


def run(
    file: Path,
    weights: str | None,
    data: Path | None,
    limit: int,
    baseline: Path | None,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    program = Program.load(file)
    header = program.header
    other = None if baseline is None else Program.load(baseline)
    if other is not None and (other.header.model, other.header.preprocess) != (header.model, header.preprocess):
        raise FqvitError(
            f"{baseline}: its model or preprocessing differs from that of {file}. Pass two programs of the same model."
        )
    inputs.require_torch("compare")
    from fqvit.evaluate.compare import Comparer
    from fqvit.models.device import one_thread

    pictures = inputs.unlabelled(data, "--data", header.model, header.preprocess, limit)
    with one_thread():
        model = inputs.model_of_program(header, weights, **settings)
        # Comparer rejects weights with other shapes. Different weights with the same shapes only cause a warning.
        comparers = [Comparer(each, model) for each in (program, other) if each is not None]
        for text in inputs.other_weights(model, header, file):
            warn(text)
        for batch in pictures.batches(BATCH, "comparing"):
            for comparer in comparers:
                comparer.add(batch.images)
    found = comparers[0].result()
    before = comparers[1].result() if baseline is not None else None
    known = {} if before is None else {row.site: row.integer_db for row in before.sites}
    if as_json:
        result = {
            "file": str(file),
            "model": header.model,
            "images": found.images,
            "skipped": pictures.skipped,
            "integer_agreement": found.integer_agreement,
            "simulated_agreement": found.simulated_agreement,
            "sites": msgspec.to_builtins(found.sites),
        }
        if before is not None:
            result |= {"baseline": str(baseline), "baseline_agreement": before.integer_agreement, "baseline_db": known}
        say_json(result)
        return
    rows = []
    for row in found.sites:
        decibels = [row.integer_db, row.simulated_db, row.alone_db]
        if before is not None:
            then = known.get(row.site)
            decibels += [then, None if then is None or row.integer_db is None else row.integer_db - then]
        rows.append((row.site, row.role, str(row.bits), *("-" if value is None else f"{value:.1f}" for value in decibels)))
    say(f"{file} compared with the float model {header.model} on {found.images} images ({pictures.where}).")
    say("Signal-to-noise ratio in dB, worst first: integer program, its float simulation, and the rounding of this site only.")
    heads = ["site", "role", "bits", "integer", "simulated", "rounding"]
    if before is not None:
        say(f"Last two columns: the integer program {baseline}, and the gain over it.")
        heads += ["baseline", "gain"]
    say("\n" + table(heads, rows, left=2))
    if found.integer_agreement is not None:
        said = f"integer {found.integer_agreement:.1f} %, simulated {found.simulated_agreement:.1f} %"
        if before is not None and before.integer_agreement is not None:
            said += f", baseline {before.integer_agreement:.1f} %"
        say(f"\nSame top-1 class as the float model: {said}")
