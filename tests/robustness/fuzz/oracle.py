"""Judge the outcome for a file: rejected with a one-line error that names it, or accepted with the reference's exact results.

Python's loader and the native loader must agree about every program. Every other outcome is a Finding.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fqvit.detect.program import DetectorProgram
from fqvit.errors import LONGEST, FqvitError
from fqvit.ir.program import Program, Verified
from fqvit.runtime.native import Engine, instruction_sets
from fqvit.runtime.reference import Reference

ISAS = instruction_sets()
RUN_ELEMENTS = 200_000  # programs with more elements in all buffers are loaded but not run


class Finding(Exception):
    """A file that was neither rejected nor accepted as specified."""


def checked_line(error: FqvitError, path: Path) -> str:
    """Return the message. Raise Finding unless it is one line of at most LONGEST characters that names the file."""
    line = str(error)
    if path.name not in line or len(line.splitlines()) != 1 or len(line) > LONGEST:
        raise Finding(f"the message is not one short line that names the file: {line[:300]!r}")
    return line


# Files on which the two loaders may differ: docs/explanation/hardening.md has the reasons.
MEMORY = re.compile(r"parameters need \d+ MB, but the file stores only|its buffers need \d+ MiB per image")  # engine limits
NOT_JSON = "the program is not JSON"
EXTREME_JSON = re.compile(rb"[0-9]{309}|[\[{]{300}")  # a number too large for a double, or deep nesting


@dataclass(frozen=True)
class Verdicts:
    """The outcome of both loaders for one file: a loaded program, or the reason for rejecting the file."""

    python: Program | FqvitError
    native: Engine | FqvitError


def verdicts(path: Path, **options: Any) -> Verdicts:
    """Load a program with Python's loader and with the native one. Raises Finding if only one of them accepts it.

    options: keyword arguments of Engine. Files in the table of exceptions in docs/explanation/hardening.md raise no Finding.
    """
    python, native = _program_or_error(path), _engine_or_error(path, **options)
    extreme = EXTREME_JSON.search(path.read_bytes()) is not None
    only_native = isinstance(native, FqvitError) and not isinstance(python, FqvitError)
    only_python = isinstance(python, FqvitError) and not isinstance(native, FqvitError)
    if only_native and not MEMORY.search(str(native)) and not (extreme and NOT_JSON in str(native)):
        raise Finding(f"only the engine rejects the file: {native}")
    if only_python and not (extreme and NOT_JSON in str(python)):
        raise Finding(f"only Python rejects the file: {python}")
    return Verdicts(python, native)


def _program_or_error(path: Path) -> Program | FqvitError:
    try:
        return Program.load(path)
    except FqvitError as error:
        checked_line(error, path)
        return error


def _engine_or_error(path: Path, **options: Any) -> Engine | FqvitError:
    try:
        return Engine(path, 1, **options)
    except FqvitError as error:
        checked_line(error, path)
        return error


def judge_program(path: Path, number: int) -> str:
    """Load a program with both loaders, run it on one instruction set, and compare its outputs with the reference.

    Returns "stage | message".
    """
    try:
        found = verdicts(path, isa=ISAS[number % len(ISAS)], keep=number % 3 == 0)
        if isinstance(found.native, FqvitError):
            stage = _stage(str(found.native)) if isinstance(found.python, FqvitError) else "engine"
            return f"{stage} | {found.native}"
        if isinstance(found.python, FqvitError):
            return f"accepted | by the engine only: {found.python}"
        verified = found.python.verify()
        if sum(math.prod(value.shape) for value in verified.buffers.values()) > RUN_ELEMENTS:
            return "accepted | too large to run here"
        _compare(found.python, verified, found.native, number)
        return "accepted | equal integers"
    except Finding:
        raise
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {error}") from error


def _compare(program: Program, verified: Verified, engine: Engine, number: int) -> None:
    shape = (2, *program.input_shape)
    images = np.random.default_rng(number).integers(0, 256, shape).astype(np.uint8)
    kept: dict[str, Any] = {}
    outside = []

    def visit(name: str, codes: Any) -> None:
        value = verified.buffers[name]
        if codes.shape[1:] != value.shape or int(codes.min()) < value.lo or int(codes.max()) > value.hi:
            outside.append(name)
        kept[name] = codes[0]

    exact = Reference(program).run_all(images, visit)
    if outside:
        raise Finding(f"the reference exceeds the proved range at {outside[0]}")
    for found, expected in zip(engine.run_all(images), exact, strict=True):
        if found.dtype != expected.dtype or not np.array_equal(found, expected):
            raise Finding(f"integers differ from the reference on {engine.isa}")
    if number % 3 == 0:
        for name, codes in engine.buffers(images[0]).items():
            if not np.array_equal(codes, kept[name]):
                raise Finding(f"integers differ from the reference at {name} on {engine.isa}")


def judge_detector(path: Path, number: int) -> str:
    """Load a detector, run it and compare its outputs with the reference. Return "stage | message"."""
    reached = False
    try:
        detector = DetectorProgram.load(path)
        reached = True
        native = detector.ready(1)
        if max(detector.settings.short, detector.settings.long) > 128 or detector.settings.proposals > 100:
            return "accepted | too large to run here"
        noise = np.random.default_rng(number).integers(0, 256, (24, 32, 3)).astype(np.uint8)
        image = detector.prepare(Image.fromarray(noise))
        found, exact = native.detect(image), detector.ready(1, "reference").detect(image)
        for name in ("boxes", "scores", "labels", "probabilities"):
            if not np.array_equal(getattr(found, name), getattr(exact, name)):
                raise Finding(f"{name} differ from the reference")
        return "accepted | equal integers"
    except FqvitError as error:
        if reached:  # errors of the detector's parts do not name the file; the caller knows its name
            return f"engine | {error}"
        return f"{_stage(str(error))} | {checked_line(error, path)}"
    except Finding:
        raise
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {error}") from error


def _stage(line: str) -> str:
    """Return the stage that rejected a file, judged by the words of its message."""
    for stage, words in (
        ("container", ("not a .fqvit file", "damaged or truncated", "only integers may be", "safetensors, but", "holds a")),
        ("fingerprint", ("the fingerprint does not",)),
        (
            "types",
            ("is not JSON", "format version", ": expected ", "unknown field", "missing required", "invalid value", "object "),
        ),
    ):
        if any(word in line for word in words):
            return stage
    return "verify"
