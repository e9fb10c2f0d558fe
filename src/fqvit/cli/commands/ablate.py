"""`fqvit ablate`: the paper's Table 3 and Figure 1 for any model: what each part of the method brings, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fqvit.cli.commands import study
from fqvit.cli.commands.study import Named, Options


def run(models: Sequence[Named], options: Options, out: Sequence[Path], as_json: bool) -> None:
    from fqvit.study.ablation import markdown, rows, settings

    study.check_outputs(out, options, drawn=True)
    ran = study.run_cells(models, [setting.method for setting in settings()], options, "ablate")
    from fqvit.study.figure1 import draw

    told = rows(ran.rows, ran.configs)
    study.finish(ran, told, markdown(ran.rows, told), out, as_json, lambda: draw(ran.rows))
