"""A line of the shell, from text to what its command returns; every mistake in it is one message."""

from __future__ import annotations

import difflib
import shlex
from typing import Any

import typer
from rich.table import Table
from rich.text import Text
from typer.main import get_command

from trueup.doors.shell import checking, looking, rerunning
from trueup.doors.shell.session import Session
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import one_line

USAGE_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ in ("ClickException", "UsageError")
)
PASTED = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'"})
DASHES = "–—−"
"""What documents make of a hyphen: an option that begins with one was pasted."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command("ac")(checking.ac)
app.command("vc")(checking.vc)
app.command("vcs")(checking.vcs)
app.command("ls")(looking.ls)
app.command("ni")(looking.ni)
app.command("pt")(looking.pt)
app.command("cp")(looking.cp)
app.command("run", context_settings={"allow_interspersed_args": False})(rerunning.run)
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
    """Take a line apart as a shell does; dashes and quotes that a document made are read as what was typed.

    Raises:
        TrueupError: a quote is not closed.
    """
    try:
        words = shlex.split(line.translate(PASTED), comments=False)
    except ValueError as error:
        raise TrueupError(f"The line cannot be read: {error}.\n  got:      {one_line(line)}\n  next:     close it") from None
    return [f"-{word[1:]}" if word[0:1] and word[0] in DASHES else word for word in words]


def execute(session: Session, line: str) -> int:
    """Run a line; return 0, or as the `trueup` command that it stands for: 1 deviates, 2 could not tell.

    Raises:
        TrueupError: there is no such command, it was given something wrong, or it failed.
    """
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
