"""Damaged and malicious tar files give a one-line error that names file and member, or are skipped as unreadable."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fqvit.data import shards, tars
from fqvit.data.shards import TarShards
from fqvit.distributed.workers import Workers
from fqvit.errors import FqvitError
from tests.data.test_shards import GREY, pack, png, values
from tests.factories import many

ONE_IMAGE = {"0/a.png": png(1)}


def open_tar(path: Path, labels: bool = True) -> TarShards:
    if labels:
        return TarShards.labelled(path, GREY, 2, [], Workers.alone())
    return TarShards.unlabelled(path, GREY, Workers.alone())


def special(path: Path, *infos: tuple[str, bytes, int]) -> Path:
    """Write a tar file with one valid image and members of other types: (name, type, claimed size)."""
    with tarfile.open(path, "w") as tar:
        good = tarfile.TarInfo("0/a.png")
        good.size = len(png(1))
        tar.addfile(good, io.BytesIO(png(1)))
        for name, kind, size in infos:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "/etc/passwd", size
            tar.addfile(info)
    return path


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_never_followed(tmp_path: Path, kind: bytes) -> None:
    path = special(tmp_path / "x.tar", ("0/evil.png", kind, 0))
    with pytest.raises(FqvitError, match=r"x.tar/0/evil.png: a link or device, not a file. 1 of 2 images"):
        values(open_tar(path))
    path = special(tmp_path / "x.tar", ("0/b.cls", kind, 0))
    with pytest.raises(FqvitError, match=r"x.tar: 0/b.cls is not a small regular file"):
        open_tar(path)


@pytest.mark.parametrize("name", ["/etc/a.png", "../a.png", "0/../../a.png", "./../a.png", ".//a.png"])
def test_member_names_outside_the_archive_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(FqvitError, match=r"x.tar: member '.*a.png' points outside the archive"):
        open_tar(pack(tmp_path / "x.tar", {name: png(0)}))


def test_members_with_an_impossible_size_are_rejected(tmp_path: Path) -> None:
    whole = pack(tmp_path / "x.tar", ONE_IMAGE).read_bytes()
    for size in (10**6, 10**15, -5):
        info = tarfile.TarInfo("0/b.png")
        info.size = size
        (tmp_path / "x.tar").write_bytes(whole[:1024] + info.tobuf(tarfile.GNU_FORMAT) + whole[1024:])
        with pytest.raises(FqvitError, match=rf"x.tar: member '0/b.png' has size {size}, but \d+ bytes are left"):
            open_tar(tmp_path / "x.tar")


def test_a_huge_image_counts_as_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LARGEST_IMAGE", 100)
    path = pack(tmp_path / "x.tar", {"0/a.png": bytes(101)})
    with pytest.raises(FqvitError, match=r"x.tar/0/a.png: 101 bytes, at most 100 are allowed"):
        values(open_tar(path))


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    """A truncation between two members leaves only complete members, and is also detected."""
    path = pack(tmp_path / "x.tar", {f"0/{i}.png": png(i) for i in range(3)})
    whole = path.read_bytes()
    end = 3 * 1024
    assert not any(whole[end:])
    for length in [*range(0, end, 64), 100, 1000, end, end + 100]:
        path.write_bytes(whole[:length])
        with pytest.raises(FqvitError, match=r"x.tar: .*(truncated|damaged)"):
            open_tar(path)
    path.write_bytes(whole[: end + 512])
    assert len(open_tar(path)) == 3


def test_concatenated_tar_files_are_rejected(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", ONE_IMAGE)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(FqvitError, match=r"x.tar: data after the end-of-archive marker"):
        open_tar(path)


def test_compressed_files_are_rejected_whatever_their_name(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(gzip.compress(bytes(10**6)))
    with pytest.raises(FqvitError, match=r"x.tar: compressed \(gzip\)"):
        open_tar(path)


def test_extended_headers_must_be_small_and_readable(tmp_path: Path) -> None:
    for kind, size in ((tarfile.GNUTYPE_LONGNAME, 70_000), (tarfile.XHDTYPE, 2_000_000)):
        info = tarfile.TarInfo("x")
        info.type, info.size = kind, size
        (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(size + 2048))
        with pytest.raises(FqvitError, match=rf"x.tar: extended header of {size} bytes"):
            open_tar(tmp_path / "x.tar")
    for text in (
        b"99 path=a\n",
        b"x path=a\n",
        b"10 path=ab",
        b"0 \n",
        b"99999999 path=a\n",
        b"12 size=-1a\n",
        b"21 GNU.sparse.major=1\n",
    ):
        info = tarfile.TarInfo("x")
        info.type, info.size = tarfile.XHDTYPE, len(text)
        (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + text.ljust(512, b"\0") + bytes(1024))
        with pytest.raises(FqvitError, match=r"x.tar: .*(extended header|sparse)"):
            open_tar(tmp_path / "x.tar")


def test_sparse_members_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match=r"'0/b.png' is sparse"):
        open_tar(special(tmp_path / "x.tar", ("0/b.png", tarfile.GNUTYPE_SPARSE, 0)))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", png(0)), ("a.cls", b"1"), ("b.png", png(0))], "b.png has no label, expected b.cls next to it"),
        ([("a.png", png(0)), ("b.png", png(0)), ("a.cls", b"1")], "a.png has no label"),
        ([("0/a.png", png(0)), ("b.cls", b"1")], "b.cls has no image next to it"),
        ([("a.l.png", png(0)), ("a.r.png", png(0)), ("a.cls", b"1")], "a.l.png and a.r.png share the label a.cls"),
        ([("0/a.png", png(0)), ("0/b.png", png(0)), ("0/a.png", png(0))], "duplicate member 0/a.png"),
        ([("a.cls", b"one"), ("a.png", png(0))], "a.cls contains b'one', expected a class index"),
        ([("a.cls", b"-1"), ("a.png", png(0))], "expected a class index"),
        ([("a.cls", b""), ("a.png", png(0))], "expected a class index"),
        ([("a.cls", b"9" * 70_000), ("a.png", png(0))], "a.cls is not a small regular file"),
        ([("a.cls", b"2"), ("a.png", png(0))], "x.tar/a.png: class 2, expected less than 2"),
        ([("a.json", b"{" * 60_000), ("a.png", png(0))], "a.json is not valid JSON"),
        ([("a.json", b'{"label": "cat"}'), ("a.png", png(0))], "a.json has label 'cat'"),
        ([("a.json", b'{"label": true}'), ("a.png", png(0))], "expected a class index"),
        ([("a.txt", b"")], "no images in 1 tar files"),
        ([], "no images in 1 tar files"),
    ],
)
def test_invalid_labels_are_reported(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with pytest.raises(FqvitError, match=r"x\.tar") as error:
        open_tar(path)
    assert message in str(error.value)


def test_errors_name_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "x.tar").mkdir()
    with pytest.raises(FqvitError, match="x.tar"):
        shards.shard_paths(tmp_path)
    with pytest.raises(FqvitError, match="x.tar: cannot be read"):
        list(tars.members(tmp_path / "x.tar"))


@many
@given(st.data())
def test_any_damage_gives_an_fqvit_error_or_the_members_that_tarfile_finds(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("tar") / "x.tar"
    pack(path, {"0/a.png": png(1), "1/" + "b" * 120 + ".png": png(2), "c.cls": b"1", "c.png": png(3)}, tarfile.PAX_FORMAT)
    content = bytearray(path.read_bytes()[:6144])
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content) + bytes(1024))
    try:
        found = list(tars.members(path))
    except FqvitError:
        return
    with tarfile.open(path, "r:") as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar if not info.isdir()]
    assert [(m.name.rstrip("/"), m.offset, m.size) for m in found] == expected


def test_only_the_headers_of_large_members_are_read(tmp_path: Path) -> None:
    """The members of 60 MB each are sparse on disk."""
    path = tmp_path / "x.tar"
    size = 60 << 20
    with path.open("wb") as file:
        for i in range(20):
            info = tarfile.TarInfo(f"0/{i}.png")
            info.size = size
            file.write(info.tobuf(tarfile.GNU_FORMAT))
            file.seek(size, os.SEEK_CUR)
        file.write(bytes(1024))
    assert len(open_tar(path)) == 20


def test_members_agree_with_tarfile_on_common_formats(tmp_path: Path) -> None:
    members = {"a/" + "x" * n + ".png": png(n) for n in (1, 90, 99, 100, 101, 200)}
    paths = [pack(tmp_path / f"{kind}.tar", members, kind) for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
    paths.append(special(tmp_path / "x.tar", ("0/l.png", tarfile.SYMTYPE, 0), ("0/d", tarfile.DIRTYPE, 0)))
    for path in paths:
        with tarfile.open(path, "r:") as tar:
            expected = [(info.name, info.offset_data, info.size, info.isreg()) for info in tar if not info.isdir()]
        assert [tuple(member) for member in tars.members(path)] == expected
