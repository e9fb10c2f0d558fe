"""`fqvit sweep-k`: measure accuracy for each K, the largest exponent of the Power-of-Two Factor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fqvit.cli.commands import study
from fqvit.cli.options import StudyOptions
from fqvit.distributed.workers import Workers
from fqvit.errors import FqvitError
from fqvit.quant.recipe import load_recipe


def run(model: str | None, recipe_name: str, largest: int, options: StudyOptions, out: Sequence[Path], as_json: bool) -> None:
    from fqvit.study.methods import sweep

    workers = Workers.from_environment()  # first, so that an error of one worker ends all workers
    models = study.named_models(model, options.models, options.weights)
    recipe = load_recipe(recipe_name)
    if not 0 <= largest <= 8:
        raise FqvitError(f"--largest {largest}: expected 0 to 8.")
    if recipe.residual != "ptf":
        raise FqvitError(f"recipe {recipe.name}: has no Power-of-Two Factor, so K has no effect. Use fq-vit.")
    study.check_outputs(out, options.classes, svg=True)
    ran = study.run_cells(models, sweep(recipe, largest), options, workers, "sweep-k")
    from fqvit.study.sweep import draw, markdown, rows

    study.write_results(ran, rows(ran.rows), markdown(ran.rows), out, as_json, lambda: draw(ran.rows))
