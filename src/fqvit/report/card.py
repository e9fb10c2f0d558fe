"""Write the model card of a .fqvit file for the Hugging Face Hub: metadata in YAML, then accuracy, sizes and how to run it.

A card is Markdown. Values in the metadata are written as JSON, which is valid YAML. See also: cli/commands/card.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fqvit.detect.program import DetectorProgram
from fqvit.errors import FqvitError
from fqvit.evaluate.inspect import bits_of, inspect, inspect_part
from fqvit.ir.file import DETECTOR, kind_of
from fqvit.ir.program import Header, Program
from fqvit.system.text import size

Task = Literal["image-classification", "image-feature-extraction", "object-detection"]
# {key in the JSON of `eval` or `detect eval`: (name, type of metric on the hub)}
METRICS = {
    "top1": ("top-1 accuracy", "accuracy"),
    "top5": ("top-5 accuracy", "accuracy"),
    "box_AP": ("box AP", "mean_average_precision"),
    "box_AP50": ("box AP50", "mean_average_precision"),
    "mask_AP": ("mask AP", "mean_average_precision"),
    "mask_AP50": ("mask AP50", "mean_average_precision"),
}
UNNAMED = "unspecified data"
UNKNOWN_LICENCE = "State the licence of the float weights here: it also applies to this file."


@dataclass(frozen=True)
class Subject:
    """What a card says about a file. base: repository of the float model on the hub, None if unknown"""

    file: str
    model: str
    task: Task
    source: str
    base: str | None
    facts: Sequence[tuple[str, str]]
    fingerprint: str


@dataclass(frozen=True)
class Evaluation:
    """One result of `eval --json`. values: {key of METRICS: percent}"""

    target: str
    model: str
    backend: str
    images: int
    values: Mapping[str, float]


def read_evaluation(path: Path) -> Evaluation:
    """Read the output of `fqvit eval --json` or `fqvit detect eval --json`: its last line."""
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
    except OSError as error:
        raise FqvitError(f"{path}: cannot be read ({error.strerror}). Pass the output of `fqvit eval --json`.") from None
    except UnicodeDecodeError:
        raise FqvitError(f"{path}: not UTF-8 text. Pass the output of `fqvit eval --json`.") from None
    try:
        found = json.loads(lines[-1] if lines else "")
        values = {key: float(found[key]) for key in METRICS if found.get(key) is not None}
        if not values:
            raise KeyError("top1")
        return Evaluation(str(found["target"]), str(found["model"]), str(found["backend"]), int(found["images"]), values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FqvitError(f"{path}: not a result of an evaluation. Pass the output of `fqvit eval --json`.") from None


def subject_of(file: Path) -> Subject:
    """Read and verify a program or a detector, and collect what its card says about it."""
    return _detector(file) if kind_of(file) == DETECTOR else _program(file)


def _program(file: Path) -> Subject:
    program = Program.load(file)
    found, header = inspect(program, file), program.header
    classifies = header.output.kind == "logits"
    height, width, channels = program.input_shape
    names = f", {len(program.classes)} class names" if program.classes is not None else ""
    outputs = ", ".join(output.label for output in header.outputs)
    rows = [
        ("input", f"uint8 {height} x {width} x {channels}, prepared by {header.preprocess.steps}"),
        ("output", f"{outputs}{names}"),
        ("weights", f"{sum(found.weights_by_bits.values()):,}, {found.bits_per_weight:.2f} bits each"),
        ("ops", f"{len(program.ops)}, of which {found.floats} use floating point"),
        ("overflow", f"proved impossible ({len(found.proofs)} proofs from the weights)"),
    ]
    task: Task = "image-classification" if classifies else "image-feature-extraction"
    return _subject(file, header.model, task, header.source, header, rows, program.fingerprint())


def _detector(file: Path) -> Subject:
    detector = DetectorProgram.load(file)
    parts = [inspect_part(program) for _, program in detector.parts()]
    s = detector.settings
    rows = [
        ("input", f"images of any size, resized to {s.short} x {s.long} at most"),
        ("output", f"boxes, scores and masks of {detector.classes} classes"),
        ("weights", f"{sum(sum(part.weights_by_bits.values()) for part in parts):,}"),
        ("ops", f"{sum(len(part.ops) for part in parts)}, of which {sum(part.floats for part in parts)} use floating point"),
        ("overflow", f"proved impossible ({sum(len(part.proofs) for part in parts)} proofs from the weights)"),
    ]
    header = detector.pyramid.header
    return _subject(file, detector.model, "object-detection", detector.source, header, rows, detector.fingerprint())


def _subject(
    file: Path, model: str, task: Task, source: str, header: Header, rows: list[tuple[str, str]], fingerprint: str
) -> Subject:
    match = re.match(r"hf:([\w.-]+/[\w.-]+)", source)
    recipe = f"{header.recipe.get('name', 'unknown')}, {bits_of(header.recipe)} bits of weights / activations / attention"
    facts = [
        ("file", f"`{file.name}`, {size(file.stat().st_size)}"),
        ("recipe", recipe),
        ("calibration", f"{header.images} unlabelled images"),
        *rows,
        ("source", f"`{source}`"),
        ("fingerprint", f"`{fingerprint}`"),
    ]
    return Subject(file.name, model, task, source, None if match is None else match[1], facts, fingerprint)


def card(
    subject: Subject,
    results: Sequence[Evaluation] = (),
    dataset: str | None = None,
    licence: str | None = None,
    repository: str | None = None,
) -> str:
    """Return the model card as Markdown with the metadata of the hub.

    results: evaluations of the program, and of the float model (backend "float") for comparison
    dataset: name of the evaluated data
    licence: identifier on the hub; without it the card has a placeholder   repository: ORG/NAME of the card, for its examples
    """
    parts = [
        _metadata(subject, results, dataset, licence),
        f"# {subject.model}, integer-only\n\n{_summary(subject)}",
        f"## Contents\n\n{_markdown(('', ''), subject.facts)}",
    ]
    if results:
        parts.append(f"## Accuracy\n\n{_accuracy(results, dataset)}")
    parts.append(_usage(subject, repository or "ORG/NAME"))
    parts.append(f"## Licence\n\n{licence or UNKNOWN_LICENCE}")
    return "\n\n".join(parts) + "\n"


def _summary(subject: Subject) -> str:
    base = f" of [{subject.base}](https://huggingface.co/{subject.base})" if subject.base else ""
    return (
        f"An integer-only program{base}, made by fqvit with post-training quantization. It runs without floating-point"
        " operations and gives bit-identical results on every machine; the fingerprint identifies it."
    )


def _accuracy(results: Sequence[Evaluation], dataset: str | None) -> str:
    keys = [key for key in METRICS if any(key in result.values for result in results)]
    heads = ("model", "runtime", "images", *(f"{METRICS[key][0]} (%)" for key in keys))
    rows = [
        (
            "float" if result.backend == "float" else "this program",
            result.backend,
            f"{result.images:,}",
            *(f"{result.values[key]:.2f}" if key in result.values else "" for key in keys),
        )
        for result in results
    ]
    return f"{_markdown(heads, rows)}\n\nMeasured on {dataset or UNNAMED}."


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def _usage(subject: Subject, repository: str) -> str:
    address, file = f"hf:{repository}", subject.file
    method, command, run = {
        "image-classification": ('print(model.classify("photo.jpg"))', "fqvit classify {} photo.jpg", "photo.ppm"),
        "image-feature-extraction": (
            'print(model.embed(["a.jpg", "b.jpg"]).float())',
            "fqvit embed {} photos -o photos.safetensors",
            "photo.ppm",
        ),
        "object-detection": ('print(model.detect("street.jpg"))', "fqvit detect predict {} street.jpg", None),
    }[subject.task]
    c = "The library `libfqvit` (`fqvit.h`) runs the file."
    if run is not None:
        c += " Its command `fqvit-run` reads PPM and PGM images; `fqvit export` writes the program as C99."
        c += f"\n\n    fqvit-run {file} {run}\n    fqvit export {address} --to c"
    return f"""## How to run it

In Python, with the packages fqvit and huggingface_hub; torch is not needed:

```python
import fqvit

model = fqvit.load("{address}")
{method}
```

On the command line:

    {command.format(address)}
    fqvit inspect {address}

In C and C++: {c}

In the browser, as a folder for any static web server, or on this machine:

    fqvit web {address} -o page
    fqvit web {address} --serve"""


def _metadata(subject: Subject, results: Sequence[Evaluation], dataset: str | None, licence: str | None) -> str:
    own = [result for result in results if result.backend != "float"]
    found: dict[str, Any] = {
        "library_name": "fqvit",
        "pipeline_tag": subject.task,
        "license": licence or "other",
        "tags": ["fqvit", "quantized", "integer-only", "post-training-quantization", "vision-transformer"],
    }
    if licence is None:
        found |= {"license_name": "to-be-stated"}
    if subject.base is not None:
        found |= {"base_model": subject.base, "base_model_relation": "quantized"}
    if dataset is not None:
        found |= {"datasets": [dataset]}
    if own:
        found |= {"metrics": sorted({METRICS[key][1] for result in own for key in result.values})}
        found |= {"model-index": [{"name": subject.model, "results": [_indexed(subject, one, dataset) for one in own]}]}
    return "\n".join(("---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in found.items()), "---"))


def _indexed(subject: Subject, result: Evaluation, dataset: str | None) -> dict[str, Any]:
    name = dataset or UNNAMED
    metrics = [{"type": METRICS[key][1], "name": METRICS[key][0], "value": value} for key, value in result.values.items()]
    return {"task": {"type": subject.task}, "dataset": {"type": name, "name": name}, "metrics": metrics}
