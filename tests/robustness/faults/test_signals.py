"""Test termination signals: exit code, terminal and cleanup. `make faults` runs the long version."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("needs a pseudo terminal", allow_module_level=True)

from tests.robustness.faults import terminal

# A command that sends itself a signal while it shows a progress bar and has partially written a file.
WORK = """
import os, sys
from fqvit.cli.commands import models
from fqvit.system.files import replacing
from fqvit.system.progress import track

def run(as_json):
    with replacing("out") as temporary:
        temporary.write_text("half")
        for step in track(range(9), 9, "working"):
            if step == 3:
                os.kill(os.getpid(), NUMBER)
                END

models.run = run
sys.argv = ["fqvit", "models"]
from fqvit.__main__ import main
main()
"""

# Sends the signal when a certain module is imported: short commands spend most of their time in imports.
IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "MODULE":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["fqvit", "quantize"]
from fqvit.__main__ import main
main()
"""


def work(number: int, end: str = "pass") -> list[str]:
    return ["-c", WORK.replace("NUMBER", str(int(number))).replace("END", end)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_command_shows_the_cursor_and_leaves_no_file(number: int, tmp_path: Path) -> None:
    ended = terminal.run(work(number), tmp_path)
    assert ended.faults([128 + number]) == []
    assert "working" in ended.screen and terminal.HIDE in ended.screen
    assert list(tmp_path.iterdir()) == []


def test_the_exit_code_is_right_even_if_the_interruption_becomes_another_exception(tmp_path: Path) -> None:
    """Extension modules turn an interruption during their import into other exceptions."""
    code = work(signal.SIGINT)[1].replace("os.kill(os.getpid(), 2)", "try: os.kill(os.getpid(), 2)")
    code = code.replace(
        "                pass", "                except KeyboardInterrupt: raise ImportError('torch') from None"
    )
    ended = terminal.run(["-c", code], tmp_path)
    assert ended.faults([130]) == [] and list(tmp_path.iterdir()) == []


def test_a_signal_that_python_drops_is_sent_again(tmp_path: Path) -> None:
    """Python only logs exceptions raised in callbacks of weak references, which are frequent during imports."""
    code = work(signal.SIGINT)[1].replace("os.kill(os.getpid(), 2)", "callback()").replace("                pass", WAIT)
    ended = terminal.run(["-c", code], tmp_path)
    assert ended.faults([130]) == [] and "Exception" not in ended.screen and "too late" not in ended.screen
    assert list(tmp_path.iterdir()) == []


WAIT = """
                import time
                time.sleep(10)
                print("too late")

class Thing:
    pass

def callback():
    import weakref
    thing = Thing()
    reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), 2))
    del thing
"""


@pytest.mark.parametrize("show", [False, True])
def test_a_signal_while_the_bar_starts_or_stops_leaves_the_cursor_visible(show: bool, tmp_path: Path) -> None:
    code = CURSOR.replace("WHEN", str(show)) + work(0)[1]
    ended = terminal.run(["-c", code], tmp_path)
    assert ended.faults([130]) == [] and terminal.HIDE in ended.screen and list(tmp_path.iterdir()) == []


CURSOR = """
import os, rich.console
show_cursor = rich.console.Console.show_cursor

def with_signal(self, show=True):
    if show and WHEN:
        os.kill(os.getpid(), 2)
    show_cursor(self, show)
    if not show and not WHEN:
        os.kill(os.getpid(), 2)

rich.console.Console.show_cursor = with_signal
"""


def test_an_error_is_printed_after_the_bar_has_ended(tmp_path: Path) -> None:
    ended = terminal.run(work(0, "raise OSError(28, 'Disk full', 'x')"), tmp_path)
    assert ended.code == 2 and ended.screen.rfind(terminal.SHOW) > ended.screen.rfind(terminal.HIDE)
    assert ended.screen.splitlines()[-1].removeprefix(terminal.SHOW).startswith("fqvit: out: cannot be written (Disk full)")


@pytest.mark.parametrize("module", ["typer", "fqvit.cli.commands.quantize", "numpy", "torch", "torch.nn"])
def test_an_interrupted_import_prints_nothing(module: str, tmp_path: Path) -> None:
    ended = terminal.run(["-c", IMPORT.replace("MODULE", module)], tmp_path)
    assert (ended.code, ended.screen) == (130, "")
    assert list(tmp_path.iterdir()) == []


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """This is the situation under nohup."""
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + work(signal.SIGHUP)[1]
    assert terminal.run(["-c", code], tmp_path).code == 0
    assert (tmp_path / "out").read_text() == "half"
