"""`fqvit embed`: files and folders of embeddings, rejected options, kills and full disks."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fqvit.inference.embeddings import read
from tests.cli.command_line import assert_rejected, fqvit
from tests.distributed.together import ends, start
from tests.inference.pictures import GOLDEN, TOKENS, expected_codes, folder_of, png, tar_of

CLASSIFIER = GOLDEN / "fqvit_v1.fqvit"
DETECTOR = GOLDEN / "detectors" / "opencv_v1.fqvit"


def test_a_folder_is_embedded_in_order(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "photos", 9)
    found = fqvit("embed", TOKENS, place, "-o", tmp_path / "out.npy", "--batch", 4, "--threads", 1, "--json").json
    saved = read(tmp_path / "out.npy")
    assert found["images"] == 9 and found["skipped"] == [] and found["resumed"] == 0
    assert found["fingerprint"] == saved.fingerprint
    assert found["outputs"] == [{"name": "tokens", "kind": "tokens", "dtype": "u8", "shape": list(saved.codes().shape[1:])}]
    np.testing.assert_array_equal(saved.codes(), expected_codes(list(saved.names)))


def test_image_files_keep_their_order_and_names(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "photos", 4)
    images = [place / "1" / "0003.png", place / "0" / "0000.png"]
    done = fqvit("embed", TOKENS, *images, "-o", tmp_path / "out.safetensors")
    assert done.code == 0 and "tokens (u8" in done.out and "2 images" in done.out
    assert list(read(tmp_path / "out.safetensors").names) == [str(path) for path in images]


def test_tar_and_parquet_files_give_the_same_codes(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": png(number), "path": f"{number:04}.png"} for number in range(6)]
    parquet.write_table(arrow.table({"image": images}), tmp_path / "x.parquet")
    tar = tar_of(tmp_path / "x.tar", range(6))
    for place in (tar, tmp_path / "x.parquet"):
        assert fqvit("embed", TOKENS, place, "-o", tmp_path / "out.parquet").code == 0
        saved = read(tmp_path / "out.parquet")
        assert list(saved.names) == [f"{place.name}/{number:04}.png" for number in range(6)]
        np.testing.assert_array_equal(saved.codes(), expected_codes(list(saved.names)))


def test_a_folder_gets_one_file_per_shard(tmp_path: Path) -> None:
    for number in range(3):
        tar_of(tmp_path / "tars" / f"x-{number}.tar", range(number * 5, (number + 1) * 5))
    words = ("embed", TOKENS, tmp_path / "tars", "-o", f"{tmp_path / 'out'}/", "--format", "safetensors", "--json")
    assert (fqvit(*words).json["files"], fqvit(*words).json["kept"]) == (3, 3)
    assert sorted(os.listdir(tmp_path / "out")) == [f"x-{number}.safetensors" for number in range(3)]
    said = fqvit(*words[:-1]).out
    assert "files: 3, already complete: 3" in said


def test_inputs_are_not_overwritten(tmp_path: Path) -> None:
    place = tar_of(tmp_path / "tars" / "x.tar", range(3)).parent
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    for out in (place, f"{place}/", f"{place}/../tars/"):
        assert_rejected(fqvit("embed", TOKENS, place, "-o", out, "--format", "safetensors"), "contains the input x.tar")
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def test_a_classifier_gives_its_logits(tmp_path: Path) -> None:
    fqvit("embed", CLASSIFIER, folder_of(tmp_path / "photos", 2), "-o", tmp_path / "out.npy")
    assert read(tmp_path / "out.npy").output().kind == "logits"


def test_skipped_images_are_reported_as_warnings(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "photos", 150)
    (place / "1" / "0007.png").write_text("no picture")
    done = fqvit("embed", TOKENS, place, "-o", tmp_path / "out.npy", "--json")
    assert done.json["skipped"] == [{"image": "1/0007.png", "reason": "not an image"}] and done.json["images"] == 149
    assert done.err == "fqvit: warning: skipped 1/0007.png: not an image.\n"


def test_wrong_options_are_rejected_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder_of(tmp_path / "photos", 2)
    out = tmp_path / "out.npy"
    assert_rejected(fqvit("embed", TOKENS, place, "-o", tmp_path / "out.csv"), "out.csv: unknown kind", ".npy, .safetensors")
    assert_rejected(fqvit("embed", TOKENS, place, "-o", tmp_path / "none" / "out.npy"), "no such folder")
    assert_rejected(fqvit("embed", TOKENS, place, "-o", out, "--output", "mean"), "no output 'mean', it has tokens")
    assert_rejected(fqvit("embed", TOKENS, place, "-o", out, "--batch", 0), "--batch 0")
    assert_rejected(fqvit("embed", TOKENS, place, "-o", out, "--threads", 0), "threads: 0")
    assert_rejected(fqvit("embed", TOKENS, place, "-o", out, "--format", "parquet"), "only for a folder")
    assert_rejected(fqvit("embed", DETECTOR, place, "-o", out), "detector")
    assert_rejected(fqvit("embed", tmp_path / "none.fqvit", place, "-o", out), "none.fqvit")
    assert_rejected(fqvit("embed", TOKENS, tmp_path / "none.jpg", "-o", out), "none.jpg: no such file")
    (tmp_path / "empty").mkdir()
    assert_rejected(fqvit("embed", TOKENS, tmp_path / "empty", "-o", out), "no images found")
    assert_rejected(fqvit("embed", TOKENS, place, place, "-o", out), "one of 2 inputs")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_rejected(
        fqvit("embed", TOKENS, place, "-o", tmp_path / "out.parquet"), "needs pyarrow", 'pip install "fqvit[parquet]"'
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "photos"]


def test_a_killed_run_continues_and_gives_the_same_file(tmp_path: Path) -> None:
    """Kill a process after it has written three parts, of 16 images each."""
    place = folder_of(tmp_path / "photos", 600)
    out, whole = tmp_path / "out.safetensors", tmp_path / "whole.safetensors"
    small = "import sys, fqvit.inference.embed as e; e.PART_ROWS = 16; from fqvit.cli.app import main; main()"
    words = [sys.executable, "-c", small, "embed", str(TOKENS), str(place), "--batch", "1", "--json", "-o"]
    fqvit("embed", TOKENS, place, "-o", whole)
    process = subprocess.Popen([*words, str(out)], stdout=subprocess.PIPE)
    parts = tmp_path / ".out.safetensors.parts"
    deadline = time.monotonic() + 60
    while len(list(parts.glob("*.safetensors"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not out.exists()
    done = subprocess.run([*words, str(out)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["resumed"] >= 48
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "photos", "whole.safetensors"]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_full_disk_keeps_the_finished_parts(tmp_path: Path) -> None:
    """Use a separate mount namespace, so that nothing stays mounted."""
    place = folder_of(tmp_path / "photos", 200)
    (tmp_path / "disk").mkdir()
    small = "import sys, fqvit.inference.embed as e; e.PART_ROWS = 20; from fqvit.cli.app import main; main()"
    command = shlex.join([sys.executable, "-c", small, "embed", str(TOKENS), str(place), "-o", "out.safetensors"])
    script = f"mount -t tmpfs -o size=64k none disk && cd disk && echo mounted && {command}; code=$?; ls -A; exit $code"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("mounted"):
        pytest.skip("needs permission to mount")
    assert (done.returncode, done.stdout) == (2, "mounted\n.out.safetensors.parts\n"), done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line and "parts are finished and kept" in line


def test_two_processes_write_the_same_file_as_one(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "photos", 30)
    fqvit("embed", TOKENS, place, "-o", tmp_path / "one.safetensors")
    words = ["embed", TOKENS, place, "-o", tmp_path / "two.safetensors", "--json"]
    found = ends(start([["-m", "fqvit", *words]] * 2), 180)
    assert [code for code, _, _ in found] == [0, 0], found
    assert json.loads(found[0][1])["workers"] == 2 and found[1][1] == ""
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_eval_and_calibration_read_parquet_files(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": png(number), "path": f"{number}.png"} for number in range(12)]
    table = arrow.table({"image": images, "label": [number % 10 for number in range(12)]})
    parquet.write_table(table, tmp_path / "x.parquet")
    words = ("quantize", "--calib", tmp_path / "x.parquet", "--images", 8, "-o", tmp_path / "m.fqvit")
    assert fqvit(*words).code == 0
    assert fqvit("eval", tmp_path / "m.fqvit", "--data", tmp_path / "x.parquet", "--json").json["images"] == 12


def test_classify_reads_folders_and_archives(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    place = folder_of(tmp_path / "photos", 4)
    files = fqvit("classify", CLASSIFIER, *sorted(place.rglob("*.png")), "--json").json["results"]
    assert fqvit("classify", CLASSIFIER, place, "--json").json["results"] == files
    inside = fqvit("classify", CLASSIFIER, tar_of(tmp_path / "x.tar", range(4)), "--json").json["results"]
    by_name = {Path(result["image"]).name: result["top"] for result in files}
    assert {Path(result["image"]).name: result["top"] for result in inside} == by_name
    said = fqvit("classify", CLASSIFIER, place).out
    assert said.count("logit") == 4 and str(place) in said
