"""Options that several commands share, their types, and how they are read; what the library checks itself is left to it. With
``--overwrite`` what an earlier run of a command left goes before the command begins; nothing old stays where it fails."""

# ruff: noqa: UP045 - typer evaluates the types on Python 3.10

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Optional, TextIO

import typer
from typer.core import TyperCommand
from typer.main import get_command

from trueup.foundation.model import LEVELS, PHASES, TrueupError, UsageError
from trueup.foundation.progress import is_set, variable_set

if TYPE_CHECKING:
    from rich.console import Console

Word = Optional[str]
Words = Optional[list[str]]
Number = Optional[int]
Numbers = Optional[list[int]]
Share = Optional[float]
File = Optional[Path]
Files = Optional[list[Path]]

Base = Annotated[Path, typer.Argument(metavar="BASE", help="Capture of the trusted run.")]
Cand = Annotated[Path, typer.Argument(metavar="CAND", help="Capture of the run under suspicion.")]
Following = Annotated[Words, typer.Argument(metavar="-- COMMAND...", help="What to run.")]
Output = Annotated[File, typer.Option("--output", "-o", metavar="DIR", help="Save the report there.")]
Made = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the capture goes.")]
Step = Annotated[Number, typer.Option("--step", metavar="N", help="One step.")]
Rank = Annotated[Number, typer.Option("--rank", metavar="N", help="One rank.")]
Phase = Annotated[Word, typer.Option("--phase", metavar="PHASE", help=f"{', '.join(PHASES)}, where CALL means several.")]
Level = Annotated[Word, typer.Option("--level", metavar="LEVEL", help="module, api or aten.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Ends a run that takes longer; 0: never.")]
USAGE_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ in ("ClickException", "UsageError")
)
"""Typer's own base classes; which module they live in depends on its version."""
STDOUT = Path("-")
SIDES = "\0--"  # stands for the ``--`` between two sides

_documents: list[TextIO] = []
"""Standard output, while it is for the document of ``--json -`` and all else goes to standard error."""

PAGES = {
    "compare": "verdict.json calls.parquet series.json", "align": "align.json verdict.json calls.parquet", "curves": "curves.json",
    "overflow": "overflow.json", "report": "trend.json", "assess": "assess.json",
}  # fmt: skip
"""The files of a report beside its page; others in its folder stay."""
KINDS = {
    "watch": ("what a watch saved", ("step-*",)),
    "monitor": ("what a monitor wrote", ("manifest.json", "rank-*")),
    "replay": ("what was executed", ("**/replay.json",)),
    "verify-capture": ("what was executed", ("replay.json",)),
    "triage": ("a triage", ("runs.jsonl",)),
    "heal": ("a healing", ("runs.jsonl",)),
    "bisect": ("a search", ("journal.jsonl",)),
}
"""What a command goes on with, or refuses to write into, and the files that tell it."""
FILES = {"invariants": (".json",), "export": (".onnx",), "repair": (".safetensors",), "convert-weights": (".safetensors", ".npz")}
DEFAULTS = {"triage": "trueup-triage", "bisect": "trueup-bisect", "heal": "{path}-healed", "report": "trend"}
WRITTEN = {"output", "json", "html", "csv", "xlsx", "junit", "sarif", "patch"}


def _to_stdout(context: typer.Context, file: Path | None) -> Path | None:
    if file == STDOUT:
        context.with_resource(_kept_for_json())
    return file


@contextmanager
def _kept_for_json() -> Iterator[None]:
    _documents.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _documents.pop()


Json = Annotated[
    File, typer.Option("--json", metavar="FILE", callback=_to_stdout, help="Save all of it as JSON; -: print it, and no more.")
]
Html = Annotated[File, typer.Option("--html", metavar="FILE", help="Save all of it as a page under this name.")]
QUIET = "TRUEUP_QUIET"  # environment variable of the same meaning; `--quiet` sets it for what the command starts, too
VERBOSE = "TRUEUP_VERBOSE"  # likewise


def _hush(context: typer.Context, option: typer.CallbackParam, wanted: bool) -> bool:
    if wanted:
        context.with_resource(variable_set(QUIET if option.name == "quiet" else VERBOSE, "1"))
    return wanted


Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", envvar=QUIET, callback=_hush, expose_value=False, is_eager=True, help="Do not say how far it is."
    ),
]
LOUD = "Say each second how far it is, and where an unexpected error came from."
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", envvar=VERBOSE, callback=_hush, expose_value=False, is_eager=True, help=LOUD)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run of this command left there.")]
Simulated = Annotated[bool, typer.Option("--simulated", help="npu is Trueup's simulated device.")]


def words(given: Sequence[str] | None) -> tuple[str, ...]:
    """Read a repeated option whose values may also be separated by commas."""
    return tuple(word for text in given or () for word in map(str.strip, text.split(",")) if word)


def levels(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """Read ``--level``; ``all`` is every level, and no choice is None."""
    chosen = words(given)
    return LEVELS if "all" in chosen else chosen or None


def one(given: str | None, allowed: Sequence[str], option: str) -> str | None:
    """Read an option that takes one of a few words, or none; raises UsageError at another word."""
    if given is None or given in allowed:
        return given
    raise UsageError(
        f"{option} cannot be read.\n  expected: one of {', '.join(allowed)}\n  got:      {given!r}\n"
        "  next:     correct it, or leave it out"
    )


def some(given: Sequence[str], allowed: Sequence[str], option: str) -> tuple[str, ...]:
    """Check each word of an option that takes several of a few; raises UsageError at another word."""
    for word in given:
        one(word, allowed, option)
    return tuple(given)


def cleared(directory: Path, what: str = "a capture", marks: Sequence[str] = ("manifest.json", "rank-*")) -> None:
    """Make room for a folder of a kind, which has files of some names (``--overwrite``): one that is there is removed, what is none
    stays; raises UsageError then."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not directory.is_dir() or not all(any(directory.glob(mark)) for mark in marks):
        raise UsageError(
            f"Only {what} is overwritten.\n  where:    {directory}\n  expected: {what}, or an empty folder\n"
            f"  got:      {'another folder' if directory.is_dir() else 'a file'}\n  next:     name another one with -o"
        )
    import shutil

    shutil.rmtree(directory)


def required(command: Sequence[str] | None, what: str, example: str, expected: str = "a command to run") -> list[str]:
    """Return the command behind ``--``; raises UsageError where there is none to ``what`` (run, watch)."""
    if not command:
        following = f"{example} -- python train.py" if expected == "a command to run" else example
        raise UsageError(f"There is nothing to {what}.\n  expected: {expected}\n  got:      none\n  next:     trueup {following}")
    return list(command)


def two_sides(given: Sequence[str] | None, example: str) -> tuple[list[str], list[str]]:
    """Split words at the ``--`` between them; raises UsageError if a side is empty, or there is another one."""
    words = list(given or ())
    at = words.index(SIDES) if words.count(SIDES) == 1 else -1
    if at < 1 or at == len(words) - 1:
        got = " ".join(words).replace(SIDES, "--") or "nothing"
        raise UsageError(
            "Two sides are needed.\n  expected: runs of the baseline, --, runs of the candidate\n"
            f"  got:      {got}\n  next:     {example}"
        )
    return words[:at], words[at + 1 :]


def share(given: str, option: str) -> float:
    """Read a share: ``0.5%``, ``0.005``; raises UsageError if it is none above 0 and below 1."""
    try:
        value = float(given.strip().removesuffix("%")) / (100 if given.strip().endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise UsageError(
            f"{option} cannot be read.\n  expected: a share above 0 and below 1, such as 0.5%\n  got:      {given}\n"
            "  next:     correct it"
        )
    return value


def span(given: str, option: str) -> tuple[int, int]:
    """Read ``FIRST:LAST``, both included; raises UsageError if it is none."""
    first, colon, last = given.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and len(given) < 40):
        raise UsageError(f"{option} cannot be read.\n  expected: FIRST:LAST\n  got:      {given}\n  next:     correct it")
    return int(first), int(last)


def save_as_json(document: Callable[[], dict[str, Any]], file: Path | None, console: Console) -> None:
    """Write a document where ``--json`` asks for it and say where it is; raises TrueupError where the file cannot be written."""
    if file is None:
        return
    from trueup.doors.report.document import dumps
    from trueup.doors.report.saving import save_json
    from trueup.doors.report.terminal import print_written

    if file == STDOUT:
        print(dumps(document()), file=_documents[-1])
    else:
        print_written(save_json(document(), file), console, "json")


class Interrupted(TrueupError):
    """Ctrl-C was pressed."""

    exit_code = 130


ADDS = ("export-metrics",)  # to what lies there: runs of a tracker are many


class Command(TyperCommand):
    """A command: ``--quiet`` and ``--verbose`` are options of each, ``--overwrite`` of each that has ``-o``; an argument that is
    hidden is not in its usage either."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        if self.name != "options":
            names = {one.name for one in self.params}
            self.overwrites_by_itself = "overwrite" in names
            kept_out = set() if "output" in names and not self.overwrites_by_itself and self.name not in ADDS else {"overwrite"}
            self.params.extend(one for one in _shared() if one.name not in kept_out)

    def invoke(self, ctx: Any) -> Any:
        """Run it; what Ctrl-C leaves of it, and how to go on, is the message that it ends with."""
        try:
            if ctx.params.get("overwrite") if self.overwrites_by_itself else ctx.params.pop("overwrite", False):

                paths = {str(one.name) for one in self.params if "Path" in type(one.type).__name__}
                make_room(str(self.name), ctx.params, paths, by_itself=self.overwrites_by_itself)
            return super().invoke(ctx)
        except KeyboardInterrupt:
            from trueup.foundation.progress import how_to_go_on

            left = how_to_go_on() or ["nothing is left of it: the same command begins again"]
            raise Interrupted("\n  ".join(["interrupted", *left])) from None
        except Exception as error:
            if is_set(VERBOSE) and not isinstance(error, (TrueupError, *USAGE_ERRORS)):
                import traceback

                traceback.print_exc()
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        prepare_help()
        super().format_help(ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line."""
        shown = [one for one in self.params if not getattr(one, "hidden", False)]
        return ["[OPTIONS]", *(piece for one in shown for piece in one.get_usage_pieces(ctx))]


def prepare_help() -> None:
    """Import what draws a help page without Rich's Markdown and tracebacks, which no page of ours has: a quarter of its time.
    typer imports both always, to 0.28 at least."""
    undrawn = [name for name in ("markdown", "traceback") if f"rich.{name}" not in sys.modules]
    if "typer.rich_utils" in sys.modules:
        return
    for name in undrawn:
        sys.modules[f"rich.{name}"] = module = ModuleType(f"rich.{name}")
        setattr(module, name.capitalize(), type(name.capitalize(), (), {}))
    try:
        import typer.rich_utils  # noqa: F401
    finally:
        for name in undrawn:
            del sys.modules[f"rich.{name}"]


def _shared() -> list[Any]:
    """Return the options of all commands."""
    alone = typer.Typer(add_completion=False)

    @alone.command("options", cls=Command)
    def of_all(overwrite: Overwrite = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
        """Take what every command takes, or every one with ``-o``."""

    return list(get_command(alone).params)


def make_room(name: str, given: Mapping[str, Any], paths: Set[str], *, by_itself: bool) -> None:
    """Remove what an earlier run left where a command writes, which was given words, some of them ``paths``; one that does it
    ``by_itself`` is only kept from removing what it reads. Raises UsageError where something else is there."""
    word = given.get("output") or DEFAULTS.get(name, "").format(**given)
    if not word:
        return
    output = Path(word)
    if name not in PAGES:
        _keep(output, (given[key] for key in paths - WRITTEN))
    if by_itself:
        return
    if name in PAGES:
        pages = [output / file for file in PAGES[name].split()]
        if any(page.is_file() for page in pages):
            for page in (output / "index.html", *pages):
                page.unlink(missing_ok=True)
    elif name in KINDS:
        cleared(output, *KINDS[name])
    elif name in FILES and output.is_file() and not given.get("check"):
        if output.suffix not in FILES[name]:
            raise UsageError(
                f"Only a file that ends in {' or '.join(FILES[name])} is overwritten.\n  where:    {output}\n"
                "  next:     name another one with -o"
            )
        output.unlink()


def _keep(output: Path, values: Iterable[Any]) -> None:
    """Raise UsageError where what would be removed is, or holds, what the command reads."""
    for value in values:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if one is not None and Path(one).exists() and Path(one).resolve().is_relative_to(output.resolve()):
                raise UsageError(
                    f"It would remove what it reads.\n  where:    {output}\n  got:      {one}, and --overwrite\n"
                    "  next:     name another place with -o"
                )
