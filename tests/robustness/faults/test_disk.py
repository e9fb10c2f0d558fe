"""Test full disks and unwritable paths: exit code 2, a one-line error with path and remedy, and an intact old output."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("needs resource limits", allow_module_level=True)

import resource

from tests.cli.command_line import assert_rejected, fqvit
from tests.detect.saved import here as here
from tests.detect.saved import home as home

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "golden" / "fqvit_v1.fqvit"
TABLE = ("table", "--models", "fmnist_vit", "--methods", "minmax", "--images", 4, "--limit", 4)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Make writes beyond a file size fail with EFBIG. This is the closest to a full disk without special permissions."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


CASES = {
    "quantize": (("quantize", "--images", 4, "-o"), "out.fqvit", 4096),
    "onnx": (("export", PROGRAM, "--to", "onnx", "-o"), "out.onnx", 4096),
    "qdq": (("export", PROGRAM, "--to", "qdq", "-o"), "out.onnx", 4096),
    "c": (("export", PROGRAM, "--to", "c", "-o"), "out", 4096),
    "vectors": (("export", PROGRAM, "--to", "vectors", "-o"), "out", 300),
    "predict": (("detect", "predict", "shapes.fqvit", "val", "-o"), "out.json", 100),
    "eval": (("detect", "eval", "shapes.fqvit", "--data", "val", "--annotations", "instances_val.json", "-o"), "out.json", 100),
}


@pytest.mark.parametrize("case", CASES)
def test_a_failed_write_leaves_the_old_output_and_nothing_else(case: str, tmp_path: Path) -> None:
    words, name, size = CASES[case]
    out = tmp_path / name
    for older in (False, True):
        if older and case in ("c", "vectors"):
            assert fqvit(*words, out).code == 0
        elif older:
            out.write_text("old")
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with files_of_at_most(size):
            done = fqvit(*words, out)
        assert_rejected(done, str(out), "cannot be written (File too large). Raise the file size limit")
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ([name] if older else [])


def test_errors_name_images_and_cells_that_cannot_be_written(tmp_path: Path) -> None:
    with files_of_at_most(100):
        assert_rejected(
            fqvit("detect", "draw", "shapes.fqvit", "val", "-o", tmp_path), ".png: cannot be written (File too large)"
        )
        assert_rejected(fqvit(*TABLE, "--cache", tmp_path), "result-", ".json: cannot be written (File too large)")
    assert list(tmp_path.iterdir()) == []


def test_the_error_names_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    assert fqvit("quantize", "--images", 4, "-o", tmp_path / "a.fqvit").code == 0
    with files_of_at_most(4096):
        done = fqvit("report", tmp_path / "a.fqvit", "--limit", 4, "-o", tmp_path / "a.html", "--pictures", tmp_path / "p")
    assert_rejected(done, "a.html: cannot be written (File too large)")
    assert [path.name for path in tmp_path.iterdir()] == ["a.fqvit"]


def test_a_table_writes_only_its_outputs_and_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a program must be computed without a temporary file."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    found = fqvit(*TABLE, "--cache", tmp_path / "cells", "--json").json
    assert found["failed"] == [] and len(found["rows"]) == 2


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("kind", ["onnx", "vectors"])
def test_export_to_a_full_disk_leaves_no_files(kind: str, tmp_path: Path) -> None:
    """Use a separate mount namespace, so that nothing stays mounted."""
    command = shlex.join([sys.executable, "-m", "fqvit", "export", str(PROGRAM), "--to", kind, "-o", "out"])
    mounted = f"mount -t tmpfs -o size=8k none . && cd {shlex.quote(str(tmp_path))} && echo mounted"
    script = f"{mounted} && {command}; code=$?; ls -A; exit $code"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("mounted"):
        pytest.skip("needs permission to mount")
    assert (done.returncode, done.stdout) == (2, "mounted\n"), done.stdout
    said = "fqvit: out: cannot be written (No space left on device). Free disk space or choose another disk.\n"
    assert done.stderr.endswith(said) and "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["models --json", "--help"])
def test_a_full_disk_behind_stdout_is_reported_on_stderr(words: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m fqvit {words} > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("fqvit: ") and len(done.stderr.splitlines()) == 1, done.stderr
    assert "No space left on device. Free disk space" in done.stderr
    both = subprocess.run(f"{command} 2>&1", shell=True, capture_output=True, check=False)
    assert both.returncode == 2


def test_unwritable_folders_are_rejected_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fqvit("quantize", "--images", 4, "-o", tmp_path / "a.fqvit").code == 0
    finished = fqvit(*TABLE, "--cache", tmp_path / "cells", "--json").json["rows"]

    def work(*_: object, **__: object) -> None:
        raise AssertionError("work began")

    draw = ("detect", "draw", "shapes.fqvit", "val", "-o")
    report = ("report", tmp_path / "a.fqvit", "--limit", 4, "-o", tmp_path / "a.html", "--pictures")
    monkeypatch.setattr("fqvit.report.gather.gather", work)
    monkeypatch.setattr("fqvit.detect.fixed.detector.IntegerDetector.detect_image", work)
    monkeypatch.setattr("fqvit.study.cells.Bench._evaluate", work)
    for words in (draw, report):
        assert_rejected(fqvit(*words, PROGRAM / "below"), f"{PROGRAM} is a file, expected a folder")
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK and Path(path).name in ("new", "cells")))
    (tmp_path / "new").mkdir()
    for words in (draw, report):
        assert_rejected(fqvit(*words, tmp_path / "new" / "below"), "new is not writable. Choose another folder")
    for kind in ("onnx", "c", "vectors"):
        assert_rejected(fqvit("export", PROGRAM, "--to", kind, "-o", tmp_path / "new" / "x"), "is not writable")
        assert_rejected(fqvit("export", PROGRAM, "--to", kind, "-o", tmp_path / "none" / "x"), "no such folder")
    assert fqvit(*TABLE, "--cache", tmp_path / "cells", "--json").json["rows"] == finished  # a read-only cache is read
    assert_rejected(fqvit(*TABLE, "--cache", tmp_path / "cells", "--fresh"), "cells: is not writable", "--cache DIR")
