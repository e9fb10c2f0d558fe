"""Save and load a detector as one .fqvit file.

The container format is that of ir/file.py; constants are named PART/NAME. Files that are truncated, altered,
invalid or of a newer version are rejected with a one-line error that names the file.
"""

from __future__ import annotations

from pathlib import Path

from fqvit.detect.program import DetectorHeader, DetectorProgram
from fqvit.errors import FqvitError
from fqvit.ir.file import DETECTOR, FileConstants, check_fingerprint, container, decoded, read_metadata, write_container
from fqvit.ir.program import Header, Program
from fqvit.ir.value import DAMAGED, Constant


def save(detector: DetectorProgram, path: Path) -> None:
    """Verify the detector and write it atomically."""
    detector.verify()
    write_container(path, DETECTOR, detector.encoded(), detector.fingerprint(), detector.constants())


def file_size(detector: DetectorProgram) -> int:
    """Return the number of bytes that `save` writes."""
    return len(container(DETECTOR, detector.encoded(), detector.fingerprint(), detector.constants()))


def load(path: Path) -> DetectorProgram:
    """Load and verify a detector. The arrays are copies: the file may be replaced afterwards."""
    metadata = read_metadata(path, DETECTOR)
    header = decoded(path, metadata[DETECTOR], DetectorHeader)
    with FileConstants(path) as found:
        constants = dict(found.items())
    check_fingerprint(path, metadata, DETECTOR, constants)
    try:
        detector = _assemble(header, constants)
        detector.verify()
        if header.version < detector.header.version:
            problem = f"format version {header.version}, but linear ops with a width need {detector.header.version}"
            raise FqvitError(f"{problem}. {DAMAGED}")
    except FqvitError as error:
        raise FqvitError(f"{path}: {error}") from None
    return detector


def _assemble(header: DetectorHeader, constants: dict[str, Constant]) -> DetectorProgram:
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
        resize=header.resize,
    )
