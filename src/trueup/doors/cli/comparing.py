"""The commands over two runs: ``trueup compare BASE CAND`` prints the verdict and leaves a report; ``curves`` judges whole
trainings by their losses; ``align`` follows a recipe, ``diff`` looks at two tensors, ``map`` proposes which layer is which, and
``convert-weights`` converts weights by such a map.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from trueup.doors.cli import loading, options
from trueup.doors.cli.options import Base, Cand, File, Files, Html, Json, Output, Share, Word, Words, save_as_json
from trueup.foundation.model import LEVELS, PHASES, Result, UsageError

if TYPE_CHECKING:
    from trueup.comparison.result.cosines import Cosines
    from trueup.doors.report.terminal import Terminal

LEVEL = "module, api or aten, repeated; else whatever both captures hold."
REPEAT = "A second baseline run: differences of this size count as noise."
COSINE = "List the calls with an output of that cosine or less."
MAPPED = "Which scopes and operators are which; calls to ignore."
JOBS = "Processes that share the ranks; else one a processor from 64 ranks on."
ENGINE = "Where they run: local, ray or dask, or a cluster at ray:ADDRESS, dask:ADDRESS."
RECOMPUTE = "For how long calls behind a culprit are computed again, where CAND holds tensors."


def compare(
    baseline: options.Base,
    candidate: options.Cand,
    output: options.Output = None,
    csv: Annotated[File, typer.Option(metavar="FILE", help="Write a row per tensor as CSV, in ptdbg's columns.")] = None,
    xlsx: Annotated[File, typer.Option(metavar="FILE", help="The same as an Excel workbook, coloured.")] = None,
    junit: Annotated[File, typer.Option(metavar="FILE", help="Write the verdict and each culprit as JUnit's XML, for CI.")] = None,
    sarif: Annotated[File, typer.Option(metavar="FILE", help="Write culprits at their lines of code as SARIF, for CI.")] = None,
    level: Annotated[Words, typer.Option(metavar="LEVEL", help=LEVEL)] = None,
    criterion: Annotated[str, typer.Option(metavar="NAME|FILE", help="What is demanded of the candidate.")] = "default",
    repeat: Annotated[Files, typer.Option(metavar="BASE2", help=REPEAT)] = None,
    more: Annotated[Files, typer.Argument(metavar="BASE3", hidden=True)] = None,
    reference: Annotated[File, typer.Option(metavar="FP64", help="The run in float64: the distance from it decides.")] = None,
    cosine: Annotated[Share, typer.Option(metavar="X", min=-1, max=1, help=COSINE)] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="With --cosine, or of series: how many.")] = 10,
    mapping: Annotated[File, typer.Option("--map", metavar="FILE", help=MAPPED)] = None,
    shards: Annotated[File, typer.Option(metavar="FILE", help="How tensors lie on ranks, where nothing else says it.")] = None,
    recompute: Annotated[Share, typer.Option(metavar="SECONDS", min=0, show_default="60", help=RECOMPUTE)] = None,
    jobs: Annotated[Optional[int], typer.Option("--jobs", "-j", metavar="N", min=1, help=JOBS)] = None,  # noqa: UP045
    engine: Annotated[str, typer.Option(metavar="NAME", help=ENGINE)] = "local",
    json: Json = None,
) -> int:
    """Compare two captures and name the first call that made them differ; of two monitored runs, the first series that leaves.

    Exit code 0: aligned, 1: deviates, 2: could not tell.
    """
    chosen = options.levels(level)
    if more and not repeat:
        raise typer.BadParameter(f"expected two captures, got {len(more) + 2}: repeats of BASE follow --repeat", param_hint="CAND")

    with loading():
        from trueup.comparison.result.cosines import Cosines
        from trueup.doors.comparing import are_monitored
        from trueup.doors.comparing import compare as compare_captures
        from trueup.doors.report.document import document
        from trueup.doors.report.progress import shown
        from trueup.doors.report.terminal import Terminal, print_saved, render
        from trueup.foundation.progress import leaving

    tables = {"csv": csv, "xlsx": xlsx, "junit": junit, "sarif": sarif}
    if are_monitored(baseline, candidate):
        return _series(baseline, candidate, [*(repeat or ()), *(more or ())], limit, output, json, tables)
    _can_write(tables)
    if cosine is not None and (engine != "local" or (jobs or 1) > 1):
        raise UsageError("--cosine looks at each tensor in this process.\n  got:      --jobs too\n  next:     leave one out")
    repeats, cosines = [*(repeat or ()), *(more or ())], None if cosine is None else Cosines()
    with shown(), leaving("nothing was written: a comparison is whole or none, and the same command begins again"):
        result = compare_captures(
            baseline, candidate, level=chosen, criterion=criterion, mapping=mapping, repeat=repeats, reference=reference,
            see=None if cosines is None else cosines.see, **({} if recompute is None else {"recompute": recompute}), shards=shards,
            jobs=jobs, engine=engine,
        )  # fmt: skip
    console = Terminal()
    render(result, console)
    if cosine is not None and cosines is not None:
        _list_cosines(cosines, cosine, limit, console)
    if output is not None:
        print_saved(result.save(output), console)
    _write_tables(result, tables, console)
    save_as_json(lambda: document(result), json, console)
    return result.exit_code


def _can_write(files: Mapping[str, File]) -> None:
    """Say before a comparison, not after, that a workbook needs a library; raises TrueupError."""
    if files["xlsx"] is not None:
        from trueup.doors.report.spreadsheet import xlsxwriter

        xlsxwriter()


def _list_cosines(cosines: Cosines, most: float, limit: int, console: Terminal) -> None:
    """Print the calls with an output whose cosine is ``most`` or less."""
    from trueup.doors.report.node_view import render_listing

    console.print()
    render_listing(cosines.below(most, limit), console)


def _write_tables(result: Result, files: Mapping[str, File], console: Terminal) -> None:
    """Write the files that were asked for, by their kind: ``csv``, ``xlsx``, ``junit``, ``sarif``."""
    from trueup.doors.report.saving import write_junit, write_sarif
    from trueup.doors.report.spreadsheet import write_csv, write_xlsx
    from trueup.doors.report.terminal import print_written

    writers: dict[str, tuple[Callable[[Result, Path], Path], str]] = {
        "csv": (write_csv, "rows"), "xlsx": (write_xlsx, "rows"), "junit": (write_junit, "junit"), "sarif": (write_sarif, "sarif")
    }  # fmt: skip
    for kind, file in files.items():
        if file is not None:
            write, what = writers[kind]
            print_written(write(result, file), console, what)


def _series(
    baseline: Path, candidate: Path, repeats: list[Path], limit: int, output: File, json: File, others: Mapping[str, object]
) -> int:
    """Compare what two monitors wrote; raises UsageError where one of the other options was given."""
    for option, value in others.items():
        if value:
            raise UsageError(f"--{option} is for captures of calls.\n  got:      two monitored runs\n  next:     leave it out")
    from trueup.analysis.monitor.comparing import compare_series
    from trueup.doors.report.monitor import compared_document, render_compared
    from trueup.doors.report.saving import save_json
    from trueup.doors.report.terminal import Terminal, print_written

    found = compare_series(baseline, candidate, repeats)
    console = Terminal()
    render_compared(found, limit, console)
    if output is not None:
        print_written(save_json(compared_document(found), output / "series.json"), console, "json")
    save_as_json(lambda: compared_document(found), json, console)
    return found.exit_code


Metric = Optional[tuple[float, float]]  # noqa: UP045 - typer evaluates it on Python 3.10
AGAIN = "The candidate's training, to be run again if need be."
BASE_AGAIN = "The baseline's training in quotes, to be run again too."


def align(
    baseline: Base,
    candidate: Cand,
    command: Annotated[Words, typer.Argument(metavar="-- COMMAND...", help=AGAIN)] = None,
    recipe: Annotated[str, typer.Option(metavar="NAME|FILE", help="paddle, or a recipe file of your own.")] = "paddle",
    metric: Annotated[Metric, typer.Option(metavar="BASE CAND", help="What both trainings ended with: accuracy, or loss.")] = None,
    mapping: Annotated[
        File, typer.Option("--map", metavar="FILE", help="Which scopes and operators are which, as for compare.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Make all steps, also after one that deviates.")] = False,
    base_command: Annotated[Word, typer.Option(metavar="TEXT", help=BASE_AGAIN)] = None,
    output: Output = None,
    json: Json = None,
) -> int:
    """Follow a recipe: flags and inputs, forward, backward, several steps, the final metric, in the recipe's order and numbers.

    Exit code 0: every step passes, 1: one deviates, 2: could not tell.
    """
    with loading():
        from trueup.analysis.recipes import follow
        from trueup.analysis.recipes.following import further
        from trueup.doors.report.executed import attempts_progress
        from trueup.doors.report.progress import shown
        from trueup.doors.report.terminal import Terminal, print_saved
        from trueup.doors.report.triage import recipe_document, render_recipe, save_recipe
        from trueup.foundation.progress import leaving

    console = Terminal()
    again = functools.partial(follow, recipe=recipe, mapping=mapping, metric=metric, every=every)
    with shown(), leaving("nothing was written: the same command begins again"):
        found = again(baseline, candidate)
    render_recipe(found, console)
    if command:
        base = None if base_command is None else shlex.split(base_command)
        with shown(below=True), leaving("the runs that were made are kept: the same command goes on"):
            inside = further(found, command, base, again, mapping, attempts_progress(console))
        if inside is not None:
            found = inside
            console.print()
            render_recipe(found, console)
    if output is not None:
        print_saved(save_recipe(found, output), console)
    save_as_json(lambda: recipe_document(found), json, console)
    return found.exit_code


PATTERN = "Read a log's lines by this, with named groups: step and the numbers; {number} matches one."
PAIRED = "The n-th runs of both sides share seed and data; else runs are paired by seed where all say one."
SPREAD = "A run's relative standard deviation, known from elsewhere."


def curves(
    runs: Annotated[Words, typer.Argument(metavar="BASE... -- CAND...", help="Runs: captures, logs, tables, folders.")] = None,
    series: Annotated[Word, typer.Option(metavar="NAME|GLOB|BASE=CAND", help="Which number; else the loss.")] = None,
    margin: Annotated[str, typer.Option(metavar="SHARE", help="The largest difference that does not matter.")] = "0.5%",
    better: Annotated[Word, typer.Option(metavar="lower|higher", help="Only what is worse counts (non-inferiority).")] = None,
    window: Annotated[Word, typer.Option(metavar="FIRST:LAST", help="Steps that the verdict is of; else the last tenth.")] = None,
    paired: Annotated[Optional[bool], typer.Option("--paired/--unpaired", help=PAIRED)] = None,  # noqa: UP045 - Python 3.10
    spread: Annotated[Word, typer.Option(metavar="SHARE", help=SPREAD)] = None,
    shift: Annotated[int, typer.Option(metavar="N", help="The candidate's step n + N is the baseline's step n.")] = 0,
    pattern: Annotated[Words, typer.Option(metavar="REGEX", help=PATTERN)] = None,
    output: Output = None,
    json: Json = None,
) -> int:
    """Say whether a candidate's training curves are a baseline's, with an error bar: equivalent within a margin, different, or how
    many repeats would tell.

    Reads captures, TensorBoard events, exports of W&B and MLflow, trainer_state.json, CSV, JSON(L) and logs. Exit code 0:
    equivalent, or different inside the margin, 1: different, 2: could not tell.
    """
    first, second = options.two_sides(runs, "trueup curves base-*.csv -- cand-*.csv")
    allowed, known = options.share(margin, "--margin"), None if spread is None else options.share(spread, "--spread")
    side = options.one(better, ("lower", "higher"), "--better")
    steps = None if window is None else options.span(window, "--window")

    with loading():
        from trueup.doors.comparing import curves as judge
        from trueup.doors.report.curves import document, render, save
        from trueup.doors.report.terminal import Terminal, print_saved

    options_of = {"margin": allowed, "paired": paired, "better": side, "window": steps, "spread": known, "shift": shift}
    found = judge(first, second, series, pattern=pattern or (), **options_of)
    console = Terminal()
    render(found, console)
    if output is not None:
        print_saved(save(found, output), console)
    save_as_json(lambda: document(found), json, console)
    return found.exit_code


def diff(
    baseline: Annotated[str, typer.Argument(metavar="BASE:CALL:SLOT", help="CALL is a seq or scope/op#n; or a .npy file.")],
    candidate: Annotated[str, typer.Argument(metavar="CAND:CALL:SLOT", help="Likewise; a capture alone: the same CALL and SLOT.")],
    rtol: Annotated[float, typer.Option(metavar="X", help="Close: |b - a| <= atol + rtol |a|.")] = 1e-5,
    atol: Annotated[float, typer.Option(metavar="X", help="Likewise.")] = 1e-8,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="How many of the worst elements to list.")] = 10,
    phase: options.Phase = None,
    step: options.Step = None,
    rank: options.Rank = None,
    level: options.Level = None,
    html: Html = None,
    json: Json = None,
) -> int:
    """Compare two tensors element by element.

    Exit code 0: within the tolerance, 1: not, 2: could not tell.
    """
    phase, level = options.one(phase, PHASES, "--phase"), options.one(level, LEVELS, "--level")
    for option, value in (("--rtol", rtol), ("--atol", atol)):
        if not 0 <= value < float("inf"):
            raise UsageError(
                f"{option} cannot be used.\n  expected: a number of at least 0\n  got:      {value}\n  next:     correct it"
            )

    with loading():
        from trueup.analysis.selecting import Selection
        from trueup.doors.report.capture_view import operand, read_address
        from trueup.doors.report.diff import compare_tensors, diff_page, document, render_diff
        from trueup.doors.report.saving import write_text
        from trueup.doors.report.terminal import Terminal, print_written
        from trueup.foundation.kernels.metrics import Tolerance

    chosen = Selection(Path(), phase=phase, step=step, rank=rank, level=level)
    first = read_address(baseline)
    second = read_address(candidate, like=first)
    found = compare_tensors(operand(first, chosen), operand(second, chosen), Tolerance(rtol, atol), top)
    console = Terminal()
    render_diff(found, console)
    if html is not None:
        print_written(write_text(diff_page(found), html, "a file that can be written, for the page"), console, "page")
    save_as_json(lambda: document(found), json, console)
    return found.exit_code


def map(
    baseline: Base,
    candidate: Annotated[Path, typer.Argument(metavar="CAND", help="Capture of the other run.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the map goes.")] = Path("map.toml"),
    overwrite: options.Overwrite = False,
    json: Json = None,
) -> int:
    """Propose which layer of one model is which of another, of two frameworks or of one.

    Exit code 0: each layer with weights has a counterpart and none is unsure, 2: some want a look.
    """
    with loading():
        from trueup.analysis.pairing.models import tree_of_capture
        from trueup.analysis.pairing.proposing import propose, text, write_map
        from trueup.doors.report.document import fields
        from trueup.doors.report.terminal import Terminal

    proposal = propose(tree_of_capture(baseline), tree_of_capture(candidate))
    typer.echo(str(proposal))
    if not overwrite and output.is_file() and output.read_bytes() != text(proposal).encode():
        raise UsageError(  # somebody may have corrected it by hand
            f"There is another map already.\n  where:    {output}\n  expected: none, or the same map\n  got:      another one\n"
            "  next:     -o FILE writes beside it, --overwrite replaces it"
        )
    typer.echo(f"map: {write_map(proposal, output)}")
    code = 2 if proposal.unsure or proposal.only_baseline or proposal.only_candidate else 0
    said = {"schema": "trueup-map", "schema_version": 1, "exit_code": code, "map": str(output)}
    save_as_json(lambda: said | fields(proposal, "pairs only_baseline only_candidate"), json, Terminal())
    return code


def convert_weights(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Weights: .safetensors, .npz, .pt, .pth, .bin or .pdparams.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A new file, .safetensors or .npz.")],
    mapping: Annotated[Path, typer.Option("--map", metavar="FILE", help="Which layer is which, as `trueup map` writes it.")],
    to: Annotated[str, typer.Option(metavar="FRAMEWORK", help="torch or paddle.")],
    partly: Annotated[bool, typer.Option("--partly", help="Write what can be converted, although something cannot.")] = False,
    json: Json = None,
) -> int:
    """Convert a model's weights: uses layer classes, never guesses from shapes.

    Exit code 0: all were converted, 2: some were not, and are named.
    """
    from trueup.analysis.pairing.proposing import convert_state, read_state, write_state
    from trueup.doors.report.document import fields
    from trueup.doors.report.terminal import Terminal
    from trueup.foundation.frameworks.mapping import load

    found = convert_state(read_state(source), load(mapping), to)
    typer.echo(str(found))
    if found.is_whole or partly:
        typer.echo(f"weights: {write_state(found.state, output)}")
    else:
        typer.echo("nothing was written: correct the map, or pass --partly", err=True)
    code = 0 if found.is_whole else 2
    said = {"schema": "trueup-conversion", "schema_version": 1, "exit_code": code, "converted": sorted(found.state)}
    save_as_json(lambda: said | fields(found, "missing unused unsure"), json, Terminal())
    return code
