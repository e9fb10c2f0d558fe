"""Writing an export that is a folder: whole or not at all, and never over files that somebody else put there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fqvit.errors import FqvitError
from fqvit.files import flush_to_disk, remedy, temporary_beside

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
    if target.exists() and any(target.iterdir()):
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
    inside = sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())
    if not inside:
        return
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        assert str(manifest["format"]).startswith("fqvit ")
        own = {MANIFEST, *also, *manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise FqvitError(f"{path}: holds files that are no export of fqvit. Choose another folder or empty it.") from None
    others = [name for name in inside if name not in own and not name.endswith(BUILT)]
    if others:
        raise FqvitError(f"{path}: holds {others[0]!r}, which fqvit did not write. Choose another folder or move it.")


def write_manifest(folder: Path, kind: str, content: dict[str, object]) -> None:
    """`kind` and version, as in "fqvit vectors 1"; the files are listed as they are."""
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())
    text = json.dumps({"format": f"fqvit {kind}", **content, "files": files}, indent=1, ensure_ascii=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
