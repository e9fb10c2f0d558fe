"""`fqvit table`: the paper's Table 1 for any models, methods and bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fqvit.commands import study
from fqvit.commands.study import Options
from fqvit.errors import FqvitError


def run(
    models: Sequence[str],
    methods: str | None,
    bits: str | None,
    images: int | None,
    options: Options,
    out: Sequence[Path],
    as_json: bool,
) -> None:
    from fqvit.study.methods import DEFAULT, parse

    if images is not None and images < 1:
        raise FqvitError(f"--images {images}: expected at least 1.")
    chosen = parse(methods or DEFAULT, bits, images)
    study.check_outputs(out)
    ran = study.run_cells(study.benches(models, options, "table"), chosen)
    from fqvit.study.table import flat, markdown

    study.finish(ran, [flat(row) for row in ran.rows], markdown(ran.rows), out, as_json)
