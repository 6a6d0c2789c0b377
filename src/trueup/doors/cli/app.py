"""The commands, put together, and the one place where an exception becomes a message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from trueup.doors.cli import (
    align,
    capture,
    check,
    compare,
    convert_weights,
    diff,
    heal,
    import_,
    map_,
    overflow,
    replay,
    reproduce,
    shadow_report,
    shell,
    show,
    simdev,
    triage,
    verify_capture,
    watch,
)  # fmt: skip
from trueup.foundation.model import TrueupError
from trueup.foundation.version import VERSION

TRACEBACK = "TRUEUP_TRACEBACK"
"""Environment variable that lets an unexpected exception through, for whoever debugs Trueup itself."""
USAGE_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ in ("ClickException", "UsageError")
)
"""Typer's own base classes; which module they live in depends on its version."""

app = typer.Typer(
    name="trueup",
    help="Find the first operator that makes a migrated training run differ from its baseline.",
    epilog="Exit codes: 0 aligned, 1 deviates, 2 could not tell or bad usage, 3 a watched run was stopped.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("capture", context_settings={"allow_interspersed_args": False})(capture.capture)
app.command("watch", context_settings={"allow_interspersed_args": False})(watch.watch)
app.command("triage", context_settings={"allow_interspersed_args": False})(triage.triage)
app.command("compare")(compare.compare)
app.command("align")(align.align)
app.command("import")(import_.import_)
app.command("show")(show.show)
app.command("diff")(diff.diff)
app.command("shell")(shell.shell)
app.command("map")(map_.map_)
app.command("convert-weights")(convert_weights.convert_weights)
app.command("check")(check.check)
app.command("overflow")(overflow.overflow)
app.command("heal")(heal.heal)
app.command("replay")(replay.replay)
app.command("reproduce")(reproduce.reproduce)
app.command("verify-capture")(verify_capture.verify_capture)
app.command("shadow-report")(shadow_report.shadow_report)
app.add_typer(simdev.app, name="simdev")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trueup {VERSION}")
        raise typer.Exit


@app.callback()
def trueup(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find the first operator that makes a migrated training run differ from its baseline."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; every exception but a request for its traceback ends here."""
    try:
        code = get_command(app)(
            args=None if arguments is None else list(arguments), prog_name="trueup", standalone_mode=False
        )
        sys.stdout.flush()
    except TrueupError as error:
        return _fail(str(error))
    except USAGE_ERRORS as error:
        return _fail(_usage(error)) if str(error) else 2  # without words: help was asked for and has been printed
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # `trueup show ... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - the interpreter flushes it at exit
        return 0
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(f"Unexpected {what}\n  next:     set {TRACEBACK}=1 to see where, and report it: this is a bug")
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    from trueup.foundation.words.wording import clean

    typer.echo(f"trueup: {clean(message)}", err=True)
    return 2


def _usage(error: Exception) -> str:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "trueup"
    return f"{message}\n  next:     {command} --help"
