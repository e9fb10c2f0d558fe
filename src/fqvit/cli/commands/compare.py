"""`fqvit compare`: list the errors of a program and its simulation per site, and cosine similarities of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fqvit.cli import inputs
from fqvit.cli.commands.detectors import refuse_settings
from fqvit.cli.output import say, say_json, warn
from fqvit.errors import FqvitError
from fqvit.ir.file import DETECTOR, kind_of
from fqvit.ir.program import Program
from fqvit.system.text import table

if TYPE_CHECKING:
    from fqvit.evaluate.compare import Comparison
    from fqvit.evaluate.similarity import OutputSimilarity

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
    if kind_of(file) == DETECTOR:
        from fqvit.cli.commands import compare_detector

        refuse_settings(settings)
        compare_detector.run(file, weights, data, limit, baseline, as_json)
        return
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
                comparer.add(batch.images, batch.paths)
    found = comparers[0].result()
    before = comparers[1].result() if baseline is not None else None
    if as_json:
        result = {"file": str(file), "model": header.model, "images": found.images, "skipped": pictures.skipped}
        result |= _summary(found)
        if before is not None:
            result |= {"baseline": str(baseline)} | _summary_of_baseline(before)
        say_json(result)
        return
    say(f"{file} compared with the float model {header.model} on {found.images} images ({pictures.where}).")
    say("Signal-to-noise ratio in dB, worst first: integer program, its float simulation, rounding of the site alone.")
    if found.outputs:
        say("cosine: cosine similarity of float and integer vectors, mean over all tokens and images.")
    if before is not None:
        say(f"Last two columns: the integer program {baseline}, and the gain over it.")
    say("\n" + site_table(found, before))
    if found.outputs:
        say("\nCosine similarity to the float model per image, and percentage of images with the same nearest neighbour:")
        say(_outputs(found.outputs, None if before is None else before.outputs, pictures.where))
    if found.integer_agreement is not None:
        said = f"integer {found.integer_agreement:.1f} %, simulated {found.simulated_agreement:.1f} %"
        if before is not None and before.integer_agreement is not None:
            said += f", baseline {before.integer_agreement:.1f} %"
        say(f"\nSame top-1 class as the float model: {said}")


def _summary(found: Comparison) -> dict[str, Any]:
    result: dict[str, Any] = {
        "integer_agreement": found.integer_agreement,
        "simulated_agreement": found.simulated_agreement,
        "sites": msgspec.to_builtins(found.sites),
    }
    return result | ({"outputs": msgspec.to_builtins(found.outputs)} if found.outputs else {})


def _summary_of_baseline(before: Comparison) -> dict[str, Any]:
    result: dict[str, Any] = {
        "baseline_agreement": before.integer_agreement,
        "baseline_db": {row.site: row.integer_db for row in before.sites},
    }
    return result | ({"baseline_outputs": msgspec.to_builtins(before.outputs)} if before.outputs else {})


def site_table(found: Comparison, before: Comparison | None) -> str:
    """Return the table of sites."""
    known = {} if before is None else {row.site: row.integer_db for row in before.sites}
    heads = ["site", "role", "bits", "integer", "simulated", "rounding"]
    heads += ["cosine"] if found.outputs else []
    heads += ["baseline", "gain"] if before is not None else []
    rows = []
    for row in found.sites:
        cells = [_decibels(value) for value in (row.integer_db, row.simulated_db, row.alone_db)]
        if found.outputs:
            cells.append("-" if row.cosine is None else f"{row.cosine:.5f}")
        if before is not None:
            then = known.get(row.site)
            cells += map(_decibels, (then, None if then is None or row.integer_db is None else row.integer_db - then))
        rows.append((row.site, row.role, str(row.bits), *cells))
    return table(heads, rows, left=2)


def _decibels(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _outputs(found: Sequence[OutputSimilarity], before: Sequence[OutputSimilarity] | None, where: str) -> str:
    """Return the table of outputs."""
    known = {row.name: row for row in before or ()}
    heads = ["output", "worst image", "mean", "first percentile", "worst", "neighbours"]
    heads += ["baseline mean"] if before is not None else []
    rows = []
    for row in found:
        same = "-" if row.neighbour_agreement is None else f"{row.neighbour_agreement:.1f} %"
        cells = [*(f"{value:.5f}" for value in (row.mean_cosine, row.first_percentile, row.worst)), same]
        if before is not None:
            cells.append(f"{known[row.name].mean_cosine:.5f}" if row.name in known else "-")
        rows.append((row.name, inputs.relative(row.worst_image, where), *cells))
    return table(heads, rows, left=2)
