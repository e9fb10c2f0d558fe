"""Test kill -9 during writes. `make faults` runs the long version, with all commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# Runs in a process without threads. It forks, and each child kills itself after the n-th line of the writing code, for every n.
EVERY_LINE = """
import json, os, shutil, sys
from pathlib import Path
from fqvit.export.folder import replacing_folder, write_manifest
from fqvit.system.files import write_atomically
from tests.robustness.faults.jobs import digest, leftovers
from tests.robustness.faults.kills import count_lines

home = Path(sys.argv[1])
target = home / "out"

def write(text):
    if sys.argv[2] == "file":
        write_atomically(target, lambda path: path.write_text(text))
    else:
        with replacing_folder(target) as folder:
            for name in "ab":
                (folder / name).write_text(text)
            write_manifest(folder, "test 1", {})

def clean():
    for path in home.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()

whole = {}
for text in ("old", "new"):
    write(text)
    whole[text] = digest(target)
stages = {}
for older in (False, True):
    line, killed = 0, True
    while killed:
        line += 1
        clean()
        if older:
            write("old")
        child = os.fork()
        if child == 0:
            count_lines(line)
            write("new")
            sys.settrace(None)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        found, left = digest(target), leftovers(home)
        aside = [path for path in left if path.suffix == ".old" and digest(path) == whole["old"]]
        if found == whole["new"]:
            stage = "new"
        elif found == (whole["old"] if older else None):
            stage = "old"
        else:  # between the two renames of a folder: the old one is moved away, the new one is not yet in place
            assert found is None and aside, (older, line)
            stage = "aside"
        assert {target, *left} >= set(home.iterdir()), (older, line)
        stages[stage] = stages.get(stage, 0) + 1
        write("new")  # leftovers do not hinder the next run
        assert digest(target) == whole["new"]
print(json.dumps(stages))
"""


@pytest.mark.parametrize("what", ["file", "folder"])
def test_an_output_is_the_old_or_the_new_one_after_a_kill_at_any_line(what: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", EVERY_LINE, str(tmp_path), what]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"old"' in done.stdout and '"new"' in done.stdout


def test_a_killed_export_can_be_repeated() -> None:
    words = [sys.executable, "scripts/faults.py", "kill", "--times", "8", "--only", "c"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "no fault" in done.stdout, done.stdout + done.stderr
