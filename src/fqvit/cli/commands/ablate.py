"""`fqvit ablate`: measure what each part of the method gains and costs, as in Table 3 and Figure 1 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fqvit.cli.commands import study
from fqvit.cli.options import StudyOptions
from fqvit.distributed.workers import Workers


def run(model: str | None, options: StudyOptions, out: Sequence[Path], as_json: bool) -> None:
    from fqvit.study.ablation import markdown, rows, settings

    workers = Workers.from_environment()  # first, so that an error of one worker ends all workers
    models = study.named_models(model, options.models, options.weights)
    study.check_outputs(out, options.classes, svg=True)
    ran = study.run_cells(models, [setting.method for setting in settings()], options, workers, "ablate")
    from fqvit.study.figure1 import draw

    result = rows(ran.rows, ran.layers)
    study.write_results(ran, result, markdown(ran.rows, result), out, as_json, lambda: draw(ran.rows))
