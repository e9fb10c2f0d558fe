"""Test atomic writing: the target is the old file or the new one, and no temporary file is left."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from fqvit.errors import FqvitError
from fqvit.system.files import replacing, write_atomically


def test_a_new_file_has_its_content_and_default_permissions(tmp_path: Path) -> None:
    write_atomically(tmp_path / "new", lambda path: path.write_bytes(b"abc"))
    (tmp_path / "plain").touch()
    assert (tmp_path / "new").read_bytes() == b"abc"
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert len(list(tmp_path.iterdir())) == 2


def test_an_existing_file_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    target.chmod(0o640)
    with replacing(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
        assert temporary.parent == tmp_path
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", lambda path: path.write_text("new"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_old_file_unchanged(tmp_path: Path, fault: type[BaseException]) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(fault), replacing(target) as temporary:
        temporary.write_text("half")
        raise fault
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_over_the_size_limit_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(FqvitError, match=r"big: cannot be written \(File too large\)"):
            write_atomically(tmp_path / "big", lambda path: path.write_bytes(bytes(10_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_error_names_the_path_and_the_remedy(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with pytest.raises(FqvitError, match=r"model.fqvit: cannot be written \(No space left on device\). Free disk space"):
        write_atomically(tmp_path / "model.fqvit", full)
    assert list(tmp_path.iterdir()) == []


def test_missing_folders_and_folders_instead_of_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match=r"none/file: cannot be written \(No such file or directory\). Create the folder"):
        write_atomically(tmp_path / "none" / "file", lambda path: path.touch())
    with pytest.raises(FqvitError, match="Choose a file name, not a folder"):
        write_atomically(tmp_path, lambda path: path.touch())
    (tmp_path / "file").touch()
    with pytest.raises(FqvitError, match="Choose a path inside a folder"):
        write_atomically(tmp_path / "file" / "below", lambda path: path.touch())


def test_a_read_only_folder_is_rejected(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root ignores permissions")
    tmp_path.chmod(0o500)
    with pytest.raises(FqvitError, match="Choose a folder with write permission"):
        write_atomically(tmp_path / "file", lambda path: path.touch())


def test_a_long_name_outside_ascii_is_accepted(tmp_path: Path) -> None:
    target = tmp_path / ("猫" * 80 + ".fqvit")  # 246 bytes; the limit of a file name is 255
    write_atomically(target, lambda path: path.write_text("new"))
    assert target.read_text() == "new" and list(tmp_path.iterdir()) == [target]
