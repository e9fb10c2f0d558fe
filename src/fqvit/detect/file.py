"""A detector in one .fqvit file: the container of ir/file.py, the constants of each part behind its name.

Refuses, with one line that names the file, whatever is truncated, altered, of a newer version, or not verifiable.
"""

from __future__ import annotations

from pathlib import Path

from fqvit.detect.program import VERSION, DetectorHeader, DetectorProgram
from fqvit.errors import FqvitError
from fqvit.ir.file import DETECTOR, FileConstants, check_fingerprint, decoded, read_metadata, write_container
from fqvit.ir.program import Header, Program
from fqvit.ir.value import DAMAGED, Constant

READABLE = (VERSION,)  # every version ever released


def save(detector: DetectorProgram, path: Path) -> None:
    detector.verify()
    write_container(path, DETECTOR, detector.encoded(), detector.fingerprint(), detector.constants())


def load(path: Path) -> DetectorProgram:
    """The detector in a file, verified. The arrays are copies: the file may be replaced afterwards."""
    metadata = read_metadata(path, DETECTOR)
    header = decoded(path, metadata[DETECTOR], DetectorHeader, READABLE)
    with FileConstants(path) as found:
        constants = dict(found.items())
    check_fingerprint(path, metadata, DETECTOR, constants)
    try:
        detector = _put_together(header, constants)
        detector.verify()
    except FqvitError as error:
        raise FqvitError(f"{path}: {error}") from None
    return detector


def _put_together(header: DetectorHeader, constants: dict[str, Constant]) -> DetectorProgram:
    parts: dict[str, dict[str, Constant]] = {"pyramid": {}}
    parts |= {f"boxes.{stage}": {} for stage in range(len(header.boxes))}
    parts |= {f"masks.{stage}": {} for stage in range(len(header.masks))}
    for name, array in constants.items():
        part, slash, rest = name.partition("/")
        if not slash or part not in parts:
            raise FqvitError(f"constant {name!r} belongs to no part of the detector. {DAMAGED}")
        parts[part][rest] = array

    def program(part: str, header: Header) -> Program:
        return Program(header, parts[part])

    return DetectorProgram(
        model=header.model,
        source=header.source,
        settings=header.settings,
        between=header.between,
        pyramid=program("pyramid", header.pyramid),
        boxes=tuple(program(f"boxes.{stage}", one) for stage, one in enumerate(header.boxes)),
        masks=tuple(program(f"masks.{stage}", one) for stage, one in enumerate(header.masks)),
    )
