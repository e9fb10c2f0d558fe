"""Run the cells of `table`, `ablate` and `sweep-k` one after the other, and write the results.

A cell is one method on one model. A cell that fails does not stop the others; it is reported at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fqvit.cli import inputs
from fqvit.cli.options import StudyOptions
from fqvit.cli.output import say, say_json, warn
from fqvit.distributed.workers import Workers
from fqvit.errors import FqvitError
from fqvit.models import embedded
from fqvit.models.locate import CHECKPOINTS

if TYPE_CHECKING:
    from fqvit.models.load import FloatModel
    from fqvit.study.bitops import Layer
    from fqvit.study.cells import Bench
    from fqvit.study.methods import Method
    from fqvit.study.table import Row

SUFFIXES = (".md", ".csv", ".json")


@dataclass(frozen=True)
class ModelArgument:
    """A model given on the command line: a name, a checkpoint, or both."""

    name: str | None
    weights: str | None


def named_models(model: str | None, models: Sequence[str] | None, weights: str | None) -> list[ModelArgument]:
    """Parse MODEL with --weights, or --models with items NAME, NAME=FILE, NAME=hf:ORG/NAME, hf:ORG/NAME or FILE.

    The model of a FILE without a NAME is recognized from the file name, from config.json or from the weights.
    """
    words = [word for given in models or () for word in given.split(",") if word]
    found = [_named(word) for word in (*([model] if model is not None else []), *words)]
    if models and not words:
        raise FqvitError("--models: empty, expected names separated by commas, such as deit_tiny=FILE,fmnist_vit.")
    if weights is None:
        return found
    if len(found) > 1 or (found and found[0].weights is not None):
        raise FqvitError(
            f"--weights {weights}: expected one model name without a checkpoint. Use --models NAME=FILE,... instead."
        )
    return [ModelArgument(found[0].name if found else None, weights)]


def _named(word: str) -> ModelArgument:
    name, equals, weights = word.partition("=")
    if equals and weights:
        return ModelArgument(name, weights)
    if word.startswith("hf:") or "/" in word or Path(word).suffix in CHECKPOINTS:
        return ModelArgument(None, word)
    return ModelArgument(word, None)


def benches(models: Sequence[ModelArgument], options: StudyOptions, workers: Workers, command: str) -> Iterator[Bench]:
    """Yield one Bench per model, so that only one model is in memory at a time."""
    if options.images is not None and options.images < 1:
        raise FqvitError(f"--images {options.images}: expected at least 1.")
    _check_models(models)
    inputs.require_torch(command)
    given = inputs.read_classes(options.classes)
    from fqvit.models.device import device_of
    from fqvit.study.cells import Bench, Cache

    device_of(options.device)
    cache = Cache(options.cache or default_cache(), options.fresh, workers)
    inputs.warn_of_different_machines(workers)
    reported: set[str] = set()  # unreadable images are reported once, not by every cell
    for named in models or [ModelArgument(model, None) for model in embedded.MODELS]:
        model = inputs.float_model(named.name, named.weights)
        if workers.first:
            inputs.warn_of_other_name(model, named.weights)
        ids = [] if given is None else given.ids
        count = inputs.classes_of(model)
        names = given.names if given is not None else model.classes or count
        if not isinstance(names, int) and len(names) != count:
            raise FqvitError(f"{options.classes}: {len(names)} classes, but {model.name} has {count}. Pass one name per logit.")
        data = inputs.labelled(options.data, model.name, model.preprocess, names, ids, options.limit, workers)
        data = replace(data, reported=reported)

        def calib(limit: int, model: FloatModel = model) -> inputs.Images:
            found = inputs.unlabelled(options.calib, "--calib", model.name, model.preprocess, limit, workers)
            return replace(found, reported=reported)

        calib(1)  # a missing folder must be reported before an hour of work
        yield Bench(model, calib, data, cache, options.device)


def _check_models(models: Sequence[ModelArgument]) -> None:
    """Check all models before the first one runs: known names, no duplicates, and existing weights."""
    seen: set[str] = set()
    for named in models:
        row = inputs.row_of(named.name, named.weights)
        if row is None:  # not in the zoo, or known only once its checkpoint is read
            _check_weights(named.weights, "the model")
            continue
        if row.name in seen:
            raise FqvitError(f"--models: {row.name} is given twice, expected once. Run one table per checkpoint.")
        seen.add(row.name)
        if named.weights is None and not row.embedded:
            raise FqvitError(f"{row.name}: no weights given. Pass a checkpoint file (--models {row.name}=FILE) or hf:ORG/NAME.")
        _check_weights(named.weights, row.name)


def _check_weights(weights: str | None, model: str) -> None:
    if weights is not None and not weights.startswith("hf:") and not Path(weights).exists():
        raise FqvitError(f"{weights}: no such file. Pass a checkpoint of {model}, or hf:ORG/NAME.")


def default_cache() -> Path:
    """Return the default folder for finished cells, in the user's cache folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fqvit" / "cells"
    except RuntimeError:  # a user without an entry in the password database, as in some containers
        raise FqvitError("cache: no home folder for finished cells. Choose a folder (--cache DIR).") from None


@dataclass
class CellCounts:
    """The outcome of the cells of a table. failed: one message per failed cell. reused: number of cells from the cache."""

    failed: list[str] = field(default_factory=list)
    reused: int = 0


@dataclass
class StudyResults(CellCounts):
    """Results of all cells. rows: finished cells. layers: the layers of each model, for counting its bit operations"""

    rows: list[Row] = field(default_factory=list)
    layers: dict[str, list[Layer]] = field(default_factory=dict)


def run_cells(
    models: Sequence[ModelArgument], methods: Sequence[Method], options: StudyOptions, workers: Workers, command: str
) -> StudyResults:
    """Run the float model and every method on every model."""
    from fqvit.study.cells import CacheError
    from fqvit.study.graph_layers import layers_of_model
    from fqvit.study.methods import FLOAT, with_images
    from fqvit.study.table import row

    ran = StudyResults()
    if options.images is not None:
        methods = [with_images(method, options.images) for method in methods]
    for bench in benches(models, options, workers, command):
        ran.layers[bench.model.name] = layers_of_model(bench.model)
        float_result, reused = bench.result(FLOAT)
        ran.rows.append(row(bench.model.name, FLOAT, float_result, float_result))
        ran.reused += reused
        for method in methods:
            try:
                result, reused = bench.result(method)
                found = row(bench.model.name, method, result, float_result)
            except FqvitError as error:
                if workers.size > 1 or isinstance(error, CacheError):
                    raise  # other workers would wait for this one, and a broken cache stops every cell
                ran.failed.append(f"{bench.model.name} {method.label}: {error}")
                continue
            ran.rows.append(found)
            ran.reused += reused
    return ran


def check_outputs(paths: Sequence[Path], *read: str | Path | None, svg: bool = False) -> None:
    """Check before any work that the results can be written.

    read: files that the command reads, which must not be replaced   svg: whether the command can draw results as .svg
    """
    for path in paths:
        kinds = (*SUFFIXES, ".svg") if svg else SUFFIXES
        if path.suffix not in kinds:
            raise FqvitError(f"{path}: unknown suffix, expected {', '.join(kinds[:-1])} or {kinds[-1]}. Choose another name.")
        inputs.check_output(path, *read)


def write_results(
    ran: CellCounts,
    rows: Sequence[Mapping[str, object]],
    markdown: str,
    out: Sequence[Path],
    as_json: bool,
    draw_svg: Callable[[], str] | None = None,
) -> None:
    """Write and print the results. Cells that failed become warnings; the last one becomes the FqvitError of the command.

    rows: for .csv, .json and --json   markdown: the table for .md and stdout   draw_svg: returns the chart for .svg
    """
    if not Workers.from_environment().first:
        return
    from fqvit.study.table import as_csv
    from fqvit.system.files import write_atomically

    result = {"rows": rows, "reused": ran.reused, "failed": ran.failed}
    texts = {".md": lambda: markdown, ".csv": lambda: as_csv(rows), ".json": lambda: json.dumps(result, indent=1) + "\n"}
    if draw_svg is not None:
        texts[".svg"] = draw_svg
    for path in out:
        text = texts[path.suffix]()
        write_atomically(path, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    if as_json:
        say_json(result)
    else:
        say(markdown.rstrip())
    for failure in ran.failed[:-1]:
        warn(failure)
    if ran.failed:
        count = "1 cell" if len(ran.failed) == 1 else f"{len(ran.failed)} cells"
        raise FqvitError(f"{count} failed. {ran.failed[-1]}")
