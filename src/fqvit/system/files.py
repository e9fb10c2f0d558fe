"""Write files atomically: a reader finds the old file or the new one, never a partial one.

Content goes to a temporary file in the same folder, is flushed to disk and renamed. See also: ir/file.py for the
.fqvit format, export/folder.py for folders.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fqvit.errors import FqvitError

if TYPE_CHECKING:
    from numpy.typing import NDArray

REMEDIES = {
    errno.ENOENT: "Create the folder first.",
    errno.ENOTDIR: "Choose a path inside a folder.",
    errno.EISDIR: "Choose a file name, not a folder.",
    errno.EACCES: "Choose a folder with write permission.",
    errno.EPERM: "Choose a folder with write permission.",
    errno.EROFS: "Choose a folder on a writable disk.",
    errno.ENOSPC: "Free disk space or choose another disk.",
    errno.EDQUOT: "Free some of your disk quota or choose another disk.",
    errno.EFBIG: "Raise the file size limit or choose another disk.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def remedy(error: OSError) -> str:
    """Return advice about a path that cannot be written."""
    return REMEDIES.get(error.errno or 0, "Choose another path.")


_unfinished: set[Path] = set()
_lock = threading.Lock()  # held while a temporary file is created or renamed


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder. It is renamed to `path` if the block succeeds, and removed if it raises."""
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        # Follow a symbolic link, so that its target is replaced and not the link.
        target = target.resolve()
        temporary = temporary_path(target)
        try:
            with _lock:
                _unfinished.add(temporary)
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            yield temporary
            keep_or_default_mode(temporary, target)
            flush_to_disk(temporary)
            with _lock:
                os.replace(temporary, target)
        except BaseException:  # KeyboardInterrupt too: an interrupted run leaves no temporary file
            temporary.unlink(missing_ok=True)
            raise
        finally:
            _unfinished.discard(temporary)
    except OSError as error:
        raise FqvitError(f"{path}: cannot be written ({error.strerror or error}). {remedy(error)}") from error


def temporary_path(target: Path, ending: str = ".tmp") -> Path:
    """Return a new hidden name in the same folder, such as .NAME.0a1b2c3d.tmp."""
    # 50 characters have at most 200 bytes in UTF-8, and a file name may have 255.
    return target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}{ending}")


def remove_unfinished() -> None:
    """Remove all temporary files before a background thread ends the process. No file is created or renamed afterwards."""
    _lock.acquire(timeout=5.0)  # never released: the process ends
    for temporary in list(_unfinished):
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Call write(temporary path), then rename the result to `path`. Raises FqvitError if the path cannot be written."""
    with replacing(path) as temporary:
        write(temporary)


def npy_bytes(array: NDArray[Any]) -> bytes:
    """Return the content of a .npy file as bytes: np.save to a full disk would raise an error without errno and path."""
    import numpy as np  # late: `fqvit --help` imports this module

    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def keep_or_default_mode(temporary: Path, target: Path) -> None:
    """Give `temporary`, which only its owner can read, the permissions of the old file, or else those of a plain open()."""
    if target.exists():
        mode = target.stat().st_mode & 0o7777
    else:
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask
    os.chmod(temporary, mode)


def flush_to_disk(path: Path) -> None:
    """Flush a file before it is renamed: otherwise a power failure could leave the new name on an empty file."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
