"""The shell in a real terminal: a pseudo-terminal whose other end is a terminal emulator, which shows what a person would see."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest
from rich.console import Console

from trueup.doors.shell import prompt

COLUMNS, LINES = 100, 40
PATIENCE = 400.0


class Terminal:
    """A shell on a terminal of 100 by 40."""

    def __init__(self, state: Path, *arguments: str | Path) -> None:
        self.screen = pyte.HistoryScreen(COLUMNS, LINES, history=2000)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.screen.write_process_input = lambda data: os.write(self.master, data.encode())  # type: ignore[method-assign]
        environment = {**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": str(state), "COLUMNS": str(COLUMNS)}
        environment.pop("NO_COLOR", None)
        command = [sys.executable, "-m", "trueup", "shell", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True, start_new_session=True
        )
        os.close(slave)
        self.until("trueup>")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def see(self, text: str) -> str:
        """Wait until the screen shows a text; return all of it."""
        deadline = time.monotonic() + PATIENCE
        while text not in (shown := self.shown()):
            assert time.monotonic() < deadline, f"{text!r} did not appear:\n{shown}"
            self.read(0.05)
        return shown

    def read(self, wait: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], wait)
        try:
            data = os.read(self.master, 1 << 16) if ready else b""
        except OSError:  # the other end is gone
            return False
        self.raw += data
        self.stream.feed(data)
        return True

    def shown(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def line(self) -> str:
        """The line with the cursor; ``display`` would put all forty together."""
        cells = self.screen.buffer[self.screen.cursor.y]
        return "".join(cells[k].data for k in range(COLUMNS)).rstrip()

    def clear(self) -> None:
        """Empty the screen, so that the prompt stands on its first line."""
        self.type("\x0c")
        deadline = time.monotonic() + PATIENCE
        while self.screen.cursor.y or self.line() != "trueup>":
            assert time.monotonic() < deadline, self.shown()
            self.read(0.05)

    def run(self, line: str) -> str:
        """Run a line on an empty screen; return the screen once the next prompt is there."""
        self.clear()
        self.type(f"{line}\r")
        deadline = time.monotonic() + PATIENCE
        while not self.screen.cursor.y or self.line() != "trueup>":
            assert time.monotonic() < deadline, self.shown()
            self.read(0.05)
        return self.shown()

    def until(self, line: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.line() != line:
            assert time.monotonic() < deadline, f"{line!r} is not what the prompt shows:\n{self.shown()}"
            self.read(0.05)

    def ended(self) -> int:
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            if not self.read(0.05):
                break
        return self.process.wait(timeout=PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[object]:
    opened: list[Terminal] = []

    def make(*arguments: str | Path) -> Terminal:
        opened.append(Terminal(tmp_path / "state", *arguments))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_a_session(terminal: object, runs: Path, tmp_path: Path) -> None:
    """Completion of commands, options, names and slots; a mistake; an interrupted line; history in the next shell."""
    shell: Terminal = terminal(runs / "base", runs / "cand")  # type: ignore[operator]
    assert "help lists the commands, Tab completes" in shell.shown()
    shell.type("vc\t")
    shell.see("vcs")
    shell.type("s --cos\t")
    shell.until("trueup> vcs --cosine")
    shell.type(" 0.98 -l 1\r")
    shell.see("vc says")
    shell.until("trueup>")
    assert "╭─ 1  " in shell.shown()
    assert "cosine is 0.98 or less" in shell.shown()
    shell.type("pt head/torch.nn.functional.lin\t")
    shell.until("trueup> pt head/torch.nn.functional.linear#0:")
    shell.type("out\t")
    shell.until("trueup> pt head/torch.nn.functional.linear#0:output.0")
    shell.type("\x03")
    shell.until("trueup>")
    assert "did you mean" in shell.run("vsc")
    shell.type("ls -t torch.nn.functional.l\t")
    shell.until("trueup> ls -t torch.nn.functional.linear")
    shell.type("\x15exit\r")
    assert shell.ended() == 0
    again: Terminal = terminal(runs / "base", runs / "cand")  # type: ignore[operator]
    again.type("\x1b[A\x1b[A\x1b[A")
    again.until("trueup> vcs --cosine 0.98 -l 1")
    again.type("\x03\x04")
    assert again.ended() == 0
    history = tmp_path / "state" / "trueup" / "shell-history"
    assert "+vcs --cosine 0.98 -l 1" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_ctrl_d_leaves_and_a_hostile_name_does_not_steer(terminal: object, tmp_path: Path) -> None:
    from shell.test_hostile import EVIL, hostile

    base, cand = hostile(tmp_path)
    shell: Terminal = terminal(base, cand)  # type: ignore[operator]
    for line in ("ls", "ls -t '*'", "ni 0", "pt 0:output.0", "vcs -c 1", "cp 0:output.0"):
        shell.run(line)
    shell.type("ni \t\t")
    shell.type("\x15\x04")
    assert shell.ended() == 0
    assert b"owned" in shell.raw
    for sequence in EVIL:
        assert sequence.encode() not in shell.raw
    assert shell.screen.title == ""


def test_a_prompt_without_its_extra(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are read by Python, a mistake in one is said, and the greeting names the extra."""
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = iter(["vsc", "exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert prompt.run(runs / "base", None, Console(file=(said := io.StringIO()), width=100)) == 0
    assert "help lists the commands, pip install 'trueup[shell]' lets Tab complete, Ctrl-D leaves" in said.getvalue()
    assert "There is no command 'vsc'" in said.getvalue()
