"""Tests of embedding many images: order, parts, interruption, unreadable images, full disks and workers."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fqvit.data.places import open_images, short_name
from fqvit.distributed.workers import Workers
from fqvit.errors import FqvitError
from fqvit.inference import embed, folder
from fqvit.inference.embed import Done, Job, embed_file
from fqvit.inference.embeddings import read, source_of
from fqvit.inference.folder import embed_folder
from fqvit.inference.model import ProgramModel
from tests.distributed.together import together
from tests.inference.pictures import TOKENS, expected_codes, folder_of, png, tar_of


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "PART_ROWS", 10)


def job_of(place: Path, batch: int = 4) -> Job:
    model = ProgramModel(TOKENS, threads=1)
    return Job(model, open_images([place], model.preprocess), model.chosen(None), lambda name: short_name(name, [place]), batch)


def hidden(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name.startswith("."))


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".parquet"])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_the_order_and_the_bits_do_not_depend_on_parts_and_batches(tmp_path: Path, suffix: str, batch: int) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    place = folder_of(tmp_path / "photos", 23)
    done = embed_file(job_of(place, batch), tmp_path / f"out{suffix}")
    found = read(tmp_path / f"out{suffix}")
    assert (done.images, done.resumed, done.skipped) == (23, 0, [])
    assert list(found.names) == sorted(f"{number % 2}/{number:04}.png" for number in range(23))
    np.testing.assert_array_equal(found.codes(), expected_codes(list(found.names)))
    assert hidden(tmp_path) == []


class Killed(BaseException):
    """Stands for a signal that ends the process: no code catches it."""


def kill_after(monkeypatch: pytest.MonkeyPatch, runs: int) -> list[int]:
    """Make the program raise Killed after `runs` batches; returns a list that collects the sizes of the batches."""
    original, sizes = ProgramModel.run, []

    def run(self: ProgramModel, pixels: Any, wanted: Any) -> Any:
        if len(sizes) == runs:
            raise Killed
        sizes.append(len(pixels))
        return original(self, pixels, wanted)

    monkeypatch.setattr(ProgramModel, "run", run)
    return sizes


def test_an_interrupted_run_continues_after_its_finished_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, out = folder_of(tmp_path / "photos", 35), tmp_path / "out.safetensors"
    embed_file(job_of(place), tmp_path / "whole.safetensors")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 7)  # a part has 3 batches, so two parts are finished
        embed_file(job_of(place), out)
    assert not out.exists() and hidden(tmp_path) == [".out.safetensors.parts"]
    with monkeypatch.context() as patch:
        sizes = kill_after(patch, 100)
        done = embed_file(job_of(place, batch=5), out)
    assert (done.images, done.resumed) == (35, 20) and sum(sizes) == 15
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert hidden(tmp_path) == []


def test_parts_of_other_images_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, out = folder_of(tmp_path / "photos", 25), tmp_path / "out.npy"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 4)
        embed_file(job_of(place), out)
    (place / "0" / "0000.png").unlink()
    done = embed_file(job_of(place), out)
    assert (done.images, done.resumed) == (24, 0)
    np.testing.assert_array_equal(read(out).codes(), expected_codes(list(read(out).names)))


def test_unreadable_images_are_skipped_and_named_even_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, out = folder_of(tmp_path / "photos", 250), tmp_path / "out.npy"
    (place / "0" / "0004.png").write_text("no picture")
    (place / "1" / "0249.png").write_text("no picture")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 8)
        embed_file(job_of(place), out)
    done = embed_file(job_of(place), out)
    assert done.skipped == [("0/0004.png", "not an image"), ("1/0249.png", "not an image")]
    assert done.images == 248 and done.resumed == 19
    np.testing.assert_array_equal(read(out).codes(), expected_codes(list(read(out).names)))


def test_too_many_unreadable_images_are_an_error(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "photos", 20)
    (place / "0" / "0004.png").write_text("no picture")
    with pytest.raises(FqvitError, match=r"1 of 20 images cannot be read, at most 1 %"):
        embed_file(job_of(place), tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()
    (place / "0" / "0004.png").write_bytes((place / "0" / "0002.png").read_bytes())
    done = embed_file(job_of(place), tmp_path / "out.npy")  # reads the part with the repaired image again
    assert (done.images, done.skipped) == (20, [])


def test_nothing_is_left_if_no_image_can_be_read(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "photos", 2)
    for path in place.rglob("*.png"):
        path.write_text("no picture")
    with pytest.raises(FqvitError, match="cannot be read|can be read"):
        embed_file(job_of(place), tmp_path / "out.npy")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["photos"]


def test_an_empty_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(FqvitError, match="no images found"):
        job_of(tmp_path / "photos")


def test_a_full_disk_keeps_the_finished_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, out = folder_of(tmp_path / "photos", 35), tmp_path / "out.safetensors"
    original, calls = embed.embeddings.formats._write_array, []

    def full(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(embed.embeddings.formats, "_write_array", full)
        with pytest.raises(FqvitError, match=r"No space left on device\).*2 of 4 parts are finished and kept") as error:
            embed_file(job_of(place), out)
    assert "\n" not in str(error.value) and not out.exists()
    assert embed_file(job_of(place), out).resumed == 20


def test_three_workers_write_the_same_file_as_one(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "photos", 47)
    embed_file(job_of(place), tmp_path / "one.safetensors")

    def work(workers: Workers) -> Done:
        return embed_file(job_of(place), tmp_path / "three.safetensors", workers)

    assert [done.images for done in together(3, work)] == [47, 47, 47]
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "three.safetensors").read_bytes()
    assert hidden(tmp_path) == []


def test_a_large_output_makes_small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(folder_of(tmp_path / "photos", 3))
    assert job.part_rows == 10
    monkeypatch.setattr(embed, "PART_BYTES", 3 * int(np.prod(next(iter(job.wanted.values())).shape)))
    assert job.part_rows == 3


def shards_of(folder: Path) -> Path:
    for number in range(4):
        tar_of(folder / f"x-{number}.tar", range(number * 13, (number + 1) * 13))
    return folder


def run_folder(place: Path, out: Path, workers: Workers | None = None, kind: Any = "safetensors") -> folder.FolderDone:
    model = ProgramModel(TOKENS, threads=1)
    return embed_folder(model, [place], out, model.chosen(None), kind, 4, workers or Workers.alone())


def test_one_file_is_written_per_shard(tmp_path: Path) -> None:
    done = run_folder(shards_of(tmp_path / "tars"), tmp_path / "out")
    assert (done.images, done.files, done.kept) == (52, 4, 0)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"x-{number}.safetensors" for number in range(4)]
    found = read(tmp_path / "out" / "x-2.safetensors")
    assert list(found.names) == [f"x-2.tar/{number:04}.png" for number in range(26, 39)]
    np.testing.assert_array_equal(found.codes(), expected_codes(list(found.names)))


def test_complete_files_are_kept_and_others_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, out = shards_of(tmp_path / "tars"), tmp_path / "out"
    run_folder(place, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "x-1.safetensors").unlink()
    (out / "x-2.safetensors").write_bytes(before["x-2.safetensors"][:-5])
    (out / "x-3.safetensors").write_bytes(b"")
    sizes = kill_after(monkeypatch, 100)
    done = run_folder(place, out)
    assert (done.files, done.kept) == (4, 1) and sum(sizes) == 39
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    tar_of(place / "x-0.tar", range(70, 84))  # other images under the same name
    assert run_folder(place, out).kept == 3
    assert read(out / "x-0.safetensors").names[0] == "x-0.tar/0070.png"


def test_a_run_that_was_killed_in_the_middle_of_a_shard_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, out = shards_of(tmp_path / "tars"), tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(patch, 7)  # in the second part of the second shard
        run_folder(place, out)
    assert hidden(out) == [".x-1.safetensors.parts"]
    done = run_folder(place, out)
    assert (done.images, done.kept, done.resumed) == (52, 1, 10) and hidden(out) == []


def test_the_next_run_removes_the_temporary_files_of_a_killed_run(tmp_path: Path) -> None:
    place, out = shards_of(tmp_path / "tars"), tmp_path / "out"
    run_folder(place, out)
    (out / ".x-1.safetensors.parts").mkdir()  # killed after the output was complete
    (out / ".x-1.safetensors.parts" / "000000.safetensors").write_bytes(b"")
    (out / "x-2.safetensors").unlink()
    (out / ".x-2.safetensors.01234567.tmp").write_bytes(b"")  # killed while the output was written
    (out / ".x-2.safetensors.notes.tmp").write_bytes(b"")
    assert run_folder(place, out).kept == 3
    assert hidden(out) == [".x-2.safetensors.notes.tmp"]


def test_workers_share_the_shards(tmp_path: Path) -> None:
    place = shards_of(tmp_path / "tars")
    run_folder(place, tmp_path / "one")
    found = together(3, lambda workers: run_folder(place, tmp_path / "three", workers))
    assert [(done.images, done.files) for done in found] == [(52, 4)] * 3
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "three" / path.name).read_bytes()


def test_a_folder_of_images_is_cut_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "PIECE", 15)
    done = run_folder(folder_of(tmp_path / "photos", 40), tmp_path / "out")
    assert (done.images, done.files) == (40, 3)
    names = [name for path in sorted((tmp_path / "out").iterdir()) for name in read(path).names]
    assert names == sorted(f"{number % 2}/{number:04}.png" for number in range(40))


def test_the_limit_on_unreadable_images_applies_to_all_shards_together(tmp_path: Path) -> None:
    place = tmp_path / "tars"
    for number in range(9):
        tar_of(place / f"x-{number}.tar", range(number * 13, (number + 1) * 13))
    raw = bytearray((place / "x-0.tar").read_bytes())
    at = raw.index(png(3))
    raw[at : at + 8] = bytes(8)
    (place / "x-0.tar").write_bytes(raw)
    done = run_folder(place, tmp_path / "out")
    assert done.skipped == [("x-0.tar/0003.png", "not an image")] and done.images == 116
    with pytest.raises(FqvitError, match="1 of 13 images cannot be read"):
        run_folder(place / "x-0.tar", tmp_path / "other")


def test_the_digest_in_a_file_tells_what_it_was_made_from(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    place = folder_of(tmp_path / "photos", 5)
    for suffix in (".safetensors", ".parquet"):
        embed_file(job_of(place), tmp_path / f"out{suffix}")
        assert source_of(tmp_path / f"out{suffix}") == job_of(place).digest == read(tmp_path / f"out{suffix}").source
        (tmp_path / f"bad{suffix}").write_bytes(b"x")
        assert source_of(tmp_path / f"bad{suffix}") is None and source_of(tmp_path / f"none{suffix}") is None


class Names(list[str]):
    """A list that can be referenced weakly."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def test_memory_holds_a_few_parts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = {"parts": 0, "rows": 0}
    original_read, original_store = embed.embeddings.read, embed.PartsFolder.store

    def read_and_count(path: Any) -> Any:
        found = original_read(path)
        holder = Names(found.names)
        alive.add(holder)
        most["parts"] = max(most["parts"], len(alive))
        return dataclasses.replace(found, names=holder)

    def store_and_count(self: Any, number: int, part: Any, skipped: Any) -> None:
        most["rows"] = max(most["rows"], len(part))
        original_store(self, number, part, skipped)

    monkeypatch.setattr(embed.embeddings, "read", read_and_count)
    monkeypatch.setattr(embed.PartsFolder, "store", store_and_count)
    for suffix in (".npy", ".safetensors"):
        embed_file(job_of(folder_of(tmp_path / "photos", 195)), tmp_path / f"out{suffix}")
    assert most["parts"] <= 6 and most["rows"] == 10  # there are 20 parts
