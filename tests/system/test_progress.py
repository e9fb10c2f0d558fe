"""Test the progress bar: it is shown only on terminals and in notebooks."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from fqvit.system.progress import busy, track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_shown_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(3), 3, "calibrate", "images")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_label_count_and_rate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    assert list(track(iter("abc"), 3, "calibrate", "images")) == ["a", "b", "c"]
    assert "calibrate" in screen.getvalue()
    assert "3/3" in screen.getvalue()
    assert "images/s" in screen.getvalue()
    assert capsys.readouterr().out == ""


def test_items_are_yielded_one_at_a_time() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for item in range(5):
            taken.append(item)
            yield item

    next(track(source(), None, "read"))
    assert taken == [0]


def test_nothing_is_shown_with_a_closed_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # Python sets it to None if the descriptor was closed before the process started
    assert list(track(range(3), 3, "calibrate", "images")) == [0, 1, 2]


def test_nothing_is_shown_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "rich", None)
    assert list(track(range(3), 3, "calibrate", "images")) == [0, 1, 2]
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_work_without_steps_shows_its_label_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with busy("capturing"):
        pass
    assert capsys.readouterr() == ("", "")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with busy("capturing"):
        pass
    assert "capturing" in screen.getvalue()


class Notebook:
    """A stand-in for IPython in a notebook. shown: everything that was displayed, in order"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
        self.shown: list[str] = []
        package, displays = ModuleType("IPython"), ModuleType("IPython.display")
        package.get_ipython = type(shell, (), {})  # type: ignore[attr-defined]
        displays.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", displays)

    def display(self, data: dict[str, str], raw: bool, display_id: bool) -> Notebook:
        self.update(data, raw)
        return self

    def update(self, data: dict[str, str], raw: bool) -> None:
        assert raw and "<progress" in data["text/html"]
        self.shown.append(data["text/plain"])


def test_a_notebook_shows_a_bar_below_its_cell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = Notebook(monkeypatch, "ZMQInteractiveShell")
    assert list(track(range(3), 3, "calibrating")) == [0, 1, 2]
    assert notebook.shown[0] == "calibrating: 0 of 3, 0 s" and notebook.shown[-1].startswith("calibrating: 3 of 3")
    assert capsys.readouterr() == ("", "")


def test_ipython_in_a_terminal_is_not_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch, "TerminalInteractiveShell")
    assert list(track(range(3), 3, "calibrating")) == [0, 1, 2]
    assert notebook.shown == []
