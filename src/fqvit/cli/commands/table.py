"""`fqvit table`: the paper's Table 1 for any models, methods and bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fqvit.cli.commands import study
from fqvit.cli.commands.study import Named, Options


def run(
    models: Sequence[Named],
    methods: str | None,
    bits: str | None,
    options: Options,
    out: Sequence[Path],
    as_json: bool,
) -> None:
    from fqvit.study.methods import DEFAULT, parse

    chosen = parse(DEFAULT if methods is None else methods, bits)
    study.check_outputs(out, options)
    ran = study.run_cells(models, chosen, options, "table")
    from fqvit.study.table import flat, markdown

    study.finish(ran, [flat(row) for row in ran.rows], markdown(ran.rows), out, as_json)
