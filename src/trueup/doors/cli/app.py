"""The commands, put together, and the one place where an exception becomes a message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from trueup.doors.cli import options
from trueup.doors.cli.options import SIDES, USAGE_ERRORS
from trueup.foundation.model import TrueupError, UsageError
from trueup.foundation.version import VERSION

TRACEBACK = "TRUEUP_TRACEBACK"  # environment variable that lets an unexpected exception through, for whoever debugs Trueup itself

COMMANDS = {
    "capture": ("running", "-o runs/cpu --steps 0:3 -- python train.py"),
    "watch": ("running", "--stop-after 1 -- python train.py"),
    "monitor": ("monitoring", "-o runs/monitor -- python train.py"),
    "triage": ("running", "--baseline runs/gpu -- python train.py"),
    "push": ("running", "runs/cpu s3://bucket/runs/cpu"),
    "compact": ("running", "runs/cpu"),
    "compare": ("comparing", "runs/cpu runs/npu -o report"),
    "align": ("comparing", "runs/cpu runs/npu --recipe paddle"),
    "invariants": ("monitoring", "runs/npu --check invariants.json"),
    "report": ("monitoring", "runs/npu --trend -o trend"),
    "curves": ("comparing", "base-*.csv -- cand-*.csv --margin 0.5%"),
    "import": ("one_run", "dump_npu/ -o runs/dumped"),
    "show": ("one_run", "runs/npu --scope 'neck*' --phase backward"),
    "diff": ("comparing", "runs/cpu:neck.lstm/torch.lstm#0:output.0 runs/npu"),
    "shell": ("one_run", "runs/cpu runs/npu"),
    "map": ("comparing", "runs/torch runs/paddle -o map.toml"),
    "convert-weights": ("comparing", "model.pt model.safetensors --map map.toml --to paddle"),
    "check": ("one_run", "runs/npu --against runs/gpu"),
    "preflight": ("one_run", "runs/gpu -- python train.py"),
    "overflow": ("one_run", "runs/npu --replay"),
    "heal": ("running", "runs/npu -- python train.py"),
    "bisect": ("running", "--over scopes --check 'python judge.py {run}' -- python train.py"),
    "replay": ("replaying", "runs/gpu --device npu"),
    "reproduce": ("replaying", "report culprit --device npu -o repro"),
    "verify-capture": ("replaying", "runs/gpu"),
    "shadow-report": ("replaying", "runs/shadow"),
    "simdev": ("simdev", "run -- python train.py"),
    "assess": ("port", "-- python train.py"),
    "port": ("port", "train.py -o ported --prove 'python train.py'"),
    "explain-log": ("migration", "logs/"),
    "env": ("migration", "runs/gpu runs/npu"),
    "profile": ("migration", "-- python train.py"),
    "export": ("migration", "net.py:make -o net.onnx"),
    "export-metrics": ("one_run", "report --to tensorboard -o board"),
    "checkpoint": ("migration", "repair model.pth --like clean.pt -o fixed.safetensors"),
}
"""The commands in the order of the help: the module that has a function of that name, or a `Typer` of several, and an example."""

HANDS_ON = ("capture", "watch", "monitor", "triage", "bisect", "assess")  # their command's options are not ours


class TwoSides(options.Command):
    """A command with runs on both sides of ``--``, which click would take out; options may follow. No argument holds a NUL."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse, with the mark in place of ``--``."""
        return super().parse_args(ctx, [SIDES if word == "--" else word for word in args])


class Commands(TyperGroup):
    """The commands by name: a module is imported when its command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - click's signature
        """Return all names, in order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, None where there is none; all are loaded then, for one of them is suggested."""
        for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:
            if name not in self.commands:
                self.commands[name] = _loaded(name)
        found = self.commands.get(cmd_name)
        if found is not None and ctx is not None and not ctx.resilient_parsing:
            from trueup.doors.cli.settings import defaults

            ctx.default_map = {cmd_name: defaults(found, cmd_name)}
        return found


def _loaded(name: str) -> Any:
    place, words = COMMANDS[name]
    module, example = import_module(f"trueup.doors.cli.{place}"), f"Example: trueup {name} {words}"
    its = getattr(module, "import_" if name == "import" else name.replace("-", "_"))
    if isinstance(its, typer.Typer):
        several = get_command(its)
        several.name, several.epilog = name, example
        return several
    alone = typer.Typer(add_completion=False)
    settings = {"allow_interspersed_args": False} if name in HANDS_ON else None
    kind = TwoSides if name == "curves" else options.Command
    alone.command(name, cls=kind, context_settings=settings, epilog=example)(its)
    return get_command(alone)


app = typer.Typer(
    name="trueup",
    cls=Commands,
    help="Find the first operator that makes a migrated training run differ from its baseline.",
    epilog="Exit codes: 0 aligned, 1 deviates, 2 could not tell, 3 a watched run was stopped, 64 bad usage.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trueup {VERSION}")
        raise typer.Exit


@app.callback()
def trueup(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Find the first operator that makes a migrated training run differ from its baseline."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; every exception but a request for its traceback ends here."""
    try:
        code = get_command(app)(args=None if arguments is None else list(arguments), prog_name="trueup", standalone_mode=False)
        sys.stdout.flush()
    except TrueupError as error:
        return _fail(str(error), error.exit_code)
    except USAGE_ERRORS as error:
        # Without words: help was asked for and has been printed.
        return _fail(_usage(error), UsageError.exit_code) if str(error) else UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except BrokenPipeError:  # `trueup show ... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - the interpreter flushes it at exit
        return 0
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(f"Unexpected {what}\n  next:     set {TRACEBACK}=1 to see where, and report it: this is a bug")
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = TrueupError.exit_code) -> int:
    from trueup.foundation.words.wording import clean

    typer.echo(f"trueup: {clean(message)}", err=True)
    return code


def _usage(error: Exception) -> str:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "trueup"
    example = getattr(getattr(context, "command", None), "epilog", None) if type(error).__name__ == "MissingParameter" else None
    return f"{message}\n  next:     {(example or '').removeprefix('Example: ') or f'{command} --help'}"
