"""The shell on a terminal, from a pipe, or for commands that were given: one loop over lines.

A line is taken apart as a shell does it; every mistake in it is one message. The extra `shell` brings completion and a history;
without it a line is read as Python reads one.
"""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.main import get_command

from trueup.doors.cli.app import TRACEBACK
from trueup.doors.cli.options import USAGE_ERRORS
from trueup.doors.shell.commands import app
from trueup.doors.shell.session import NAMES, Session
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import clean, one_line

PASTED = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'"})
DASHES = "–—−"  # what documents make of a hyphen: an option that begins with one was pasted

ELSEWHERE = {
    "dc": "Dump files of CANN are decoded by its msaccucmp: `trueup import` makes a capture of the .npy files.",
    "train": "`run -- COMMAND` runs a training again under capture; `trueup replay` executes recorded calls on both devices.",
    "infer": "`trueup import` makes a capture of dumped tensors.",
}  # fmt: skip
"""Commands of precision_tool that have another home."""


@app.command("help")
def help_(context: typer.Context, command: str = typer.Argument("", metavar="[COMMAND]")) -> int:
    """Say what commands there are, or what one takes."""
    session: Session = context.obj
    if command:
        return execute(session, shlex.join([command, "--help"]))
    grid = Table.grid(padding=(0, 2))
    for name, its in commands().items():
        grid.add_row(Text(name, "bold"), Text((its.help or "").partition("\n")[0].rstrip(".")))
    session.console.print(grid)
    session.console.print(Text("COMMAND -h says more. CALL is a seq, or scope/op#n; Tab completes names.", "dim"))
    return 0


@app.command("exit")
def exit_(context: typer.Context) -> int:
    """Leave the shell."""
    context.obj.over = True
    return 0


def commands() -> dict[str, Any]:
    """Return the commands by their names."""
    return dict(get_command(app).commands)  # type: ignore[attr-defined]


def split(line: str) -> list[str]:
    """Take a line apart as a shell does; dashes and quotes of documents are read as typed. Raises TrueupError on an open quote."""
    try:
        words = shlex.split(line.translate(PASTED), comments=False)
    except ValueError as error:
        raise TrueupError(f"The line cannot be read: {error}.\n  got:      {one_line(line)}\n  next:     close it") from None
    return [f"-{word[1:]}" if word[0:1] and word[0] in DASHES else word for word in words]


def execute(session: Session, line: str) -> int:
    """Run a line; return 0, or as the `trueup` command that it stands for: 1 deviates, 2 could not tell. Raises TrueupError if
    there is no such command, it was given something wrong, or it failed."""
    words = split(line)
    if not words:
        return 0
    if words[0] == "quit":
        words[0] = "exit"
    if words[0] not in (known := commands()):
        raise _unknown(words[0], known)
    try:
        code = get_command(app)(
            args=words, prog_name="trueup shell", standalone_mode=False, obj=session, help_option_names=["-h", "--help"]
        )
    except USAGE_ERRORS as error:
        said = error.format_message() if hasattr(error, "format_message") else str(error)
        raise TrueupError(f"{said}\n  got:      {one_line(line)}\n  next:     help {words[0]}") from None
    return code if isinstance(code, int) else 0


def _unknown(word: str, known: dict[str, Any]) -> TrueupError:
    if word in ELSEWHERE:
        return TrueupError(f"{word} is not a command of this shell.\n  next:     {ELSEWHERE[word]}")
    near = difflib.get_close_matches(word, known, 2)
    following = f"did you mean {' or '.join(near)}? " if near else ""
    return TrueupError(
        f"There is no command {one_line(word)!r}.\n  expected: one of {', '.join(known)}\n"
        f"  got:      {one_line(word)}\n  next:     {following}help lists what each does"
    )


PROMPT = "trueup> "


def run(
    baseline: Path, candidate: Path | None, console: Console, lines: Sequence[str] = (), *, prompt: str = PROMPT,
    results: Path | None = None, overflows: tuple[Path, ...] = (),
) -> int:  # fmt: skip
    """Run a shell over one capture or two: ``lines`` if there are any, else what standard input gives.

    `vc` leaves its table in ``results`` without being asked; `ac` looks at ``overflows``, captures of steps that overflowed, too.
    Of lines that were given, or come from a pipe, return 1 if any returned that, else the highest of what they returned; else 0.
    Raises TrueupError if a path is no capture, or such a line cannot be run.
    """
    terminal = not lines and sys.stdin.isatty() and sys.stdout.isatty()
    session = Session(baseline, candidate, console, results, overflows)
    if terminal:
        _interact(session, prompt)
        return 0
    codes = [execute(session, line) for line in _until_exit(session, lines or (line.rstrip("\r\n") for line in sys.stdin))]
    return 1 if 1 in codes else max(codes, default=0)


def _until_exit(session: Session, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if session.over:
            return
        yield line


def _interact(session: Session, prompt: str) -> None:
    """Read lines with completion and history until the end of input, or `exit`; what goes wrong is said, and the next is read."""
    read = _reader(session)
    _greet(session, completes=read is not input)
    while not session.over:
        try:
            line = read(prompt)
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


def _greet(session: Session, *, completes: bool) -> None:
    for side in reversed(session.sides):
        label = "capture" if session.is_alone else NAMES[side]
        session.console.print(Text.assemble((f"{label:<9}  ", "dim"), (one_line(str(session.path(side))), "bold")), soft_wrap=True)
    completing = "Tab completes" if completes else "pip install 'trueup[shell]' lets Tab complete"
    session.console.print(Text(f"help lists the commands, {completing}, Ctrl-D leaves", "dim"), soft_wrap=True)


def _reader(session: Session) -> Callable[[str], str]:
    """Return what reads a line at a prompt: with completion and a history where prompt_toolkit is installed."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
        from prompt_toolkit.completion import ThreadedCompleter
    except ModuleNotFoundError:
        return input
    from trueup.doors.shell.completion import ShellCompleter

    reader: PromptSession[str] = PromptSession(
        history=_history(), completer=ThreadedCompleter(ShellCompleter(session)), complete_while_typing=False,
        auto_suggest=AutoSuggestFromHistory(), enable_open_in_editor=False,
    )  # fmt: skip
    return reader.prompt


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
