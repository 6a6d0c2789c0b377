"""The commands, put together, and the one place where an exception becomes a message and an exit code.

What ``[tool.trueup]`` of a project says is given to its commands unless a command line says otherwise:

    [tool.trueup.compare]           # in pyproject.toml, of this folder or the next one above that has it
    criterion = "criteria.toml"     # --criterion criteria.toml
    map = "map.toml"
    level = ["module", "api"]       # an option that may be repeated

    [tool.trueup.capture]
    steps = "0:3"
    stop = true
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from trueup.doors.cli import options
from trueup.doors.cli.options import SIDES, USAGE_ERRORS
from trueup.foundation.model import TrueupError, UsageError
from trueup.foundation.version import VERSION

TRACEBACK = "TRUEUP_TRACEBACK"  # environment variable that lets an unexpected exception through, for whoever debugs Trueup itself

GROUPS = {
    "Record a run": {
        "capture": (
            "running",
            "Run a command and record what its training computes.",
            "-o runs/cpu --steps 0:3 -- python train.py",
        ),
        "watch": ("running", "Run a command and watch it for NaN, Inf, saturation.", "--stop-after 1 -- python train.py"),
        "monitor": ("one_run", "Run a command and take its numbers all the time.", "-o runs/monitor -- python train.py"),
        "import": ("one_run", "Make a capture of another tool's dump.", "dump_npu/ -o runs/dumped"),
        "push": ("running", "Bring a capture to object storage.", "runs/cpu s3://bucket/runs/cpu"),
        "compact": ("running", "Pack a capture: fewer files, a fifth of the bytes.", "runs/cpu"),
        "verify-capture": ("replaying", "Execute a capture where it was made: the same bits?", "runs/gpu"),
    },
    "Compare two runs": {
        "compare": ("comparing", "Name the first call that made two runs differ.", "runs/cpu runs/npu -o report"),
        "align": ("comparing", "Compare step by step after a recipe.", "runs/cpu runs/npu --recipe paddle"),
        "curves": ("comparing", "Say whether two sets of loss curves are the same.", "base-*.csv -- cand-*.csv --margin 0.5%"),
        "diff": ("comparing", "Compare two tensors element by element.", "runs/cpu:neck.lstm/torch.lstm#0:output.0 runs/npu"),
        "map": ("comparing", "Propose which layer of one model is which of another.", "runs/torch runs/paddle -o map.toml"),
        "preflight": ("one_run", "List settings that differ, and what each one does.", "runs/gpu -- python train.py"),
        "env": ("migration", "Say which variables differ, conflict, change numbers.", "runs/gpu runs/npu"),
    },
    "Look into one run": {
        "show": ("one_run", "Show what a capture holds.", "runs/npu --scope 'neck*' --phase backward"),
        "shell": ("one_run", "Look around in one capture or two, at a prompt.", "runs/cpu runs/npu"),
        "check": ("one_run", "Find dangerous casts and lost mixed precision.", "runs/npu --against runs/gpu"),
        "overflow": ("one_run", "Find the first call that overflowed.", "runs/npu --replay"),
        "invariants": ("one_run", "Learn what holds in a healthy run; check another.", "runs/npu --check invariants.json"),
        "report": ("one_run", "Say which alerts a monitored run had; draw its series.", "runs/npu --trend -o trend"),
        "shadow-report": ("replaying", "Say what a shadow run found, without a baseline.", "runs/shadow"),
        "explain-log": ("migration", "Say which error of a run's logs came first, and why.", "logs/"),
    },
    "From a culprit to a fix": {
        "triage": ("running", "Tell an overflow, a compiler and an operator apart.", "--baseline runs/gpu -- python train.py"),
        "replay": ("replaying", "Execute recorded calls again, here or on a device.", "runs/gpu --device npu"),
        "reproduce": ("replaying", "Write one recorded call as a test without Trueup.", "report culprit --device npu -o repro"),
        "heal": ("running", "Find a policy that makes a run right, and verify it.", "runs/npu -- python train.py"),
        "bisect": (
            "running",
            "Find the fewest changes that make a training right.",
            "--over scopes --check 'python judge.py {run}' -- python train.py",
        ),
    },
    "Move a training": {
        "assess": ("migration", "Say what an Ascend NPU has for a training's operators.", "-- python train.py"),
        "port": (
            "migration",
            "Rewrite a training for another device, and prove it.",
            "train.py -o ported --prove 'python train.py'",
        ),
        "convert-weights": (
            "comparing",
            "Convert a model's weights to another framework.",
            "model.pt -o model.safetensors --map map.toml --to paddle",
        ),
        "checkpoint": (
            "migration",
            "Look into checkpoint files; repair them.",
            "repair model.pth --like clean.pt -o fixed.safetensors",
        ),
        "export": ("migration", "Export a model to ONNX, and prove it.", "net.py:make -o net.onnx"),
        "profile": ("migration", "Say where the time of a step goes.", "-- python train.py"),
        "export-metrics": ("one_run", "Write TensorBoard, OpenMetrics, W&B or MLflow files.", "report --to tensorboard -o board"),
        "simdev": ("migration", "Simulate a device with faults, to try all this.", "run -- python train.py"),
    },
}
"""What the help shows, in its order: the module that has a function of that name, or a `Typer` of several; a line; an example."""

COMMANDS = {name: row for rows in GROUPS.values() for name, row in rows.items()}
HANDS_ON = ("capture", "watch", "monitor", "triage", "bisect", "assess")  # their command's options are not ours

TABLE = "tool.trueup"


class TwoSides(options.Command):
    """A command with runs on both sides of ``--``, which click would take out; options may follow. No argument holds a NUL."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse, with the mark in place of ``--``."""
        return super().parse_args(ctx, [SIDES if word == "--" else word for word in args])


class Commands(TyperGroup):
    """The commands by name: a module is imported when its command is asked for, and none for a list of them."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - click's signature
        """Return all names, in order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, None where there is none."""
        if cmd_name not in COMMANDS:
            self.commands = self._lines()  # one of their names is suggested
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _loaded(cmd_name)
        found = self.commands[cmd_name]
        if ctx is not None and not ctx.resilient_parsing:

            ctx.default_map = {cmd_name: defaults(found, cmd_name)}
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help: a line for each command."""
        options.prepare_help()
        TyperGroup(name=self.name, commands=self._lines(), params=self.params, help=self.help, epilog=self.epilog).format_help(
            ctx, formatter
        )

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return what the shell may complete a word to."""
        return TyperGroup(name=self.name, commands=self._lines(), params=self.params).shell_complete(ctx, incomplete)

    def _lines(self) -> dict[str, Any]:
        return {
            name: TyperCommand(name, short_help=short, rich_help_panel=title)
            for title, rows in GROUPS.items()
            for name, (_, short, _) in rows.items()
        }


def _loaded(name: str) -> Any:
    place, _, words = COMMANDS[name]
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


def defaults(command: Any, name: str) -> dict[str, Any]:
    """Return what a project gives a command, by parameter; raises UsageError where its table is none, or names no option."""
    found = _file()
    if found is None:
        return {}
    file, data = found
    table = _table(file, data, name)
    return _of(command, table, f"{TABLE}.{name}", file)


def _file() -> tuple[Path, bytes] | None:
    """Return the nearest pyproject.toml and what it holds, None where it has no table of ours."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            data = file.read_bytes()
            return (file, data) if f"[{TABLE}".encode() in data else None
    return None


def _table(file: Path, data: bytes, name: str) -> dict[str, Any]:
    from trueup.foundation.toml import parsed

    try:
        held = parsed(data.decode("utf-8"))["tool"]["trueup"]
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(file, TABLE, "a table", f"what cannot be read: {error}") from None
    if not isinstance(held, dict):
        raise _refused(file, TABLE, "a table", type(held).__name__)
    if unknown := next((key for key in held if key not in COMMANDS), None):
        raise _refused(file, TABLE, "a table for each command, as [tool.trueup.compare]", repr(unknown))
    found = held.get(name, {})
    if not isinstance(found, dict):
        raise _refused(file, f"{TABLE}.{name}", "a table", type(found).__name__)
    return found


def _of(command: Any, table: dict[str, Any], where: str, file: Path) -> dict[str, Any]:
    inner = getattr(command, "commands", {})
    options = {word.removeprefix("--"): one for one in command.params for word in one.opts if word.startswith("--")}
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in inner and isinstance(value, dict):
            found[key] = _of(inner[key], value, f"{where}.{key}", file)
        elif key not in options:
            known = ", ".join(sorted([*options, *inner]))
            raise _refused(file, where, f"options of the command: {known}", repr(key))
        else:
            found[options[key].name] = _value(options[key], value, f"{where}.{key}", file)
    return found


def _value(option: Any, value: Any, where: str, file: Path) -> Any:
    several = option.multiple or option.nargs != 1
    flag = bool(getattr(option, "is_flag", False))
    listed = value if isinstance(value, list) else [value]
    scalar = all(isinstance(one, (str, int, float)) and (flag or not isinstance(one, bool)) for one in listed)
    if not scalar or (flag and not isinstance(value, bool)) or (isinstance(value, list) and not several):
        expected = "true or false" if flag else "a list of texts or numbers" if several else "a text or a number"
        raise _refused(file, where, expected, repr(value)[:80])
    words = [str(one) for one in listed]
    return value if flag else words if several else words[0]


def _refused(file: Path, where: str, expected: str, got: str) -> UsageError:
    return UsageError(
        f"Settings of the project cannot be used.\n  where:    {where} in {file}\n  expected: {expected}\n  got:      {got}\n"
        "  next:     correct it, or leave it out"
    )
