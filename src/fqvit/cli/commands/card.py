"""`fqvit card`: write the model card of a program or detector, ready for the Hugging Face Hub."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from fqvit.cli import inputs
from fqvit.cli.output import say, say_json, warn
from fqvit.errors import FqvitError
from fqvit.report.card import card, read_evaluation, subject_of
from fqvit.system.files import write_atomically

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def run(
    file: Path,
    results: list[Path],
    dataset: str | None,
    base: str | None,
    licence: str | None,
    repository: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    for option, value in (("--base", base), ("--repo", repository)):
        if value is not None and REPOSITORY.fullmatch(value) is None:
            raise FqvitError(f"{option} {value}: expected a repository of the Hugging Face Hub, ORG/NAME.")
    if out is not None:
        inputs.check_output(out, file, *results)
    evaluations = [read_evaluation(path) for path in results]
    subject = subject_of(file)
    if base is not None:
        subject = replace(subject, base=base)
    for path, result in zip(results, evaluations, strict=True):
        if result.model != subject.model:
            warn(f"{path} is about {result.model}, but {file.name} is {subject.model}.")
    if dataset is None and evaluations:
        warn("the card does not say which data was evaluated. Pass --dataset NAME.")
    if licence is None:
        warn("the card has a placeholder for the licence. Pass --license NAME, such as apache-2.0.")
    text = card(subject, evaluations, dataset, licence, repository)
    if out is not None:
        write_atomically(out, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    if as_json:
        named = None if out is None else str(out)
        about = {"file": str(file), "out": named, "model": subject.model, "fingerprint": subject.fingerprint}
        say_json(about if out is not None else {**about, "card": text})
    elif out is None:
        say(text.rstrip("\n"))
    else:
        say(f"{out}: model card of {subject.model}. Upload it with {file.name} to a repository on the hub.")
