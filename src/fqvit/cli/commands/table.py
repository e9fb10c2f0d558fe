"""`fqvit table`: compare methods by top-1 accuracy, as in Table 1 of the paper, for any models and bit widths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fqvit.cli.commands import study
from fqvit.cli.options import StudyOptions
from fqvit.distributed.workers import Workers


def run(methods: str | None, bits: str | None, options: StudyOptions, out: Sequence[Path], as_json: bool) -> None:
    from fqvit.study.methods import DEFAULT, parse

    workers = Workers.from_environment()  # first, so that an error of one worker ends all workers
    models = study.named_models(None, options.models, options.weights)
    chosen = parse(DEFAULT if methods is None else methods, bits)
    study.check_outputs(out, options.classes)
    ran = study.run_cells(models, chosen, options, workers, "table")
    from fqvit.study.table import flat, markdown

    study.write_results(ran, [flat(row) for row in ran.rows], markdown(ran.rows), out, as_json)
