"""Print results to stdout and warnings to stderr. See also: system/text.py, which formats tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import typer

from fqvit.errors import FqvitError

if TYPE_CHECKING:
    from fqvit.models.load import FloatModel


class Pass(Protocol):
    """A source of images after a pass. skipped: (name, reason) of each unreadable image."""

    skipped: list[tuple[str, str]]

    def __len__(self) -> int: ...


def say(text: str = "") -> None:
    """Print text to stdout."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        raise
    except OSError as error:  # stdout is redirected to a file on a full disk
        raise OSError(error.errno, error.strerror, "stdout") from None


def say_json(result: Mapping[str, object]) -> None:
    """Print one JSON object as one line, which is the last line of stdout."""
    say(json.dumps(result, allow_nan=False))


def warn(text: str) -> None:
    """Print a warning to stderr."""
    typer.echo(f"fqvit: warning: {text}", err=True)


def not_logits(path: Path, kind: str) -> FqvitError:
    """Return the error for a program whose first output is not logits, if no other way to classify was chosen."""
    said = f"{path}: outputs features ({kind}), expected logits as its first output"
    return FqvitError(
        f"{said}. Quantize a model with a classifier, with logits first in --output, or classify by embeddings (--zero-shot,"
        " or --knn in eval); fqvit.Engine and `fqvit embed` return features."
    )


class Unreadable:
    """Collect unreadable images that were named on the command line. The command continues with the rest and fails at the end.

    Each image is reported immediately, unless the command has only one image: then only the final error reports it.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.errors: list[FqvitError] = []

    def add(self, error: FqvitError) -> None:
        self.errors.append(error)
        if self.total > 1:
            warn(str(error))

    def raise_if_any(self) -> None:
        """Raise FqvitError if any image was unreadable. Call this after all images."""
        if self.errors:
            many = FqvitError(f"{len(self.errors)} of {self.total} images cannot be read. Repair or remove them.")
            raise self.errors[0] if self.total == 1 else many


def warn_of_skipped(source: Pass) -> int:
    """Warn about the images that the last pass could not read, and return their number."""
    count = len(source.skipped)
    if count:
        path, reason = source.skipped[0]
        which = "1 image" if count == 1 else f"{count} images"
        warn(f"skipped {which} of {len(source)} that cannot be read ({path}: {reason}{', ...' if count > 1 else ''}).")
    return count


# Prefixes of sentences in FloatModel.assumed. SOURCE: where the preprocessing comes from. DEFAULTS: settings for which a
# default is used.
SOURCE = "preprocessing: that of "
DEFAULTS = ("resize:", "interpolation:", "mean and std:")


def preprocessing_defaults(model: FloatModel) -> list[str]:
    """Return one sentence per preprocessing setting that nothing specifies, with the default that is used instead."""
    return [sentence for sentence in model.assumed if sentence.startswith(DEFAULTS)]


def preprocessing_source(model: FloatModel) -> str:
    """Return where the preprocessing of a float model comes from."""
    named = next((sentence.removeprefix(SOURCE) for sentence in model.assumed if sentence.startswith(SOURCE)), None)
    return named or ("defaults" if len(preprocessing_defaults(model)) == len(DEFAULTS) else "the checkpoint or module itself")


def about_inputs(model: FloatModel) -> list[tuple[str, str]]:
    """Return lines about the preprocessing of a model, where it comes from, and everything that was assumed."""
    p = model.preprocess
    mean, std = (" ".join(f"{value:g}" for value in dict.fromkeys(values)) for values in (p.mean, p.std))
    rest = [sentence for sentence in model.assumed if not sentence.startswith(SOURCE)]
    return [
        ("preprocessing", f"{p.steps} {p.height}x{p.width}, mean {mean}, std {std} (from {preprocessing_source(model)})"),
        ("assumed", "; ".join(rest) or "nothing"),
    ]


def warn_of_assumptions(model: FloatModel) -> None:
    """Warn if the preprocessing of a model is not fully specified."""
    if defaults := preprocessing_defaults(model):
        warn(f"{model.name}: its preprocessing is not fully specified. Assumed: {'; '.join(defaults)}.")
