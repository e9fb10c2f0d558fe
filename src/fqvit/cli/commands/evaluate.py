"""`fqvit eval`: measure top-1 and top-5 accuracy of a program, an ONNX export or a float model."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fqvit.cli import inputs
from fqvit.cli.output import not_logits, say, say_json
from fqvit.data.preprocess import Preprocess
from fqvit.distributed.workers import Workers, cores, joined
from fqvit.errors import FqvitError
from fqvit.evaluate.accuracy import Run, Scores, measure
from fqvit.ir.file import is_program
from fqvit.models.locate import CHECKPOINTS, located

if TYPE_CHECKING:
    from fqvit.ir.program import Header

PROGRAM_BATCH = 8  # the reference keeps int64 intermediates; the engine gains nothing from larger batches
FLOAT_BATCH = 16


def run(
    target: str,
    weights: str | None,
    data: Path | None,
    classes: Path | None,
    backend: str | None,
    limit: int | None,
    device: str,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    workers = Workers.from_environment()
    given = inputs.read_classes(classes)
    path = Path(target)
    is_float = target.startswith("hf:") or path.is_dir() or (path.suffix in CHECKPOINTS and not is_program(path))
    if not is_float and (path.suffix in (".fqvit", ".onnx") or path.is_file()):
        if weights is not None:
            raise FqvitError(f"{target}: a program contains its weights. Leave out --weights, or pass a float model.")
        if settings and path.suffix in (".fqvit", ".onnx"):
            raise FqvitError(
                f"{target}: a program has fixed settings. Leave out --{next(iter(settings))}, or pass a float model."
            )
        if device != "cpu":
            raise FqvitError(f"device {device!r}: programs run on the CPU. Use --device cpu.")
        if path.suffix == ".onnx" or backend == "onnx":
            model, backend, (preprocess, names, forward), size = *_onnx(path, backend), PROGRAM_BATCH
        else:
            model, backend, (preprocess, names, forward), size = *_program(path, backend or "native"), PROGRAM_BATCH
    else:
        if backend is not None:
            raise FqvitError(f"{target}: a float model has no backends. Leave out --backend.")
        name, weights = located(target, weights)
        inputs.require_torch("eval of a float model")
        model, backend, (preprocess, names, forward), size = *_float(name, weights, settings, device, workers), FLOAT_BATCH
    ids: list[str] = []
    if given is not None:
        count = names if isinstance(names, int) else len(names)
        if len(given.names) != count:
            raise FqvitError(f"{classes}: {len(given.names)} classes, but {target} has {count}. Pass one name per logit.")
        names, ids = given.names, given.ids
    if workers.size > 1:
        workers.agree(target, _identity(path, limit), "Every machine needs the same file and the same command.")
    images = inputs.labelled(data, model, preprocess, names, ids, limit, workers)
    start = time.perf_counter()
    found = measure(forward, images.batches(size, "evaluating"), workers)
    seconds = time.perf_counter() - start
    if not workers.first:
        return
    if as_json:
        say_json(
            {
                "target": target,
                "model": model,
                "backend": backend,
                "top1": round(found.top1, 4),
                "top5": round(found.top5, 4),
                "images": found.images,
                "skipped": images.skipped,
                "workers": workers.size,
                "seconds": round(seconds, 3),
                "ms_per_image": round(1000 * found.seconds / found.images, 3),
            }
        )
        return
    each = f"{seconds:.1f} s, {1000 * found.seconds / found.images:.1f} ms per image in the model"
    say(f"{target} ({backend}) on {found.images} images ({images.where}): {each}")
    say(f"top-1 {found.top1:.2f} %")
    say(f"top-5 {found.top5:.2f} %")


def _identity(path: Path, limit: int | None) -> str:
    """Return a string that must be the same on all workers: the digest of the file, if there is one, and --limit."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else "no file"
    return f"{digest}, limit {limit}"


Ready = tuple[Preprocess, Sequence[str] | int, Run]


def _program(path: Path, backend: str) -> tuple[str, str, Ready]:
    header, classes, forward = _engine(path) if backend == "native" else _reference(path)
    if header.output.kind != "logits":
        raise not_logits(path, header.output.kind)
    count = forward(np.zeros((0, *header.input_shape), np.uint8)).shape[-1]
    return header.model, backend, (header.preprocess, classes or count, forward)


def _onnx(path: Path, backend: str | None) -> tuple[str, str, Ready]:
    """Load an exported program, or export a .fqvit program in memory."""
    from fqvit.runtime.onnx import Session

    if backend not in (None, "onnx"):
        raise FqvitError(f"{path}: an ONNX file, which only runs with --backend onnx. Leave out --backend.")
    threads = None if joined() is None else cores()  # single-process: ONNX Runtime decides
    session = Session(path if path.suffix == ".onnx" else _exported(path), threads)
    if session.output.kind != "logits":
        raise not_logits(path, session.output.kind)
    kind = "onnx" if session.target is None else "qdq"
    return session.model, kind, (session.preprocess, session.classes or session.output_shape[-1], session.run)


def _exported(path: Path) -> bytes:
    """Load a .fqvit program and export it to ONNX in memory."""
    from fqvit.ir.program import Program
    from fqvit.runtime.onnx import INSTALL

    program = Program.load(path)
    try:
        from fqvit.export.onnx import model
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise FqvitError(f"exporting {path} to ONNX: needs onnx, {INSTALL}") from None
    exported: bytes = model(program).SerializeToString()
    return exported


def _engine(path: Path) -> tuple[Header, tuple[str, ...] | None, Run]:
    from fqvit.runtime.native import Engine

    engine = Engine(path)
    return engine.header, engine.classes, engine.run


def _reference(path: Path) -> tuple[Header, tuple[str, ...] | None, Run]:
    from fqvit.ir.program import Program
    from fqvit.runtime.reference import Reference

    program = Program.load(path)
    return program.header, program.classes, Reference(program).run


def _float(
    name: str | None, weights: str | None, settings: dict[str, Any], device: str, workers: Workers
) -> tuple[str, str, Ready]:
    from fqvit.models.device import device_of
    from fqvit.models.graph import run_float, trace
    from fqvit.models.pixels import normalise

    where = device_of(device)
    model = inputs.float_model(name, weights, **settings)
    classes = model.classes or inputs.classes_of(model)
    if workers.first:
        inputs.warn_of_other_name(model, weights)
    module = model.module.to(where)
    graph = trace(module)

    def forward(images: Scores) -> Scores:
        logits: Scores = run_float(graph, normalise(images, model.preprocess).to(where)).cpu().numpy()
        return logits

    return model.name, "float", (model.preprocess, classes, forward)
