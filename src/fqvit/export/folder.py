"""Writing an export that is a folder: whole or not at all, and never over files that somebody else put there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fqvit.errors import FqvitError
from fqvit.system.files import flush_to_disk, remedy, temporary_beside

MANIFEST = "manifest.json"  # every such folder has one; "format" begins with "fqvit", and "files" lists the others
BUILT = (".o", ".su", ".d", ".elf", ".a")  # what compilers leave beside sources


@contextmanager
def replacing_folder(path: str | Path, also: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; it becomes `path` if the block ends well and is removed if it does not.

    A folder that is there already must be empty or an earlier export; `also` names files that building one makes.
    """
    target = Path(path)
    try:
        target = target.resolve()
        check_free(Path(path), also)
        temporary = temporary_beside(target)
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
    if target.exists():  # empty, too: not every system renames over a folder
        old = temporary_beside(target, ".old")
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
    """Refuses a path that holds anything but an earlier export."""
    if path.is_file():
        raise FqvitError(f"{path}: is a file, expected a folder. Choose another path.")
    if not path.is_dir():
        return
    if Path.cwd().is_relative_to(path.resolve()):
        raise FqvitError(f"{path}: is the folder that this command runs in, and is replaced as a whole. Choose another name.")
    if next(_files(path), None) is None:
        return
    own = _own(path)
    if own is None:
        raise FqvitError(f"{path}: holds files that are no export of fqvit. Choose another folder or empty it.")
    others = [name for name in _files(path) if name not in {*own, *also} and not name.endswith(BUILT)]
    if others:
        raise FqvitError(f"{path}: holds {min(others)!r}, which fqvit did not write. Choose another folder or move it.")


def _files(folder: Path) -> Iterator[str]:
    """Everything in it but folders, as the manifest names it on every system; one by one, since it may be anybody's home."""
    return (file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())


def _own(folder: Path) -> set[str] | None:
    """The manifest and the files that it lists; None where it is no export of ours."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return {MANIFEST, *manifest["files"]} if manifest["format"].startswith("fqvit ") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_manifest(folder: Path, kind: str, content: dict[str, object]) -> None:
    """`kind` and version, as in "fqvit vectors 1"; the files are listed as they are."""
    text = json.dumps({"format": f"fqvit {kind}", **content, "files": sorted(_files(folder))}, indent=1, ensure_ascii=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
