"""`fqvit report`: write an HTML report about a program, with figures, and print a summary."""

from __future__ import annotations

import datetime
import importlib.util
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fqvit.cli import inputs
from fqvit.cli.commands.detectors import refuse_settings
from fqvit.cli.output import say, say_json, warn
from fqvit.errors import FqvitError
from fqvit.ir.file import DETECTOR, kind_of
from fqvit.ir.program import Program
from fqvit.report.data import entropy, used
from fqvit.report.pareto import NOTHING, read_rows
from fqvit.system.files import write_atomically
from fqvit.system.progress import track
from fqvit.system.text import facts, size

if TYPE_CHECKING:
    from fqvit.report.gather import Report

LIMIT = 1000
EXTRAS = {"torch": "quantize", "jinja2": "report"}  # required packages, and the extra of fqvit that installs each


def run(
    file: Path,
    weights: str | None,
    data: Path | None,
    classes: Path | None,
    limit: int | None,
    out: Path | None,
    pictures: Path | None,
    measured: Path | None,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    if kind_of(file) == DETECTOR:
        from fqvit.cli.commands import report_detector

        refuse_settings(settings)
        report_detector.run(file, weights, data, classes, limit, out, pictures, measured, as_json)
        return
    program = Program.load(file)
    rows = NOTHING if measured is None else read_rows(measured, program.header.model)
    if measured is not None and not rows[0]:
        raise FqvitError(f"{measured}: has no row for an integer program of {program.header.model}. Leave out --table.")
    target = checked_target(file, out, pictures, weights, classes)
    from fqvit.report.frame import About
    from fqvit.report.gather import BATCH, gather
    from fqvit.report.page import pictures_of as drawn
    from fqvit.report.page import render

    names, ids = _names(program, classes, file)
    images, warnings = _images(program, data, names, ids, LIMIT if limit is None else limit)
    model = inputs.model_of_program(program.header, weights, **settings)
    warnings += inputs.other_weights(model, program.header, file)
    for text in warnings:
        warn(text)
    found = gather(program, file, model, images.batches(BATCH, "float and integer"), len(images.source), track)
    for text in found.notes:
        warn(text)
    options = {
        "--weights": weights,
        "--data": data,
        "--classes": classes,
        "--limit": limit,
        "-o": target,
        "--pictures": pictures,
        "--table": measured,
        **{f"--{name}": value for name, value in settings.items()},
    }
    about = About(
        command=command_line(file, options),
        file=str(file),
        where=images.where,
        date=now(),
        names=names,
        warnings=[*warnings, *found.notes],
        skipped=images.skipped,
        measured=rows,
    )
    figures = [] if pictures is None else drawn(found, names, rows)
    written = write(target, render(found, about), pictures, figures)
    if as_json:
        say_json(summary(found) | {"file": str(file)} | written.summary() | {"skipped": images.skipped})
        return
    say(_text(found, images.where))
    say(f"\n{written.text()}")


def checked_target(file: Path, out: Path | None, pictures: Path | None, *read: Path | str | None) -> Path:
    """Return the output file. Raises FqvitError if it or the figures cannot be written, or if a package is not installed.

    read: the other inputs of the command
    """
    target = out or Path(f"{file.stem}.html")
    inputs.check_output(target, file, *read)
    if pictures is not None:
        inputs.check_folder(pictures, "--pictures")
    _check_packages()
    return target


def _check_packages() -> None:
    """Raise FqvitError with the names of all required packages that are not installed."""
    missing = [package for package in EXTRAS if importlib.util.find_spec(package) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        extras = ",".join(EXTRAS[package] for package in missing)
        said = f"report: needs {' and '.join(missing)}, which {are} not installed"
        raise FqvitError(f"{said}. Run `pip install 'fqvit[{extras}]'`.")


def _names(program: Program, classes: Path | None, file: Path) -> tuple[tuple[str, ...], list[str]]:
    """Return class names (empty if unknown) and ids, from --classes or from the program."""
    given = inputs.read_classes(classes)
    if given is None:
        return program.classes or (), []
    count = _class_count(program)
    if count is not None and len(given.names) != count:
        raise FqvitError(f"{classes}: {len(given.names)} classes, but {file} has {count}. Pass one name per logit.")
    return tuple(given.names), given.ids


def _class_count(program: Program) -> int | None:
    """Return the number of logits; None if the program outputs none."""
    logits = next((output for output in program.header.outputs if output.kind == "logits"), None)
    return None if logits is None else program.verify().buffers[logits.buffer].channels


def _images(
    program: Program, data: Path | None, names: tuple[str, ...], ids: list[str], limit: int
) -> tuple[inputs.Images, list[str]]:
    """Return images with labels if the folder has them and the program outputs logits, else without labels.

    Also returns a warning if there are sub-folders that do not match the classes.
    """
    header = program.header
    warnings: list[str] = []
    count = _class_count(program)
    if count is not None:
        try:
            return inputs.labelled(data, header.model, header.preprocess, names or count, ids, limit), warnings
        except FqvitError as error:
            if data is None or not data.is_dir():
                raise
            if any(entry.is_dir() for entry in data.iterdir()):  # these sub-folders were probably meant as classes
                warnings.append(f"the images are read without labels. {error}")
    return inputs.unlabelled(data, "--data", header.model, header.preprocess, limit), warnings


def command_line(file: Path, options: Mapping[str, object]) -> str:
    """Return the command line that the page shows. Options that are None are left out."""
    words = ["fqvit", "report", str(file)]
    for name, value in options.items():
        words += [] if value is None else [name, str(value)]
    return shlex.join(words)


def now() -> str:
    """Return the date and time that the page shows."""
    return datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC")


@dataclass(frozen=True)
class Written:
    """The files of a report. bytes: size of the page   pictures: paths of the figures, in `folder`"""

    report: Path
    bytes: int
    folder: Path | None
    pictures: list[str]

    def summary(self) -> dict[str, object]:
        return {"report": str(self.report), "bytes": self.bytes, "pictures": self.pictures}

    def text(self) -> str:
        figures = f"; {len(self.pictures)} figures in {self.folder}" if self.pictures else ""
        return f"Written: {self.report}, {size(self.bytes)}{figures}"


def write(target: Path, page: str, folder: Path | None, figures: Sequence[tuple[str, str]]) -> Written:
    """Write the page, and each figure (name, SVG) as a file in the folder, if there is one."""
    from fqvit.report.svg import standalone

    text = page.encode("utf-8", "replace")  # file names may contain invalid Unicode
    write_atomically(target, lambda path: path.write_bytes(text))
    paths = []
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, svg in figures:
            write_atomically(folder / f"{name}.svg", lambda path, svg=svg: path.write_text(standalone(svg), encoding="utf-8"))  # type: ignore[misc]
            paths.append(str(folder / f"{name}.svg"))
    return Written(target, len(text), folder, paths)


def summary(found: Report) -> dict[str, object]:
    """Return the object that --json prints."""
    predictions, attention, inspection = found.predictions, found.attention, found.inspection
    accuracy = None if predictions is None else predictions.accuracy()
    result: dict[str, object] = {
        "model": found.program.header.model,
        "images": found.images,
        "agreement": None if predictions is None else round(predictions.agreement, 4),
        "accuracy": None if accuracy is None else msgspec.to_builtins(accuracy),
        "program_bytes": inspection.total,
        "float32_bytes": 4 * found.parameters,
        "float_ops": inspection.floats,
        "proof_count": len(inspection.proofs),
        "fingerprint": found.fingerprint,
        "speed": {
            "integer_ms": round(found.speed.integer_ms, 3),
            "float_ms": round(found.speed.float_ms, 3),
            "isa": found.speed.isa,
        },
        "max_over_median": {one.norm: round(one.ratio, 2) for one in found.norms if math.isfinite(one.ratio)},
        "sites": msgspec.to_builtins(found.sites.sites),
    }
    if found.embeddings is not None:
        result["outputs"] = msgspec.to_builtins(list(found.embeddings.outputs))
        result["worst_images"] = [{"name": one.path, "cosine": round(one.cosine, 6)} for one in found.embeddings.worst]
    if attention is not None:
        result["attention"] = {
            "images": attention.images,
            "share_below_sixteenth": round(attention.share_below, 6),
            "uniform_bins_used": used(attention.uniform),
            "log2_bins_used": used(attention.log2),
            "log2_bins_below_sixteenth": used(attention.below),
            "uniform_entropy_bits": round(entropy(attention.uniform), 3),
            "log2_entropy_bits": round(entropy(attention.log2), 3),
        }
    if found.exp is not None:
        result["exp_gaps"] = {"polynomials": found.exp.gaps, "tables": found.exp.tables, "step": found.exp.scale}
    return result


def _text(found: Report, where: str) -> str:
    rows = [("images", f"{found.images} ({where})")]
    accuracy = None if found.predictions is None else found.predictions.accuracy()
    if accuracy is not None:
        rows.append(("top-1", f"integer {accuracy.integer_top1:.2f} %, float {accuracy.float_top1:.2f} %"))
        rows.append(("top-5", f"integer {accuracy.integer_top5:.2f} %, float {accuracy.float_top5:.2f} %"))
    if found.predictions is not None:
        rows.append(("agreement", f"{found.predictions.agreement:.2f} %"))
    for output in () if found.embeddings is None else found.embeddings.outputs:
        low = f"first percentile {output.first_percentile:.4f}, worst {output.worst:.4f}"
        same = output.neighbour_agreement
        near = "" if same is None else f"; same nearest neighbour for {same:.1f} %"
        rows.append((output.name, f"cosine to float: mean {output.mean_cosine:.4f}, {low}{near}"))
    if found.norms:
        worst = max(found.norms, key=lambda one: one.ratio)
        rows.append(("LayerNorm", f"widest channel {worst.ratio:.1f}x the median channel ({worst.norm})"))
    if found.attention is not None:
        rows.append(("attention", f"{100 * found.attention.share_below:.1f} % of values below 1/16"))
    speed = found.speed
    rows.append(("speed", f"about {speed.ratio:.1f}x the speed of PyTorch on one thread; `fqvit bench` measures precisely"))
    return facts(rows)
