from __future__ import annotations

import io
import time

import pytest

from trueup.doors.report import progress
from trueup.foundation.progress import Progress, advance


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.01)
    with progress.shown():
        advance("executing", "calls", 1200)
        said = ""
        while not said:
            time.sleep(0.01)
            said = capsys.readouterr().err
    assert said.startswith("trueup: executing: 1,200 calls in ")
    capsys.readouterr()
    with progress.shown(quiet=True):
        advance("executing", "calls", 1)
        time.sleep(0.05)
    advance("executing", "calls", 2)  # nobody listens
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_that_goes_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress, "SOON", 0.0)
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown():
        while "3 steps" not in screen.getvalue():
            advance("comparing", "steps", 3, 40)
            time.sleep(0.01)
    assert "%" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # the line is taken away


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (Progress("comparing", "steps", 0, 40), "comparing: 0 of 40 steps in 10 s"),
        (Progress("comparing", "steps", 10, 40), "comparing: 10 of 40 steps in 10 s, about 30 s left"),
        (Progress("executing", "calls", 12000), "executing: 12,000 calls in 10 s"),
    ],
)
def test_what_is_said(one: Progress, said: str) -> None:
    assert progress.sentence(one, 10.0) == said
