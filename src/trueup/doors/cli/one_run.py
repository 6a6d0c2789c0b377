"""The commands that look at what a run did: ``trueup show CAP`` lists calls, modules, a tensor; ``shell`` is a prompt for it.

``check`` is about dtypes, ``preflight`` about settings, ``overflow`` about NaN and Inf; ``import`` makes a capture of a dump, and
``export-metrics`` writes its curves and findings for TensorBoard, Prometheus, W&B or MLflow. ``monitor -- COMMAND`` takes a
training's numbers all the time; ``report`` draws what it wrote; ``invariants`` learns what holds in a healthy run.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from trueup.doors.cli import loading, options
from trueup.doors.cli.options import Base, File, Json, Numbers, Word, Words, save_as_json
from trueup.foundation.model import LEVELS, PHASES, TrueupError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.selecting import Selection
    from trueup.foundation.store import Capture

Pair = Optional[tuple[str, str]]  # noqa: UP045 - typer evaluates it on Python 3.10
BESIDE = "With --call: beside the call of that name in this capture."

OUTPUT = "Where the series go; an earlier monitor's is gone on with."
EVERY = "Steps between two that have everything; loss, rates and gradient norms are of each."
DIGESTS = "Steps between digests of the parameters, where there are several ranks; 0: none."
ON_ALERT = "message, stop (exit code 3) or capture (the next step, at full detail); repeated."
COMMAND = "Run with each alert as JSON on standard input."
ALSO = (
    "moments, spectrum, output-gradients, collectives, modules, inputs, extremes, micro-batches or updates, which cost more; "
    "repeated."
)
INVARIANTS = "Check what `trueup invariants` learned of a healthy run, while this one goes."
CHECK = "Steps between two checks of the invariants; a check records three steps."


def show(
    path: Annotated[Path, typer.Argument(metavar="CAPTURE", help="The capture.")],
    scope: Annotated[Word, typer.Option(metavar="GLOB", help="Scopes, with all that is inside them.")] = None,
    op: Annotated[Word, typer.Option(metavar="GLOB", help="Operators; aten:: may be left out.")] = None,
    phase: Annotated[Word, typer.Option(metavar="PHASE", help=f"{', '.join(PHASES)}.")] = None,
    step: options.Step = None,
    rank: options.Rank = None,
    level: options.Level = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many calls to list.")] = 30,
    tree: Annotated[bool, typer.Option("--tree", help="Show the modules instead, with their calls counted.")] = False,
    short: Annotated[bool, typer.Option("--short", help="A line for each call.")] = False,
    call: Annotated[Word, typer.Option(metavar="CALL", help="One call with what stands around it: a seq or scope/op#n.")] = None,
    against: Annotated[File, typer.Option(metavar="BASE", help=BESIDE)] = None,
    tensor: Annotated[Pair, typer.Option(metavar="CALL SLOT", help="Show one tensor: CALL is a seq or scope/op#n.")] = None,
    npy: Annotated[File, typer.Option(metavar="FILE", help="With --tensor: write its elements there as plain .npy.")] = None,
    where: Annotated[
        Word, typer.Option(metavar="CONDITION", help="Tensors whose numbers are so: 'n_nan > 0 and l2 >= 1e3'.")
    ] = None,
    nan: Annotated[bool, typer.Option("--nan", help="Tensors with NaN; --nan --inf: with either.")] = False,
    inf: Annotated[bool, typer.Option("--inf", help="Tensors with Inf.")] = False,
    saturated: Annotated[bool, typer.Option("--saturated", help="Tensors with the dtype's largest number.")] = False,
    json: Json = None,
) -> None:
    """Show what a capture holds."""
    phase, level = options.one(phase, PHASES, "--phase"), options.one(level, LEVELS, "--level")

    with loading():
        from trueup.analysis.selecting import Selection, read_conditions
        from trueup.doors.report.capture_view import document, render_header, render_tensor
        from trueup.doors.report.terminal import Terminal
        from trueup.foundation.store import open_capture
        from trueup.foundation.store.series import is_monitor

    if npy is not None and tensor is None:
        raise UsageError(
            "--npy needs a tensor.\n  expected: --tensor CALL SLOT --npy FILE\n  got:      --npy alone\n  next:     name the tensor"
        )
    conditions = read_conditions(where, nan=nan, inf=inf, saturated=saturated)
    chosen = Selection(path, scope, op, phase, step, rank, level, conditions)
    capture, console = open_capture(path), Terminal()
    if is_monitor(capture):
        _series(capture, chosen, limit, json, console)
        return
    save_as_json(lambda: document(capture, chosen, limit, call if tensor is None else tensor[0]), json, console)
    if tensor is not None:
        render_tensor(capture, chosen, *tensor, console, npy)
        return
    if call is not None:
        _call(capture, chosen, call, against, console)
        return
    render_header(capture, chosen, console)
    _calls(capture, chosen, limit, console, tree=tree, short=short)


def _calls(capture: Capture, chosen: Selection, limit: int, console: Console, *, tree: bool, short: bool) -> None:
    from trueup.analysis.selecting import NothingChosen, chosen_calls
    from trueup.doors.report.capture_view import render_calls, render_list, render_tree
    from trueup.foundation.words.wording import clean, say

    try:
        if tree:
            render_tree(capture, chosen, console)
        elif short:
            render_list(*chosen_calls(capture, chosen, limit), console, several=len(capture.ranks) > 1)
        else:
            render_calls(capture, chosen, limit, console)
    except NothingChosen as none:  # an answer: no tensor with NaN
        say(clean(str(none)))


def _series(capture: Capture, chosen: Selection, limit: int, json: File, console: Console) -> None:
    """Show what a monitor wrote, joined over its ranks; ``--scope``, ``--limit`` and ``--json`` choose of it."""
    from trueup.doors.report.monitor import render_shown, shown_document
    from trueup.foundation.store.series import SeriesReader

    for option, value in (("--op", chosen.op), ("--phase", chosen.phase), ("--step", chosen.step), ("--rank", chosen.rank)):
        if value is not None:
            raise UsageError(f"{option} is for captures of calls.\n  got:      a monitored run\n  next:     leave it out")
    reader = SeriesReader(capture)
    document = shown_document(reader, chosen.scope)
    render_shown(reader, document, limit, console)
    save_as_json(lambda: document, json, console)


def _call(capture: Capture, chosen: Selection, name: str, against: Path | None, console: Console) -> None:
    from trueup.analysis.selecting import find_call
    from trueup.doors.report.node_view import Node, named_alike, render_node
    from trueup.foundation.store import open_capture

    node = Node(capture, find_call(capture, chosen, name))
    other = None if against is None else named_alike(node, open_capture(against))
    render_node((other, node), console, alone=against is None)


def shell(
    baseline: Base,
    candidate: Annotated[File, typer.Argument(metavar="CAND", help="Capture of the run under suspicion.")] = None,
    command: Annotated[
        Words, typer.Option("--command", "-c", metavar="LINE", help="Run this instead of a prompt; or several.")
    ] = None,
) -> int:
    """Look around in one capture or two: ac, vc, vcs, ls, ni, pt, cp, run, help, exit.

    Exit code of --command: 0, or as the commands that they stand for: 1 deviates, 2 could not tell, or a line that cannot be run.
    """
    from trueup.doors.report.terminal import Terminal
    from trueup.doors.shell import run

    return run(baseline, candidate, Terminal(), command or ())


def check(
    path: Annotated[Path, typer.Argument(metavar="CAPTURE", help="The capture, of any framework.")],
    against: Annotated[
        File, typer.Option(metavar="BASE", help="A second capture: other dtypes, missing and extra operators.")
    ] = None,
    step: Annotated[Numbers, typer.Option(metavar="N", help="Casts and dtypes of this step alone, repeated for several.")] = None,
    rank: Annotated[Numbers, typer.Option(metavar="N", help="Of this rank alone, repeated for several.")] = None,
    amp: Annotated[bool, typer.Option("--amp", help="Of mixed precision alone: O1 or O2, loss scale, what to set.")] = False,
    policy: Annotated[File, typer.Option(metavar="FILE", help="With --amp: write its advice, for trueup heal --policy.")] = None,
    instead: Annotated[Word, typer.Option(metavar="static|bfloat16", help="With --policy: write this alternative.")] = None,
    replicas: Annotated[
        bool, typer.Option("--replicas", help="Hold the ranks against each other: which one is odd, what was never reduced.")
    ] = False,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many lines of each kind to list.")] = 10,
    json: Json = None,
) -> int:
    """Check what a run did with dtypes: dangerous casts, is mixed precision on, how does it differ from another run.

    Exit code 0: nothing found; 1: a dangerous cast, other dtypes or other operators, a fault of mixed precision, an odd rank;
    2: could not tell.
    """
    if amp:
        return _amp(path, step or None, rank or None, (policy, instead), limit, json)
    if policy is not None or instead is not None:
        raise typer.BadParameter("a policy is made of the advice of --amp", param_hint="--policy")
    with loading():
        from trueup.analysis.audit import check as judge
        from trueup.doors.report.audit import check_document, render_check
        from trueup.doors.report.terminal import Terminal

    result = judge(path, against=against, step=step or None, rank=rank or None, replicas=replicas)
    console = Terminal()
    render_check(result, limit, console)
    save_as_json(lambda: check_document(result), json, console)
    return result.exit_code


def _amp(path: Path, step: Numbers, rank: Numbers, wanted: tuple[File, Word], limit: int, json: File) -> int:
    with loading():
        from trueup.analysis.audit.amp import amp as judge
        from trueup.doors.report.audit import amp_document, render_amp
        from trueup.doors.report.saving import write_text
        from trueup.doors.report.terminal import Terminal, print_lines, print_written

    found, console = judge(path, step=step, rank=rank), Terminal()
    render_amp(found, limit, console)
    file, instead = wanted
    if instead is not None and instead not in found.instead:
        has = ", ".join(found.instead) or "none for this run"
        raise typer.BadParameter(f"expected an alternative ({has}), got {instead}", param_hint="--instead")
    policy = found.policy if instead is None else found.instead[instead]
    if file is not None and policy:
        print_written(write_text(policy, file, "a file that can be written, for the policy"), console, "policy")
    elif file is not None:
        print_lines(console, [f"{file} was not written: there is nothing to advise."], 0)
    elif policy:
        tried = f"trueup heal {shlex.quote(str(path))} --baseline FLOAT32 --policy policy.toml -- COMMAND"
        print_lines(console, [f"next: this command with --policy policy.toml, then {tried}"], 0)
    save_as_json(lambda: amp_document(found), json, console)
    return found.exit_code


def preflight(
    given: Annotated[
        Words, typer.Argument(metavar="[BASE] [CAND | -- COMMAND...]", help="Captures; a command runs for one step.")
    ] = None,
    require: Annotated[File, typer.Option(metavar="FILE", help="Values that must hold, as TOML (docs/preflight.md).")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many settings to list.")] = 20,
    html: options.Html = None,
    json: Json = None,
) -> int:
    """List which settings of two runs differ, and what that does to the numbers; or look at one run by itself.

    A capture of one step is enough. Exit code 0: nothing that changes numbers, 1: something does, 2: could not tell.
    """
    with loading():
        from trueup.analysis.audit.preflight import preflight as judge
        from trueup.doors.report.audit import preflight_document, preflight_page, render_preflight
        from trueup.doors.report.saving import write_text
        from trueup.doors.report.terminal import Terminal, print_written

    captures, command = _sorted(given or [])
    with tempfile.TemporaryDirectory(prefix="trueup-preflight-") as folder:
        if command:
            captures.append(_one_step(command, Path(folder) / "candidate", captures))
        name = shlex.join(command) if command else None  # the folder is gone when somebody reads it
        result = judge(captures[0] if len(captures) == 2 else None, captures[-1], require=require, name=name)
    console = Terminal()
    render_preflight(result, limit, console)
    if html is not None:
        print_written(write_text(preflight_page(result), html, "a file that can be written, for the page"), console)
    save_as_json(lambda: preflight_document(result), json, console)
    return result.exit_code


def _sorted(given: list[str]) -> tuple[list[Path], list[str]]:
    """Tell captures from a command: what comes first and is a capture is one."""
    captures: list[Path] = []
    for at, one in enumerate(given):
        if len(captures) < 2 and (Path(one) / "manifest.json").is_file():
            captures.append(Path(one))
            continue
        command = given[at:]
        if len(captures) < 2 and (shutil.which(command[0]) or Path(command[0]).is_file()):
            return captures, command
        raise _refused(f"{one!r}, which is no capture" + ("" if len(captures) == 2 else " and no command"))
    if not captures:
        raise _refused("none")
    return captures, []


def _refused(got: str) -> UsageError:
    return UsageError(
        "The captures cannot be told.\n"
        "  expected: one capture, two, or one and a command\n"
        f"  got:      {got}\n"
        "  next:     trueup preflight runs/cpu runs/npu, or trueup preflight runs/cpu -- python train.py"
    )


def _one_step(command: list[str], into: Path, like: Sequence[Path]) -> Path:
    """Record the first step of a command, at the levels of a capture beside it."""
    from trueup.foundation.store import open_capture
    from trueup.recording.recorder.launch import execute
    from trueup.recording.recorder.options import CaptureOptions

    levels = sorted(open_capture(like[0]).levels | {"module"}) if like else ["module", "api"]
    execute(into, CaptureOptions.of(level=levels, detail="digest", steps="0", stop=True), command)
    if not (into / "manifest.json").is_file():
        raise TrueupError(
            "The command recorded nothing.\n  expected: one step of a training\n  got:      none\n"
            f"  next:     trueup capture -o runs/one --steps 0 --stop -- {' '.join(command[:4])}, and see what it says"
        )
    return into


DTYPES = "Of a healthy run: what fp16, bf16, fp8_e4m3 or fp8_e5m2 could not hold."
REPLAY = "Execute bad calls and their readers again in float64: tells whether they matter."
AGAINST = "A trusted capture: whether its calls give the same tells, too."


def overflow(
    path: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A capture of detail stats or tensor.")],
    would_overflow: Annotated[Word, typer.Option(metavar="DTYPE", help=DTYPES)] = None,
    step: Annotated[Numbers, typer.Option(metavar="N", help="Only this step, repeated for several.")] = None,
    rank: Annotated[Numbers, typer.Option(metavar="N", help="Only this rank, repeated for several.")] = None,
    replay: Annotated[bool, typer.Option("--replay", help=REPLAY)] = False,
    against: Annotated[File, typer.Option(metavar="BASE", help=AGAINST)] = None,
    output: options.Output = None,
    html: Annotated[File, typer.Option(metavar="DIR", hidden=True)] = None,  # what -o was called
    json: Json = None,
) -> int:
    """Find the first call of a run that overflowed, and say whether it matters.

    Exit code 0: clean, or harmless; 1: found; 2: could not tell.
    """
    with loading():
        from trueup.analysis.anomalies import overflow as judge
        from trueup.doors.report.audit import overflow_document, render_overflow, save_overflow
        from trueup.doors.report.terminal import Terminal, print_saved

    result = judge(path, would_overflow=would_overflow, step=step or None, rank=rank or None, replay=replay, against=against)
    console = Terminal()
    render_overflow(result, console)
    for folder in filter(None, (output, html)):
        print_saved(save_overflow(result, folder), console)
    save_as_json(lambda: overflow_document(result), json, console)
    return result.exit_code


FORMATS = "msprobe, ptdbg, padiff, hdf5, tfdbg2, tfdbg, tensorflow, arrays"


def import_(
    source: Annotated[Path, typer.Argument(metavar="DUMP", help="Folder of the dump, or one file of it.")],
    output: options.Made,
    format: Annotated[Word, typer.Option(metavar="FORMAT", help=f"{FORMATS}; else told by content.")] = None,
    overwrite: options.Overwrite = False,
    json: Json = None,
) -> int:
    """Import a dump of msprobe, ptdbg, PaDiff, torch.utils.dumper or tfdbg, or a folder of arrays."""
    from rich.markup import escape

    with loading():
        from trueup.doors.report.document import fields
        from trueup.doors.report.progress import shown
        from trueup.doors.report.terminal import Terminal
        from trueup.exchange.readers import import_dump
        from trueup.foundation.progress import leaving
        from trueup.foundation.words.wording import clean

    if overwrite:
        options.cleared(output)
    with shown(), leaving(f"{output} is not complete: import again with --overwrite"):
        imported = import_dump(source, output, format=format)
    console = Terminal(soft_wrap=True)
    console.print(escape(clean(str(imported))))
    said = {"schema": "trueup-import", "schema_version": 1, "directory": str(imported.path)}
    save_as_json(lambda: said | fields(imported, "tool framework ranks steps calls rows tensors lost lacks notes"), json, console)
    return 0


TO = "tensorboard, openmetrics, wandb (offline) or mlflow: who shows them."


def export_metrics(
    source: Annotated[Path, typer.Argument(metavar="CAPTURE|REPORT", help="A capture, or a report of trueup compare -o.")],
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help=TO)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the files go; nothing is sent anywhere.")],
    json: Json = None,
) -> int:
    """Write losses, gradient norms and findings where people look: TensorBoard, OpenMetrics, W&B (offline), MLflow.

    Captures and reports are only read. Of a report both runs are written, so that their curves are beside each other.
    """
    with loading():
        from trueup.doors.report.curves import metrics_document, render_metrics
        from trueup.doors.report.progress import shown
        from trueup.doors.report.terminal import Terminal
        from trueup.exchange.curves import metrics

    options.one(to, metrics.TRACKERS, "--to")
    metrics.needed(to)
    with shown():
        found = metrics.read(source)
        written, following = metrics.write(found, to, output)
    console = Terminal()
    render_metrics(found, written, following, console)
    save_as_json(lambda: metrics_document(found, to, written), json, console)
    return 0


def monitor(
    command: options.Following = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help=OUTPUT)] = Path("trueup-monitor"),
    every: Annotated[int, typer.Option(metavar="N", min=1, help=EVERY)] = 10,
    digests: Annotated[int, typer.Option(metavar="N", min=0, help=DIGESTS)] = 100,
    ranks: Annotated[Word, typer.Option(metavar="RANKS", help="Ranks that monitor: 0 or 0:8; else all.")] = None,
    alerts: Annotated[bool, typer.Option("--alerts/--no-alerts", help="Say when a series leaves its own past.")] = True,
    on_alert: Annotated[Words, typer.Option("--on-alert", metavar="WHAT", help=ON_ALERT)] = None,
    alert_command: Annotated[Word, typer.Option("--alert-command", metavar="COMMAND", help=COMMAND)] = None,
    known: Annotated[File, typer.Option("--invariants", metavar="FILE", help=INVARIANTS)] = None,
    check: Annotated[int, typer.Option("--check-every", metavar="N", min=1, help=CHECK)] = 300,
    also: Annotated[Words, typer.Option("--also", metavar="WHAT", help=ALSO)] = None,
    json: options.Json = None,
) -> int:
    """Run a command and take its training's numbers all the time: loss, gradients, updates, moments, activations, attention.

    The command needs no edit. `trueup compare` lines up two monitored runs.
    """
    words = options.required(command, "monitor", "monitor -o runs/monitor")

    from trueup.analysis.monitor.session import MonitorOptions
    from trueup.recording.recorder import launch

    chosen = MonitorOptions.of(
        every, digests, ranks, alerts, options.words(on_alert) or "message", alert_command, known, check, options.words(also) or ()
    )
    found = list[dict[str, Any]]()
    code = launch.run_monitored(output, chosen.to_json(), words, found.append)
    if json is not None:
        from trueup.doors.report.terminal import Terminal

        options.save_as_json(lambda: found[0], json, Terminal())
    return code


TREND = "Save heat maps: step x rank x module, the line behind each cell."


def report(
    path: Annotated[Path, typer.Argument(metavar="MONITORED", help="What `trueup monitor` wrote.")],
    trend: Annotated[bool, typer.Option("--trend", help=TREND)] = False,
    series: Annotated[Words, typer.Option(metavar="GLOB", help="Only these series: gradient_norm/*; repeated.")] = None,
    output: Annotated[File, typer.Option("--output", "-o", metavar="DIR", help="Saves the page; --trend alone: in trend.")] = None,
    json: options.Json = None,
) -> int:
    """Say which alerts a monitored run had, and draw its series.

    Exit code 0: no alert, 1: alerts, 2: could not tell.
    """
    from trueup.analysis.monitor.trend import trend as found_in
    from trueup.doors.report.monitor import render_trend, save_trend, trend_document
    from trueup.doors.report.terminal import Terminal, print_saved

    found = found_in(path, tuple(series or ()))
    console = Terminal()
    render_trend(found, console)
    if trend or output is not None:
        print_saved(save_trend(found, output or Path("trend")), console)
    options.save_as_json(lambda: trend_document(found), json, console)
    return found.exit_code


LEARNED = "Check the capture against this file, which an earlier call wrote."


def invariants(
    captures: Annotated[Words, typer.Argument(metavar="CAPTURE...", help="Healthy runs to learn from, or a run to check.")] = None,
    against: Annotated[File, typer.Option("--check", metavar="FILE", help=LEARNED)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where it goes.")] = Path("invariants.json"),
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many lines to list.")] = 10,
    json: options.Json = None,
) -> int:
    """Learn what holds in each step of a healthy run, or check another run for it; no baseline of the same numbers is needed.

    Exit code 0: learned, or all of it holds, 1: something does not, 2: could not tell.
    """
    paths = options.required(captures, "learn from", "invariants runs/healthy", "a capture")
    from rich.text import Text

    from trueup.analysis.invariants.relations import check, learn, load, save
    from trueup.doors.report.document import fields, headed
    from trueup.doors.report.terminal import COLOURS, Terminal, labelled, print_lines, print_more_by_limit
    from trueup.foundation.words.wording import clean, counted

    console = Terminal()
    if against is None:
        known = learn(paths)
        save(known, output)
        kinds = known.kinds
        order = ", the order of the calls" if kinds["calls"] else ""
        alike = f", {kinds['alike']:,} of one shape there" if kinds["alike"] else ""
        some = f"; {known.conditional:,} of them under a condition" if known.conditional else ""
        print_lines(console, [
            f"LEARNED  {counted(known.count, 'relation')}: {counted(kinds['changes'], 'tensor')} that each step changes, "
            f"{kinds['stays']:,} that none does, {kinds['equal']:,} equal on ranks{alike}, {kinds['same']:,} gradients as made, "
            f"{kinds['arguments']:,} constant arguments, {kinds['types']:,} dtypes, {kinds['shapes']:,} shapes{order}{some}",
            f"         {output}",
        ], 9)  # fmt: skip
        held = {"schema": "trueup-invariants-learned", "schema_version": 1, "exit_code": 0, "file": str(output)}
        held["count"] = known.count
        options.save_as_json(lambda: held, json, console)
        return 0
    if len(paths) != 1:
        raise UsageError(f"--check takes one capture.\n  got:      {len(paths)}\n  next:     check them one by one")
    found = check(load(against), paths[0])
    print_lines(console, clean(found.sentence).splitlines(), len(found.sentence.partition("  ")[0]) + 2, COLOURS[found.verdict])
    for one in found.violations[1:limit]:
        print_lines(console, [clean(one.said)], 2)
    print_more_by_limit(console, len(found.violations), limit)
    for note in found.notes:
        console.print(labelled([("note", Text(clean(note), overflow="fold"))]))
    told = headed("trueup-invariants-check", found, "judged") | fields(found, "violations notes")
    options.save_as_json(lambda: told, json, console)
    return found.exit_code
