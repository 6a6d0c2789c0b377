from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import termios
import time
from pathlib import Path

import numpy as np
import pyte
import pytest

from trueup.doors.report import progress
from trueup.foundation import progress as told
from trueup.foundation.progress import (
    TALLIES,
    Progress,
    advance,
    how_to_go_on,
    leaving,
    listening,
    read_written,
    tell_written,
)
from verdict.captures import Recording


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.delenv("TRUEUP_QUIET")
    with progress.shown():
        advance("executing", "calls", 1200)
        said = ""
        while not said:
            time.sleep(0.01)
            said = capsys.readouterr().err
    assert said.startswith("trueup: executing: 1,200 calls in ")
    capsys.readouterr()
    monkeypatch.setenv("TRUEUP_QUIET", "1")
    with progress.shown():
        advance("executing", "calls", 1)
        time.sleep(0.05)
    advance("executing", "calls", 2)  # nobody listens
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_that_goes_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress, "SOON", 0.0)
    monkeypatch.delenv("TRUEUP_QUIET")
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown():
        while "3 of 40 steps" not in screen.getvalue():
            advance("comparing", "steps", 3, 40)
            time.sleep(0.01)
    assert "%" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # the line is taken away


class Screen:
    """A terminal of 80 columns and 8 lines that a command shares with us."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lines: int = 8) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(lines)
        self.screen = pyte.Screen(80, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.shared = os.fdopen(theirs, "w")
        monkeypatch.setattr("sys.stderr", self.shared)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())  # in front

    def resize(self, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("4H", lines, 80, 0, 0))

    def write(self, text: str) -> None:
        os.write(self.shared.fileno(), text.encode())

    def shows(self, *wanted: str) -> list[str]:
        """Wait until the screen has some texts, and return its lines."""
        patience = time.monotonic() + 300
        while not all(any(text in line for line in self.screen.display) for text in wanted):
            assert time.monotonic() < patience, self.screen.display
            self.read()
        return [line.rstrip() for line in self.screen.display]

    def read(self) -> None:
        if select.select([self._ours], [], [], 0.05)[0]:
            self._stream.feed(os.read(self._ours, 65536))

    def close(self) -> list[str]:
        """Return the lines at the end."""
        for _ in range(3):
            self.read()
        os.close(self._ours)
        self.shared.close()
        return [line.rstrip() for line in self.screen.display]


def test_a_bar_stands_below_what_a_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SOON", 0.0)
    monkeypatch.delenv("TRUEUP_QUIET")
    terminal = Screen(monkeypatch)
    for n in range(12):  # the cursor is in the last line, and within it
        terminal.write(f"line {n}\n")
    terminal.write("epoch 1:")
    with progress.shown(below=True):
        advance("capturing", "steps", 3, 40, "1,200 rows, 8.0 MB written, 2.0 MB/s")
        assert terminal.shows("capturing 3 of 40")[-2] == "epoch 1:"
        terminal.write(" 10 %\repoch 1: 90 %")
        assert terminal.shows("90 %")[-2:-1] == ["epoch 1: 90 %"]  # a bar of theirs goes on where it was
        terminal.write("\n" + "".join(f"loss {n}\n" for n in range(9)))
        advance("capturing", "steps", 4, 40, "1,600 rows, 9.0 MB written, 2.0 MB/s")
        shown = terminal.shows("capturing 4 of 40", "loss 8")
        assert shown[:-1] == ["loss 3", "loss 4", "loss 5", "loss 6", "loss 7", "loss 8", ""]
        assert "1,600 rows, 9.0 MB written, 2.0 MB/s" in shown[-1]
        assert "10%" in shown[-1]
        terminal.write("bye\n")
    assert terminal.close() == ["loss 4", "loss 5", "loss 6", "loss 7", "loss 8", "bye", "", ""]
    assert terminal.screen.margins is None or terminal.screen.margins == (0, 7)  # the whole screen scrolls again
    assert terminal.screen.cursor.y == 6


def test_a_terminal_that_is_not_ours_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the background, and where there is no line to spare."""
    monkeypatch.setattr(progress, "SOON", 0.0)
    monkeypatch.delenv("TRUEUP_QUIET")
    for lines, group in ((4, os.getpgrp()), (8, os.getpgrp() + 1)):
        terminal = Screen(monkeypatch, lines)
        monkeypatch.setattr(os, "tcgetpgrp", lambda _, group=group: group)
        with progress.shown(below=True):
            advance("capturing", "steps", 3)
            time.sleep(0.3)
        assert terminal.close() == [""] * lines


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (Progress("comparing", "steps", 0, 40), "comparing: 0 of 40 steps in 10 s"),
        (Progress("comparing", "steps", 10, 40), "comparing: 10 of 40 steps in 10 s, about 30 s left"),
        (Progress("executing", "calls", 12000), "executing: 12,000 calls in 10 s"),
        (Progress("capturing", "steps", 1, detail="9 rows"), "capturing: 1 step in 10 s; 9 rows"),
        (Progress("comparing", "steps", 40, 40), "comparing: 40 of 40 steps in 10 s"),
        (Progress("run 2, under a watch", "", 0), "run 2, under a watch: 10 s"),
        (Progress("capturing", "steps", 1, 2, "9 rows"), "capturing: 1 of 2 steps in 10 s, about 10 s left; 9 rows"),
    ],
)
def test_what_is_said(one: Progress, said: str) -> None:
    assert progress.sentence(one, 10.0) == said


def test_a_capture_that_others_write_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Recording(), Recording()]
    for step in range(3):
        runs[0].call("aten::neg", [np.ones(4)], [-np.ones(4)], step=step)
    runs[1].call("aten::neg", [np.ones(4)], [-np.ones(4)])
    monkeypatch.setattr(told, "EVERY", 0.01)
    heard: list[Progress] = []
    with told.following() as variables:  # nobody listens, nobody looks
        assert variables == {}
    with listening(heard.append), told.following("healing, run-2", 3) as variables:
        folder = Path(variables[TALLIES])
        (folder / "1").write_bytes(b"cut off")  # while it is written
        for process, run in enumerate(runs, 4711):
            with monkeypatch.context() as patch:
                patch.setenv(TALLIES, str(folder))
                patch.setattr("os.getpid", lambda process=process: process)
                run.write(tmp_path / f"run-{process}")
        while not heard or not heard[-1].detail.startswith("8 rows, "):
            time.sleep(0.01)
        files = [path for path in tmp_path.glob("run-*/rank-*/step-*/records-*") if path.is_file()]
        assert read_written(folder)[:2] == (3, 8)
        assert 0 < read_written(folder)[2] <= sum(path.stat().st_size for path in files)
    assert re.fullmatch(r"8 rows, \d+\.\d kB written, [\d.,]+ [kM]B/s", heard[-1].detail)
    assert (heard[-1].doing, heard[-1].kind, heard[-1].done, heard[-1].total) == ("healing, run-2", "steps", 3, 3)
    assert not folder.exists()


def test_a_process_on_another_machine_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TALLIES, str(tmp_path / "not/here"))
    tell_written(1, 2, 3)
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_is_said_once() -> None:
    with pytest.raises(KeyboardInterrupt), leaving("outer"), leaving("inner"):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="no"), leaving("not interrupted"):
        raise ValueError("no")
    assert (how_to_go_on(), how_to_go_on()) == (["inner", "outer"], [])
