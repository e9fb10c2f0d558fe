"""Test that the compiled loader accepts and rejects the same detector files as DetectorProgram.load.

Fields of the JSON, ops and moves of the networks, and constants are changed one by one, each time with a valid fingerprint.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fqvit import _native
from fqvit.detect.program import DetectorProgram
from fqvit.errors import FqvitError
from tests.robustness.hostile.containers import DETECTOR, Json, Tensors, fingerprint_of, packed, unpacked

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "detectors"
VALUES: list[Any] = [None, True, -1, 0, 1, 3, 4096, 2**31, 2**62, 1.5, "x", [], [1], {}, [[1, 2]]]


def mutations(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield a path and a new value for every field, list element and number below `value`."""
    for new in VALUES:
        yield path, new
    if isinstance(value, dict):
        yield path, {**value, "unknown": 1}
        for name, child in value.items():
            yield path, {key: other for key, other in value.items() if key != name}
            yield from mutations(child, (*path, name))
    elif isinstance(value, list) and value:
        yield path, [*value, value[-1]]
        yield path, value[:-1]
        yield path, value[::-1]
        for i in sorted({0, len(value) - 1}):
            yield from mutations(value[i], (*path, i))
    elif isinstance(value, int | float):
        for new in (value + 1, value * 2, value - 1):
            yield path, new


def replaced(header: Json, path: tuple[Any, ...], new: Any) -> Json:
    made = copy.deepcopy(header)
    at: Any = made
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = new
    return made


def some(every: Iterator[tuple[tuple[Any, ...], Any]], step: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every `step`-th change; all of them would take minutes."""
    return (change for i, change in enumerate(every) if i % step == 0)


def disagreement(text: str, tensors: Tensors, file: Path) -> str | None:
    """Return both verdicts if only one loader accepts the file; None if they agree."""
    raw = packed(text, fingerprint_of(text, tensors), tensors, DETECTOR)
    file.write_bytes(raw)
    python = native = ""
    try:
        DetectorProgram.load(file).ready(1, "reference")
    except FqvitError as error:
        python = str(error)
    try:
        _native.load_detector_memory(raw, 1, "")
    except _native.BadProgram as error:
        native = str(error)
        assert "\n" not in native
    return None if bool(python) == bool(native) else f"Python: {python or 'accepts'} | native: {native or 'accepts'}"


def check_all(name: str, part: Callable[[Json], Iterator[tuple[tuple[Any, ...], Any]]], file: Path) -> None:
    text, _, tensors = unpacked((GOLDEN / f"{name}.fqvit").read_bytes(), DETECTOR)
    header = json.loads(text)
    found = []
    for path, new in part(header):
        if said := disagreement(json.dumps(replaced(header, path, new)), tensors, file):
            found.append(f"{path} = {new!r}: {said}")
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize("field", ["version", "model", "source", "settings", "between", "resize"])
def test_both_loaders_agree_about_changed_fields(field: str, tmp_path: Path) -> None:
    step = 4 if field in ("settings", "between") else 1
    check_all("opencv_v1", lambda header: some(mutations(header[field], (field,)), step), tmp_path / "d.fqvit")


def test_both_loaders_agree_about_changed_stages(tmp_path: Path) -> None:
    def changes(header: Json) -> Iterator[tuple[tuple[Any, ...], Any]]:
        for field in ("boxes", "masks"):
            stages = header[field]
            for new in (stages[:1], stages[:2], [*stages, stages[0]], stages[::-1], []):
                yield (field,), new
        yield ("boxes",), header["masks"]
        yield ("pyramid",), header["boxes"][0]
        yield ("boxes", 0), header["pyramid"]

    check_all("cascade_v1", changes, tmp_path / "d.fqvit")


def test_both_loaders_agree_about_changed_networks(tmp_path: Path) -> None:
    def changes(header: Json) -> Iterator[tuple[tuple[Any, ...], Any]]:
        for part in (("pyramid",), ("boxes", 0), ("masks", 0)):
            own = header[part[0]] if len(part) == 1 else header[part[0]][part[1]]
            for field in ("preprocess", "output", "input", "moves"):
                if field in own:
                    yield from some(mutations(own[field], (*part, field)), 7)
            yield (*part, "others"), own.get("others", [])[::-1]
            for i, op in enumerate(own["ops"]):
                if op["op"] in ("take", "permute") or "region" in op:
                    yield from some(mutations(op, (*part, "ops", i)), 41)

    check_all("mask_rcnn_v1", changes, tmp_path / "d.fqvit")


def test_both_loaders_agree_about_changed_constants(tmp_path: Path) -> None:
    text, _, tensors = unpacked((GOLDEN / "mask_rcnn_v1.fqvit").read_bytes(), DETECTOR)
    found = []
    for name, (dtype, shape, data) in tensors.items():
        if not any(part in name for part in ("rows.", "region.")):
            continue
        changed = bytes([data[0] ^ 1]) + data[1:]
        for new in ({name: (dtype, shape, changed)}, {name: (dtype, [*shape, 1], data)}):
            if said := disagreement(text, {**tensors, **new}, tmp_path / "d.fqvit"):
                found.append(f"{name}: {said}")
    for name in ("pyramid/extra", "boxes.1/extra", "nothing/extra", "extra", "pyramid/pixels", "pyramid/rows.99", "pyramid/"):
        if said := disagreement(text, {**tensors, name: ("U8", [1], b"a")}, tmp_path / "d.fqvit"):
            found.append(f"{name}: {said}")
    assert not found, "\n".join(found[:20])
