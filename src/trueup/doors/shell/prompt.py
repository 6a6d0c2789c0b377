"""The shell on a terminal, from a pipe, or for commands that were given: one loop over lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from trueup.doors.shell.lines import execute
from trueup.doors.shell.session import NAMES, Session
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import clean, one_line

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = "trueup> "
TRACEBACK = "TRUEUP_TRACEBACK"


def run(
    baseline: Path, candidate: Path | None, console: Console, lines: Sequence[str] = (), *, prompt: str = PROMPT,
    results: Path | None = None, overflows: tuple[Path, ...] = (),
) -> int:  # fmt: skip
    """Run a shell over one capture or two: ``lines`` if there are any, else what standard input gives.

    Args:
        baseline: the trusted capture, or the only one.
        candidate: the capture under suspicion.
        console: where it prints.
        lines: commands instead of a prompt.
        prompt: what stands in front of a line.
        results: where `vc` leaves its table without being asked.
        overflows: captures of steps that overflowed, which `ac` looks at too.

    Returns:
        Of lines that were given, or come from a pipe: 1 if any returned that, else the highest of what they returned; else 0.

    Raises:
        TrueupError: a path is no capture; or a line that was given, or came from a pipe, cannot be run.
    """
    terminal = not lines and sys.stdin.isatty() and sys.stdout.isatty()
    session = Session(baseline, candidate, console, results, overflows)
    if terminal:
        _interact(session, prompt)
        return 0
    codes = [execute(session, line) for line in _until_exit(session, lines or map(_stripped, sys.stdin))]
    return 1 if 1 in codes else max(codes, default=0)


def _stripped(line: str) -> str:
    return line.rstrip("\r\n")


def _until_exit(session: Session, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if session.over:
            return
        yield line


def _interact(session: Session, prompt: str) -> None:
    """Read lines with completion and history until the end of input, or `exit`; what goes wrong is said, and the next is read."""
    _greet(session)
    reader = _reader(session)
    while not session.over:
        try:
            line = reader.prompt(prompt)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        try:
            execute(session, line)
        except TrueupError as error:
            session.console.print(Text(clean(str(error)), "red"), soft_wrap=True)
        except KeyboardInterrupt:
            session.console.print(Text("interrupted", "yellow"))
        except BrokenPipeError:
            return
        except Exception as error:
            if os.environ.get(TRACEBACK):
                raise
            said = f"Unexpected {type(error).__name__}: {error}\n  next:     set {TRACEBACK}=1 to see where: this is a bug"
            session.console.print(Text(clean(said), "red"), soft_wrap=True)


def _greet(session: Session) -> None:
    for side in reversed(session.sides):
        label = "capture" if session.is_alone else NAMES[side]
        session.console.print(Text.assemble((f"{label:<9}  ", "dim"), (one_line(str(session.path(side))), "bold")), soft_wrap=True)
    session.console.print(Text("help lists the commands, Tab completes, Ctrl-D leaves", "dim"))


def _reader(session: Session) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.completion import ThreadedCompleter

    from trueup.doors.shell.completing import ShellCompleter

    return PromptSession(
        history=_history(), completer=ThreadedCompleter(ShellCompleter(session)), complete_while_typing=False,
        auto_suggest=AutoSuggestFromHistory(), enable_open_in_editor=False,
    )  # fmt: skip


def history_file() -> Path:
    """Return where lines are remembered (XDG Base Directory Specification 0.8: state)."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "trueup" / "shell-history"


def _history() -> Any:
    """Return the lines of earlier shells; where they cannot be kept, those of this one."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
