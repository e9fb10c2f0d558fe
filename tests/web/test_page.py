"""Test `fqvit web`: the folder that it writes, and what it rejects."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from fqvit.errors import FqvitError
from fqvit.runtime.native import Engine
from fqvit.web import page
from tests.cli.command_line import assert_rejected, fqvit

GOLDEN = Path(__file__).parent.parent / "golden"
PROGRAM = GOLDEN / "tiny_v1.fqvit"
DETECTOR = GOLDEN / "detectors" / "mask_rcnn_v1.fqvit"


def test_the_folder_contains_the_page_and_two_copies_of_the_program(small_page: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = fqvit("web", PROGRAM, "-o", out, "--json").json
    assert found == {
        "out": str(out),
        "files": ["index.html", "model.fqvit", "model.fqvit.js"],
        "fingerprint": Engine(PROGRAM).fingerprint,
    }
    assert '<meta name="fqvit-model" content="model.fqvit">' in (out / "index.html").read_text(encoding="utf-8")
    assert (out / "model.fqvit").read_bytes() == PROGRAM.read_bytes()
    script = (out / "model.fqvit.js").read_text()
    assert base64.b64decode(script.split('"')[1]) == PROGRAM.read_bytes()
    assert json.loads((out / "manifest.json").read_text())["format"] == "fqvit web 1"


def test_the_folder_is_named_after_the_program(small_page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = fqvit("web", DETECTOR)
    assert done.code == 0 and "mask_rcnn_v1-web" in done.out
    assert (tmp_path / "mask_rcnn_v1-web" / "model.fqvit").is_file()


def test_without_a_program_the_page_uses_its_embedded_model(small_page: Path, tmp_path: Path) -> None:
    assert fqvit("web", "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "index.html").read_bytes() == small_page.read_bytes()


def test_an_earlier_folder_is_replaced_unless_it_contains_other_files(small_page: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fqvit("web", PROGRAM, "-o", out).code == 0
    assert fqvit("web", "-o", out).code == 0
    assert not (out / "model.fqvit").exists()
    (out / "mine.txt").write_text("x")
    assert_rejected(fqvit("web", PROGRAM, "-o", out), "mine.txt")
    assert (out / "mine.txt").is_file()


def test_large_programs_are_not_written_as_a_script(small_page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_SCRIPT_BYTES", 1000)
    assert page.write_page(tmp_path / "out", PROGRAM) == ["index.html", "model.fqvit"]


def test_damaged_programs_are_rejected_and_nothing_is_written(small_page: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.fqvit"
    bad.write_bytes(PROGRAM.read_bytes()[:-1])
    assert_rejected(fqvit("web", bad, "-o", tmp_path / "out"), "bad.fqvit")
    assert_rejected(fqvit("web", tmp_path / "none.fqvit", "-o", tmp_path / "out"), "none.fqvit")
    assert_rejected(fqvit("web", PROGRAM, "-o", tmp_path / "no" / "out"), "no such folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.fqvit", "built"]


def test_invalid_options_are_rejected(small_page: Path) -> None:
    assert_rejected(fqvit("web"), "--serve")
    assert_rejected(fqvit("web", PROGRAM, "--port", 80), "--port", "--serve")
    assert_rejected(fqvit("web", PROGRAM, "--no-browser"), "--no-browser", "--serve")
    assert_rejected(fqvit("web", "--serve", "--port", 70000), "--port 70000")


def test_the_error_for_a_missing_page_names_the_command_that_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "page_path", lambda: tmp_path / "index.html")
    assert_rejected(fqvit("web", PROGRAM, "-o", tmp_path / "out"), "make wasm web")
    (tmp_path / "index.html").write_text("other")
    with pytest.raises(FqvitError, match="another version"):
        page.page_html(with_model=True)
