"""Writing files so that a reader finds the old one or the new one, never half of one.

It writes and nothing else; what stands in a .fqvit file is ir/program.py's business.
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
    errno.EACCES: "Choose a folder that you may write to.",
    errno.EPERM: "Choose a folder that you may write to.",
    errno.EROFS: "Choose a folder on a writable disk.",
    errno.ENOSPC: "Free some space on that disk or choose another.",
    errno.EDQUOT: "Free some of your quota or choose another disk.",
    errno.EFBIG: "Raise the file size limit or choose another disk.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def remedy(error: OSError) -> str:
    """What to do about a path that cannot be written."""
    return REMEDIES.get(error.errno or 0, "Choose another path.")


_unfinished: set[Path] = set()
_lock = threading.Lock()  # held while a temporary file appears or becomes the real one


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder; it becomes `path` if the block ends well and is removed if it does not."""
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        # A link is followed, so that the file it names is replaced and not the link.
        target = target.resolve()
        temporary = temporary_beside(target)
        try:
            with _lock:
                _unfinished.add(temporary)
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            yield temporary
            keep_or_default_mode(temporary, target)
            flush_to_disk(temporary)
            with _lock:
                os.replace(temporary, target)
        except BaseException:  # KeyboardInterrupt too: an interrupted run leaves nothing behind
            temporary.unlink(missing_ok=True)
            raise
        finally:
            _unfinished.discard(temporary)
    except OSError as error:
        raise FqvitError(f"{path}: cannot be written ({error.strerror or error}). {remedy(error)}") from error


def temporary_beside(target: Path, ending: str = ".tmp") -> Path:
    """A new name in the same folder, by which people and `ls -a` know what is unfinished: .NAME.xxxxxxxx.tmp"""
    # 50 letters: four bytes each at most, and a name may have 255.
    return target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}{ending}")


def remove_unfinished() -> None:
    """For a thread that is about to end the process under the main thread's hands: nothing is begun or finished after this."""
    _lock.acquire(timeout=5.0)  # never released
    for temporary in list(_unfinished):
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Calls write(temporary path) and moves the result to `path`; FqvitError names the path if the disk refuses."""
    with replacing(path) as temporary:
        write(temporary)


def npy_bytes(array: NDArray[Any]) -> bytes:
    """A .npy file. Written at once by whoever wants it: on a full disk np.save's own error has neither number nor path."""
    import numpy as np  # late: `fqvit --help` passes here

    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def keep_or_default_mode(temporary: Path, target: Path) -> None:
    """Unfinished files are private; give what the old file had, or what a plain open() would have given."""
    if target.exists():
        mode = target.stat().st_mode & 0o7777
    else:
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask
    os.chmod(temporary, mode)


def flush_to_disk(path: Path) -> None:
    """Before the rename, or a power cut could leave the new name on an empty file."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
