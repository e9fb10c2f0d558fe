"""`fqvit --help` groups the commands, and shells complete commands, options and names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from fqvit.cli.app import app
from fqvit.cli.groups import GROUPS, complete_model, complete_recipe
from tests.cli.command_line import fqvit

PROGRAM = Path(sys.executable).with_name("fqvit")


def test_every_command_is_in_one_group_and_in_the_help() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert len(grouped) == len(set(grouped)) and commands - set(grouped) == set()
    text = fqvit("--help").out
    assert [line.rstrip(":") for line in text.splitlines() if line.rstrip(":") in GROUPS] == list(GROUPS)
    for name in commands:
        assert any(line.startswith(f"  {name} ") for line in text.splitlines()), name


def test_names_of_recipes_and_models_are_completed() -> None:
    assert complete_recipe("w4") == ["w4", "w4a4"] and "fqvit" in complete_recipe("")
    assert complete_model("fmnist") == ["fmnist_vit", "fmnist_swin"]


def completions(*words: str) -> list[str]:
    """Complete the last word, as bash does with the script of --show-completion."""
    about = {"_FQVIT_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(("fqvit", *words)), "COMP_CWORD": str(len(words))}
    done = subprocess.run([str(PROGRAM)], env={**os.environ, **about}, capture_output=True, text=True, check=False)
    return done.stdout.split()


@pytest.mark.skipif(not PROGRAM.is_file(), reason="fqvit is not installed as a command")
def test_shells_complete_commands_options_and_values() -> None:
    assert completions("quan") == ["quantize"]
    assert completions("detect", "pre") == ["predict"]
    assert completions("classify", "--to") == ["--top"]
    assert completions("quantize", "--recipe", "w4") == ["w4", "w4a4"]
    assert completions("export", "--to", "v") == ["vectors"]


@pytest.mark.skipif(not PROGRAM.is_file() or shutil.which("bash") is None, reason="needs bash and the command fqvit")
def test_bash_accepts_the_completion_script() -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run(
        [str(PROGRAM), "--show-completion", "bash"], env=environment, capture_output=True, text=True, check=True
    )
    subprocess.run(["bash", "-n"], input=shown.stdout, text=True, check=True)
    assert "_FQVIT_COMPLETE" in shown.stdout


def installed(shell: str, home: Path) -> dict[str, str]:
    """Run `fqvit --install-completion` with a home folder of its own; return the environment."""
    folders = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}"}
    environment = {**os.environ, **folders, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    subprocess.run([str(PROGRAM), "--install-completion", shell], env=environment, capture_output=True, check=True)
    return environment


@pytest.mark.skipif(not PROGRAM.is_file() or shutil.which("zsh") is None, reason="needs zsh and the command fqvit")
def test_zsh_completes_with_the_first_tab(tmp_path: Path) -> None:
    environment = installed("zsh", tmp_path)
    # As on the first Tab, with the functions of the completion system replaced by ones that print.
    state = (
        "fpath=(~/.zfunc); compdef() { :; }; _arguments() { print -r -- $@; }; _files() { print files; }; autoload -Uz _fqvit"
    )
    for words, expected in (("quan", "quantize"), ("quantize --recipe w4", "w4a4"), ("classify photo", "files")):
        line = f"{state}; words=(fqvit {words}); CURRENT=$#words; _fqvit; _fqvit_completion"
        shown = subprocess.run(["zsh", "-f", "-c", line], env=environment, capture_output=True, text=True, check=True).stdout
        assert shown.count(expected) == 2, f"{words}: {shown}"


@pytest.mark.skipif(not PROGRAM.is_file() or shutil.which("fish") is None, reason="needs fish and the command fqvit")
def test_fish_completes_commands_options_values_and_files(tmp_path: Path) -> None:
    environment = installed("fish", tmp_path)
    (tmp_path / "photo.jpg").touch()
    for line, expected in (("quan", "quantize"), ("quantize --recipe w4a", "w4a4"), ("classify pho", "photo.jpg")):
        command = ["fish", "-c", f"complete -C 'fqvit {line}'"]
        shown = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert [found.split("\t")[0] for found in shown.splitlines()] == [expected]
