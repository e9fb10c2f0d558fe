"""Every command of docs/tutorial/first-model.md works when run in order in one empty folder."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import fqvit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "first-model.md"
# A command, or a file that the page asks the reader to save; the file name precedes the code block.
STEPS = re.compile(r"^    \$ (?P<command>[^\n]+)$|`(?P<name>[\w.]+)`:\n\n```\w+\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)
START = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
NEEDS = {"--to onnx": "onnx", ".onnx": "onnxruntime", "report": "jinja2"}


def steps() -> list[tuple[str, str]]:
    """Return (file name, text of the file) or ("", command) for every step of the page."""
    found = STEPS.finditer(PAGE.read_text(encoding="utf-8"))
    return [(step["name"] or "", step["text"] or step["command"].strip()) for step in found]


def test_the_tutorial_contains_the_expected_steps() -> None:
    found = steps()
    assert [name for name, _ in found if name] == ["folders.py", "mine.toml", "run.py"]
    assert len(found) > 25


def test_every_command_of_the_tutorial_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, text in steps():
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
            continue
        missing = [module for words, module in NEEDS.items() if words in text and importlib.util.find_spec(module) is None]
        if missing:
            continue  # other tests check the error message
        program, *words = shlex.split(text)
        if program == "fqvit":
            done = fqvit(*words)
            assert done.code == 0, f"{text}\n{done.err}"
        else:
            start = START.get(program, [program])
            ran = subprocess.run([*start, *words], capture_output=True, text=True, check=False, env=dict(os.environ))
            assert ran.returncode == 0, f"{text}\n{ran.stderr}"
    for made in ("vit.fqvit", "mine.fqvit", "auto.fqvit", "table.md", "k.svg", "vit_c/model.c", "vit_vectors"):
        assert (tmp_path / made).exists(), made
