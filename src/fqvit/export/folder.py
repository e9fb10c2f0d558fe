"""Write an export folder atomically, and never over files that fqvit did not write."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fqvit.errors import FqvitError
from fqvit.system.files import flush_to_disk, remedy, temporary_path

MANIFEST = "manifest.json"  # in every export folder: "format" starts with "fqvit ", "files" lists all other files
BUILT = (".o", ".su", ".d", ".elf", ".a")  # files that compilers write next to sources


@contextmanager
def replacing_folder(path: str | Path, also: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield a temporary folder next to `path`. It is renamed to `path` if the block succeeds, and removed if it raises.

    An existing folder at `path` must be empty or an earlier export. also: names of files that compiling an export creates
    """
    target = Path(path)
    try:
        target = target.resolve()
        check_free(Path(path), also)
        temporary = temporary_path(target)
        try:
            temporary.mkdir()
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    flush_to_disk(file)
            _put(temporary, target)
        except BaseException:  # KeyboardInterrupt too
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise FqvitError(f"{path}: cannot be written ({error.strerror or error}). {remedy(error)}") from error


def _put(temporary: Path, target: Path) -> None:
    if target.exists():  # even if it is empty: not every system can rename over a folder
        old = temporary_path(target, ".old")
        os.replace(target, old)
        try:
            os.replace(temporary, target)
        except BaseException:
            os.replace(old, target)
            raise
        shutil.rmtree(old)
    else:
        os.replace(temporary, target)


def check_free(path: Path, also: tuple[str, ...] = ()) -> None:
    """Raise FqvitError if `path` holds anything except an earlier export."""
    if path.is_file():
        raise FqvitError(f"{path}: is a file, expected a folder. Choose another path.")
    if not path.is_dir():
        return
    if Path.cwd().is_relative_to(path.resolve()):
        raise FqvitError(f"{path}: is or contains the current folder, which an export would replace. Choose another folder.")
    if next(_files(path), None) is None:
        return
    exported = _exported_files(path)
    if exported is None:
        raise FqvitError(f"{path}: contains files that are not an export of fqvit. Choose another folder or empty this one.")
    others = [name for name in _files(path) if name not in {*exported, *also} and not name.endswith(BUILT)]
    if others:
        raise FqvitError(
            f"{path}: contains {min(others)!r}, which fqvit did not write. Choose another folder or move the file."
        )


def _files(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files, with / on every system. Lazy: the folder may be huge, such as a home folder."""
    return (file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())


def _exported_files(folder: Path) -> set[str] | None:
    """Return the manifest and the files that it lists, or None if the folder is not an export of fqvit."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return {MANIFEST, *manifest["files"]} if manifest["format"].startswith("fqvit ") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_manifest(folder: Path, kind: str, content: dict[str, object]) -> None:
    """Write manifest.json: the format ("fqvit vectors 1" for kind "vectors 1"), the given content and the list of files."""
    text = json.dumps({"format": f"fqvit {kind}", **content, "files": sorted(_files(folder))}, indent=1, ensure_ascii=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
