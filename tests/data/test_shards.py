"""Test images in tar shards: the same batches as from a folder, and labels from .cls, .json and folder names."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fqvit.data import shards
from fqvit.data.images import ImageFolder, Source
from fqvit.data.preprocess import Preprocess
from fqvit.data.shards import TarShards
from fqvit.distributed.workers import Workers
from fqvit.errors import FqvitError
from tests.cli.command_line import assert_rejected, fqvit

GREY = Preprocess(8, 8, 1, 8, "bicubic", (0.5,), (0.5,))
SINGLE_PROCESS = Workers.alone()


def png(value: int) -> bytes:
    data = io.BytesIO()
    Image.new("L", (8, 8), value).save(data, "png")
    return data.getvalue()


def pack(path: Path, members: dict[str, bytes], kind: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def values(source: Source) -> list[int]:
    return [int(image[0, 0, 0]) for batch in source.batches(4) for image in batch.images]


def labels(path: Path, classes: list[str] | int = 10, ids: tuple[str, ...] = ()) -> list[int]:
    found = TarShards.labelled(path, GREY, classes, ids, SINGLE_PROCESS)
    assert found.labels is not None
    return found.labels


def test_shards_give_the_same_batches_as_a_folder(tmp_path: Path) -> None:
    names = [f"{name}/{i:02}.png" for name in ("cat", "dog") for i in range(9)]
    for value, name in enumerate(names):
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(png(value))
    for shard, part in enumerate((names[:5], names[5:6], names[6:])):
        pack(tmp_path / "tars" / f"x-{shard:03}.tar", {name: (tmp_path / "folder" / name).read_bytes() for name in part})
    for limit in (100, 18, 7, 1):
        folder = ImageFolder.labelled(tmp_path / "folder", GREY, ["dog", "cat"]).limit(limit)
        tars = TarShards.labelled(tmp_path / "tars", GREY, ["dog", "cat"], [], SINGLE_PROCESS).limit(limit)
        assert len(folder) == len(tars) == min(18, limit)
        for a, b in zip(folder.batches(4), tars.batches(4), strict=True):
            np.testing.assert_array_equal(a.images, b.images)
            assert a.labels is not None and b.labels is not None
            np.testing.assert_array_equal(a.labels, b.labels)
            assert [path.split("/")[-2:] for path in a.paths] == [path.split("/")[-2:] for path in b.paths]
    assert values(TarShards.unlabelled(tmp_path / "tars", GREY, SINGLE_PROCESS)) == list(range(18))


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_labels_are_read_from_cls_then_json_then_the_folder(tmp_path: Path, kind: int) -> None:
    deep = "d" * 60
    members = {
        "./a.cls": b"3\n",  # WebDataset sorts members, so labels precede images
        "./a.jpg": png(0),
        "./a.json": b'{"label": 9}',
        "b.jpg": png(1),
        "b.json": json.dumps({"label": 4, "filename": "b.JPEG", "width": 8}).encode(),
        f"train/{deep}/{deep}/7/c.d.PNG": png(2),  # long enough for an extended header; a dot in the stem
        "7/c.json": b'{"caption": "no label in here"}',
        "7/c.png": png(3),
        "readme.txt": b"no image",
        "._a.jpg": b"hidden",
        "dir.tar.json": b"{}",
    }
    path = pack(tmp_path / "x.tar", members, kind)
    assert labels(path) == [3, 4, 7, 7]
    assert values(TarShards.labelled(path, GREY, 10, [], SINGLE_PROCESS)) == [0, 1, 2, 3]
    assert values(TarShards.unlabelled(path, GREY, SINGLE_PROCESS)) == [0, 1, 2, 3]


def test_class_folders_in_shards_are_matched_as_in_plain_folders(tmp_path: Path) -> None:
    for shard, name in enumerate(("n03", "n01", "n02")):
        pack(tmp_path / f"{shard}.tar", {f"val/{name}/a.jpg": png(0), f"val/{name}/b.jpg": png(0)})
    assert labels(tmp_path, 3) == [2, 2, 0, 0, 1, 1]
    assert labels(tmp_path, ["a", "b", "c", "d"], ("n02", "n00", "n03", "n01")) == [2, 2, 3, 3, 0, 0]
    with pytest.raises(FqvitError, match="3 class sub-folders for a model of 5 classes"):
        labels(tmp_path, 5)


def test_patterns_expand_as_in_a_shell(tmp_path: Path) -> None:
    for n in (8, 9, 10):
        pack(tmp_path / f"v-{n:03}.tar", {f"{n}.png": png(n)})
    assert values(TarShards.unlabelled(tmp_path / "v-{008..010}.tar", GREY, SINGLE_PROCESS)) == [8, 9, 10]
    assert values(TarShards.unlabelled(tmp_path / "v-0{10,08}.tar", GREY, SINGLE_PROCESS)) == [8, 10]
    assert values(TarShards.unlabelled(tmp_path / "v-009.tar", GREY, SINGLE_PROCESS)) == [9]
    assert shards.expanded("{a,b}{9..11}") == ["a9", "a10", "a11", "b9", "b10", "b11"]
    with pytest.raises(FqvitError, match=r"v-011.tar: no such file"):
        TarShards.unlabelled(tmp_path / "v-{008..011}.tar", GREY, SINGLE_PROCESS)
    for many in ("{0..999999999}.tar", "{0..999}{0..999}.tar"):
        with pytest.raises(FqvitError, match="more than 100000 files"):
            shards.shard_paths(Path(many))


def test_shards_are_recognized_by_name(tmp_path: Path) -> None:
    assert shards.are_shards(Path("x-{0..3}.tar")) and shards.are_shards(Path("x.tar.gz"))
    assert not shards.are_shards(tmp_path) and not shards.are_shards(tmp_path / "none")
    pack(tmp_path / "a.tar", {"a.png": png(0)})
    assert shards.are_shards(tmp_path)
    (tmp_path / "b.png").write_bytes(png(0))
    with pytest.raises(FqvitError, match=r"contains both tar shards and images \(b.png\)"):
        shards.shard_paths(tmp_path)
    (tmp_path / "b.png").rename(tmp_path / "b.tgz")
    with pytest.raises(FqvitError, match=r"b.tgz: a compressed shard, expected .tar"):
        shards.shard_paths(tmp_path)


def test_unreadable_images_in_shards_are_skipped_as_in_folders(tmp_path: Path) -> None:
    members = {f"{i:03}.png": png(i) for i in range(200)} | {"050.png": b"not an image"}
    source = TarShards.unlabelled(pack(tmp_path / "x.tar", members), GREY, SINGLE_PROCESS)
    assert len(values(source)) == 199
    assert source.skipped == [(f"{tmp_path}/x.tar/050.png", "not an image")]
    members |= {"051.png": b"", "052.png": png(0)[:40]}
    with pytest.raises(FqvitError, match=r"x.tar/050.png: not an image. 3 of 200 images cannot be read"):
        values(TarShards.unlabelled(pack(tmp_path / "x.tar", members), GREY, SINGLE_PROCESS))
    good = TarShards.unlabelled(pack(tmp_path / "x.tar", {"a.png": png(0)}), GREY, SINGLE_PROCESS)
    (tmp_path / "x.tar").unlink()
    with pytest.raises(FqvitError, match="x.tar/byte 512: no such file or directory"):
        values(good)


def test_each_worker_reads_a_share_of_the_headers_and_gets_the_whole_index(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.distributed.together import together

    for n in range(5):
        name = "cat" if n % 2 else "dog"
        members = {f"{name}/{n}{i}.png": png(10 * n + i) for i in range(n)}
        pack(tmp_path / f"{n}.tar", members | {f"{n}.jpg": png(n), f"{n}.cls": b"0"})
    single = TarShards.labelled(tmp_path, GREY, ["cat", "dog"], [], SINGLE_PROCESS)
    for size in (2, 3, 7):
        for each in together(size, lambda worker: TarShards.labelled(tmp_path, GREY, ["cat", "dog"], [], worker)):
            np.testing.assert_array_equal(each.at, single.at)
            assert each.labels == single.labels and each.paths == single.paths


def test_the_error_for_shards_that_differ_between_workers_names_the_worker(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.distributed.together import together

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        for name in ("a.tar", f"b{rank}.tar"):
            pack(tmp_path / str(rank) / name, {"1.png": png(1)})
    with pytest.raises(FqvitError, match=r"worker 1 has 2 shards \(names .*Every machine needs the same files"):
        together(2, lambda worker: TarShards.unlabelled(tmp_path / str(worker.rank), GREY, worker))


def test_commands_accept_shards_and_give_the_same_fingerprint_as_for_a_folder(tmp_path: Path) -> None:
    from fqvit.models import embedded

    pixels, classes = embedded.test_images()
    files = {}
    for i in range(0, 1000, 20):
        data = io.BytesIO()
        Image.fromarray(pixels[i, :, :, 0]).save(data, "png")
        files[f"{classes[i]}/{i:04}.png"] = data.getvalue()
    files = dict(sorted(files.items()))
    for name, content in files.items():
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(content)
    for shard in range(3):
        pack(tmp_path / "tars" / f"{shard}.tar", dict(list(files.items())[shard * 20 : (shard + 1) * 20]))
    made = [
        fqvit("quantize", "--recipe", "ema", "--calib", path, "--images", 40, "-o", tmp_path / "x.fqvit", "--json").json
        for path in (tmp_path / "folder", tmp_path / "tars", tmp_path / "tars" / "{0..2}.tar")
    ]
    assert made[0]["calibration_images"] == 40
    assert len({each["fingerprint"] for each in made}) == 1
    found = [
        fqvit("eval", tmp_path / "x.fqvit", "--data", path, "--limit", 30, "--json").json
        for path in (tmp_path / "folder", tmp_path / "tars")
    ]
    assert found[0]["images"] == 30 and found[0]["top1"] == found[1]["top1"] > 80
    assert_rejected(fqvit("eval", tmp_path / "x.fqvit", "--data", tmp_path / "none.tar"), "none.tar: no such file")
