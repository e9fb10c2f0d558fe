"""Test that any number of workers gives the same fingerprint and top-1, and that all of them end when one is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fqvit.data.images import ImageArray, ImageFolder
from fqvit.distributed import watchdog
from fqvit.distributed.workers import Workers, cores
from fqvit.errors import FqvitError
from fqvit.evaluate.accuracy import measure
from fqvit.lowering.lower import lower
from fqvit.models.device import own_gpu
from fqvit.quant.batches import ImageSample, sample_positions, sample_size
from fqvit.quant.calibrate import calibrate
from fqvit.quant.recipe import RECIPES
from tests.cli.command_line import assert_rejected, fqvit
from tests.distributed.together import ThreadGroup, ends, start, together
from tests.factories import few_steps as few_steps
from tests.factories import float_model, images_for
from tests.factories import one_thread as one_thread

MODEL = float_model("vit")
PICTURES = images_for(MODEL.preprocess, 53, 4)
SOURCE = ImageArray(PICTURES, [i % 5 for i in range(53)], MODEL.preprocess)


def test_shares_are_consecutive_and_cover_every_batch_once() -> None:
    for size in range(1, 9):
        workers = [Workers(ThreadGroup(rank, size, {})) for rank in range(size)]
        for count in (0, 1, 5, 8, 63):
            assert [k for worker in workers for k in worker.share(count)] == list(range(count))
            assert max(len(worker.share(count)) for worker in workers) <= -(-count // size)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_workers_gather_broadcast_and_merge_in_rank_order(size: int) -> None:
    class Words:
        def __init__(self, word: str) -> None:
            self.words = [word]

        def state(self) -> list[str]:
            return self.words

        def merge(self, later: list[str]) -> None:
            self.words += later

    def work(worker: Workers) -> tuple[list[int], str, list[str]]:
        words = Words(str(worker.rank))
        worker.merge(words)
        return worker.gather(worker.rank), worker.broadcast(f"from {worker.rank}"), words.words

    found = together(size, work)
    assert all(gathered == list(range(size)) and word == "from 0" for gathered, word, _ in found)
    assert found[0][2] == [str(rank) for rank in range(size)]


def test_arrays_keep_their_types_and_floats_keep_their_bits_between_workers() -> None:
    values = {
        "a": np.array([[1.5, -np.inf, np.nan]]),
        "b": np.zeros((0, 3), np.uint8),
        "c": [0.1, -np.inf, 2**62, None, True, "é", np.float64(0.1), np.int64(3)],
    }
    (_, found) = together(2, lambda worker: worker.broadcast(values if worker.first else None))
    np.testing.assert_array_equal(found["a"], values["a"])
    assert found["a"].dtype == np.float64 and found["b"].shape == (0, 3) and found["b"].dtype == np.uint8
    assert found["c"] == values["c"]
    with pytest.raises(TypeError, match="object cannot be sent"):
        together(2, lambda worker: worker.broadcast(object()))


@pytest.mark.parametrize("name", RECIPES)
def test_calibration_gives_the_same_program_for_every_number_of_workers(name: str) -> None:
    recipe = msgspec.structs.replace(RECIPES[name], batch=6, images=1000, **({"max_loss": 5.0} if name == "auto" else {}))
    single = calibrate(MODEL, SOURCE, recipe)
    assert single.images == 53
    # A plain iterable of the same images gives the same calibration.
    assert calibrate(MODEL, [PICTURES], recipe).to_json() == single.to_json()
    for size in (2, 3):
        found = together(size, lambda worker: calibrate(MODEL, SOURCE, recipe, workers=worker))
        for each in found:
            assert each.to_json() == single.to_json()
            assert each.choice == single.choice
            if recipe.integer:
                assert lower(MODEL, each).fingerprint() == lower(MODEL, single).fingerprint()


def test_workers_without_batches_do_not_change_the_result() -> None:
    recipe = msgspec.structs.replace(RECIPES["fq-vit"], batch=16)
    source = SOURCE.take(range(20))
    single = calibrate(MODEL, source, recipe).to_json()
    assert {each.to_json() for each in together(5, lambda worker: calibrate(MODEL, source, recipe, workers=worker))} == {single}


def test_sample_positions_match_the_sample_that_a_pass_collects() -> None:
    for total in (1, 5, 6, 40, 300):
        sample = ImageSample(5)
        for at in range(0, total, 7):
            sample.add(np.arange(at, min(at + 7, total)).astype(np.uint16)[:, None, None, None])  # type: ignore[arg-type]
        assert sample.images().ravel().tolist() == sample_positions(total, 5)


def test_accuracy_is_the_same_for_every_number_of_workers() -> None:
    def run(images: np.ndarray) -> np.ndarray:
        return images.reshape(len(images), -1)[:, :5].astype(np.int32)

    single = measure(run, SOURCE.batches(4))
    for size in (2, 3, 20):
        for each in together(size, lambda w: measure(run, SOURCE.batches(4, w.share(14)), w)):
            assert (each.images, each.top1, each.top5) == (53, single.top1, single.top5)
            np.testing.assert_array_equal(each.predictions, single.predictions)
    with pytest.raises(FqvitError, match="no images were read"):
        together(2, lambda worker: measure(run, [], worker))


def unreadable(folder: Path, count: int, bad: list[int]) -> ImageFolder:
    from PIL import Image

    for i in range(count):
        Image.fromarray(PICTURES[i % 53]).save(folder / f"{i:03}.png")
    for i in bad:
        (folder / f"{i:03}.png").write_bytes(b"")
    return ImageFolder.unlabelled(folder, MODEL.preprocess)


@pytest.mark.parametrize("name", ["ema", "fq-vit-original"])
def test_unreadable_images_are_counted_over_all_workers(name: str, tmp_path: Path) -> None:
    recipe = msgspec.structs.replace(RECIPES[name], batch=4, shuffle=None)
    folder = unreadable(tmp_path, 200, [10, 199])
    single = calibrate(MODEL, folder, recipe)
    assert single.images == 198 and len(folder.skipped) == 2

    def work(worker: Workers) -> tuple[str, list[str]]:
        own = ImageFolder(folder.paths, None, MODEL.preprocess)
        return calibrate(MODEL, own, recipe, workers=worker).to_json(), [Path(name).name for name, _ in own.skipped]

    assert together(3, work) == [(single.to_json(), ["010.png", "199.png"])] * 3
    (tmp_path / "100.png").write_bytes(b"")
    with pytest.raises(FqvitError, match=r"010.png: not an image. 3 of 200 images cannot be read"):
        together(3, work)


def test_workers_with_different_recipes_are_rejected() -> None:
    def work(worker: Workers) -> None:
        calibrate(MODEL, SOURCE, RECIPES["ema" if worker.rank == 1 else "minmax"], workers=worker)

    with pytest.raises(FqvitError, match=r"worker 1 has recipe ema .*worker 0 has recipe minmax .*same command"):
        together(2, work)


def test_workers_with_different_images_are_rejected() -> None:
    def work(worker: Workers) -> None:
        calibrate(MODEL, SOURCE.take(range(20 + worker.rank)), RECIPES["minmax"], workers=worker)

    with pytest.raises(FqvitError, match=r"worker 1 has 21 images, worker 0 has 20 images"):
        together(2, work)


def test_images_are_sampled_only_for_recipes_that_need_a_second_pass() -> None:
    sizes = {name: sample_size(recipe) for name, recipe in RECIPES.items()}
    second = {
        "bit-split": 256,
        "w4": 256,
        "w6a6": 512,
        "w4a4": 512,
        "embedding": 384,
        "fqvit": 24,
        "fast": 24,
        "npu": 24,
        "auto": 128,
        "ptq-vit": 128,
        "ptq4vit": 128,
        "repq-vit": 128,
    }
    assert {name: size for name, size in sizes.items() if size} == second


def test_a_process_without_torchrun_is_the_only_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (None, "1"):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if size:
            monkeypatch.setenv("WORLD_SIZE", size)
        assert Workers.from_environment() is Workers.alone()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert_rejected(fqvit("eval", "none.fqvit"), "WORLD_SIZE is 2, but RANK is not set", "torchrun")
    monkeypatch.setenv("RANK", "first")
    assert_rejected(fqvit("eval", "none.fqvit"), "RANK=first", "expected a number")
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert_rejected(fqvit("eval", "none.fqvit"), "WORLD_SIZE=two", "expected a number")


def test_workers_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    else:
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for world, local, expected in ((None, None, 64), ("16", "8", 8), ("3", "3", 21), ("128", "128", 1), ("4", None, 16)):
        for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
            monkeypatch.delenv(name, raising=False)
            if value:
                monkeypatch.setenv(name, value)
        assert cores() == expected


def test_workers_on_one_machine_are_assigned_its_gpus_round_robin() -> None:
    for rank, count, expected in (
        (None, 4, "cuda"),
        ("0", 4, "cuda:0"),
        ("3", 4, "cuda:3"),
        ("5", 4, "cuda:1"),
        ("1", 0, "cuda"),
    ):
        assert own_gpu({} if rank is None else {"LOCAL_RANK": rank}, count) == expected
    with pytest.raises(FqvitError, match="LOCAL_RANK=x: expected a number"):
        own_gpu({"LOCAL_RANK": "x"}, 2)


# The tests below start real processes. Each process needs seconds to import torch, so there are few such tests.


def test_torchrun_gives_the_same_fingerprint_as_a_single_process(tmp_path: Path) -> None:
    single = fqvit("quantize", "--recipe", "fq-vit", "--images", 100, "-o", tmp_path / "one.fqvit", "--json").json
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fqvit", "quantize"]
    words += ["--recipe", "fq-vit", "--images", "100", "-o", str(tmp_path / "two.fqvit"), "--json"]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, env=single_threaded(), check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["workers"] == 2 and found["fingerprint"] == single["fingerprint"]
    assert (tmp_path / "one.fqvit").read_bytes() == (tmp_path / "two.fqvit").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.fqvit", "two.fqvit"]


def single_threaded() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_three_processes_give_the_same_top1_as_one_process_and_only_the_first_prints(tmp_path: Path) -> None:
    program = tmp_path / "one.fqvit"
    fqvit("quantize", "--images", 64, "-o", program)
    words = ["eval", program, "--limit", "333", "--json"]
    single = fqvit(*words).json
    found = ends(start([["-m", "fqvit", *words]] * 3))
    assert [code for code, _, _ in found] == [0, 0, 0], found
    result = json.loads(found[0][1])
    assert result["workers"] == 3
    for key in ("top1", "top5", "images", "skipped"):
        assert result[key] == single[key]
    assert [out for _, out, _ in found[1:]] == ["", ""] and [err for _, _, err in found] == [""] * 3


def test_an_error_in_one_worker_ends_all_workers_with_a_one_line_error(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "calib").mkdir()
    Image.fromarray(PICTURES[0]).save(tmp_path / "calib" / "a.png")
    words = ["-m", "fqvit", "quantize", "-o", tmp_path / "x.fqvit", "--calib"]
    began = time.monotonic()
    found = ends(start([[*words, tmp_path / "calib"], [*words, tmp_path / "nowhere"], [*words, tmp_path / "calib"]]))
    assert [code for code, _, _ in found] == [2, 2, 2], found
    lines = [line for _, _, err in found for line in err.splitlines()]
    assert len(lines) == 1 and "nowhere: no such folder" in lines[0] and lines[0].startswith("fqvit: worker 1 on "), lines
    assert time.monotonic() - began < 50
    assert [path.name for path in tmp_path.iterdir()] == ["calib"]


def test_the_rendezvous_times_out_when_a_worker_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import HashStore

    monkeypatch.setattr(watchdog, "RENDEZVOUS", 0.2)
    store = HashStore()
    with pytest.raises(FqvitError, match="1 of 2 started within 0 seconds"):
        watchdog.Watchdog(store, 0, 2, None).wait_for_all()
    watchdog.Watchdog(store, 1, 2, None).wait_for_all()


ARRIVE = """
import sys
from pathlib import Path
import fqvit.distributed.group
from fqvit.distributed.workers import Workers
Path(sys.argv[1], sys.argv[2]).touch()
Workers.from_environment()
"""


@pytest.mark.skipif(os.name == "nt", reason="needs SIGTERM, which Windows does not have")
def test_workers_in_the_rendezvous_handle_signals(tmp_path: Path) -> None:
    processes = start([["-c", ARRIVE, tmp_path, "first"], ["-c", ""]])
    processes += start([["-c", ""], ["-c", ARRIVE, tmp_path, "second"]])
    until = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1.0)
    waiting = [processes[0], processes[3]]
    assert [process.poll() for process in waiting] == [None, None]
    for process in waiting:
        process.terminate()
    found = ends(waiting, 20)
    assert [code for code, _, _ in found] == [2, 2]
    lines = [line for _, _, err in found for line in err.splitlines()]
    assert len(lines) == 1 and "was lost while the workers started" in lines[0], lines
    ends(processes[1:3])


WAIT = """
import sys, time
from pathlib import Path
from fqvit.system.files import replacing
from fqvit.distributed.workers import Workers
workers = Workers.from_environment()
with replacing(sys.argv[1] + "/out") as temporary:
    temporary.write_text("half")
    Path(sys.argv[1], f"ready{workers.rank}").touch()
    if workers.first:
        time.sleep(100)
    if workers.rank == 2:
        workers.close()
    workers.broadcast("")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killing_a_worker_ends_all_workers_with_a_one_line_error_and_no_partial_file(tmp_path: Path) -> None:
    processes = start([["-c", WAIT, tmp_path]] * 3, FQVIT_LOST_AFTER="3")
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("ready*"))) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(4)  # longer than FQVIT_LOST_AFTER: workers that compute or wait still send heartbeats
    assert [process.poll() for process in processes] == [None] * 3
    processes[1].kill()
    killed = time.monotonic()
    found = ends(processes)
    assert time.monotonic() - killed < 30
    assert [code for code, _, _ in found] == [2, -signal.SIGKILL, 2], found
    lines = [line for _, _, err in found for line in err.splitlines()]
    assert len(lines) == 1 and lines[0].startswith("fqvit: worker 1 (") and "was lost" in lines[0], lines
    assert "start again" in lines[0]
    # A killed process cannot remove its temporary file; the other workers removed theirs.
    assert len(list(tmp_path.glob(".out.*.tmp"))) <= 1 and not (tmp_path / "out").exists()
