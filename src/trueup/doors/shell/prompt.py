"""The shell on a terminal, from a pipe, or for commands that were given: one loop over lines.

A line is taken apart as a shell does it; every mistake in it is one message. Tab offers commands, their options, and names of
calls and slots, read from the first step when first asked for.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.main import get_command

from trueup.doors.cli.app import TRACEBACK
from trueup.doors.cli.options import USAGE_ERRORS
from trueup.doors.shell.commands import app
from trueup.doors.shell.session import NAMES, SIDES, Session, Side
from trueup.foundation.model import LEVELS, PHASES, TrueupError
from trueup.foundation.words.wording import clean, one_line

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from trueup.foundation.store import Capture

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


MOST = 200  # proposals at a time
NAMES_READ = 200_000
SAFE = re.compile(r"[\w.:/#@$<>=+\[\]{}()~,*-]+")
"""Names that are offered: others (blanks, quotes, control characters) are reached by their seq."""
TAKES_CALL = ("ni",)
TAKES_SLOT = ("pt", "cp")
VALUES: dict[str, tuple[str, ...]] = {"-p": PHASES, "--phase": PHASES, "-g": LEVELS, "--level": LEVELS, "--side": SIDES}


class Names:
    """Names of one capture, by what a command wants; none of one that cannot be read."""

    def __init__(self, capture: Capture | None) -> None:
        self.slots: dict[str, list[str]] = {}
        self.types: set[str] = set()
        self.scopes: set[str] = set()
        if capture is None or not capture.steps or not capture.ranks:
            return
        names = ["scope", "op", "ordinal", "slot"]
        rows = capture.records(names, step=capture.steps[:1], rank=min(capture.ranks)).slice(0, NAMES_READ)
        columns = [rows[name].to_pylist() for name in names]
        for scope, op, ordinal, slot in zip(*columns, strict=True):
            name = f"{scope}/{op}#{ordinal}" if scope else f"{op}#{ordinal}"
            if slot is not None and SAFE.fullmatch(name):
                self.slots.setdefault(name, [])
                if slot not in self.slots[name] and SAFE.fullmatch(slot):
                    self.slots[name].append(slot)
                self.types.add(op)
                self.scopes.add(scope)
        self.scopes.discard("")


class ShellCompleter(Completer):
    """Completes the word before the cursor; what cannot be read offers nothing."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known = commands()
        self._names: dict[str, Names] = {}

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:  # noqa: ARG002
        """Yield what may stand there."""
        text = document.text_before_cursor
        if not text or text[-1].isspace():
            word, before = "", text
        else:
            word = re.split(r"\s", text)[-1]
            before = text[: len(text) - len(word)]
        try:
            words = shlex.split(before)
        except ValueError:
            return
        for one in self._proposals(words, word):
            yield Completion(one, start_position=-len(word))

    def _proposals(self, words: list[str], word: str) -> Iterable[str]:
        if not words:
            return [name for name in self._known if name.startswith(word)]
        command = self._known.get(words[0])
        if command is None:
            return []
        if words[0] == "help":
            return [name for name in self._known if name.startswith(word)]
        if word.startswith("-"):
            options = [name for parameter in command.params for name in parameter.opts if name.startswith("-")]
            return sorted(name for name in [*options, "--help"] if name.startswith(word))
        if words[-1] in VALUES and words[0] != "run" and not (words[0] == "cp" and words[-1] == "-p"):
            return [value for value in VALUES[words[-1]] if value.startswith(word)]
        return self._names_for(words, word)

    def _names_for(self, words: list[str], word: str) -> Iterable[str]:
        side: Side = self._session.sides[0]
        for one in SIDES:
            if one in words or word.startswith(f"{one}:"):
                side = one
        names = self._of(side)
        if words[0] == "ls":
            return _near(names.types if words[-1] in ("-t", "--type", "-k") else names.scopes, word)
        if words[0] in TAKES_CALL:
            return _near(names.slots, word)
        if words[0] in TAKES_SLOT:
            lead = next((f"{one}:" for one in SIDES if word.startswith(f"{one}:")), "")
            call, colon, slot = word.removeprefix(lead).rpartition(":")
            if colon and call in names.slots:
                return [f"{lead}{call}:{one}" for one in names.slots[call] if one.startswith(slot)]
            return [f"{lead}{one}:" for one in _near(names.slots, word.removeprefix(lead))]
        return []

    def _of(self, side: Side) -> Names:
        path = str(self._session.path(side))
        if path not in self._names:
            try:
                self._names[path] = Names(self._session.capture(side))
            except (TrueupError, OSError):
                return Names(None)
        return self._names[path]


def _near(names: Iterable[str], word: str) -> list[str]:
    """Return the names that begin with a word, then those that contain it."""
    there = list(names)
    begin = [name for name in there if name.startswith(word)]
    inside = [name for name in there if word and word.lower() in name.lower() and not name.startswith(word)]
    return [*begin, *inside][:MOST]
