"""``trueup monitor -- COMMAND`` takes a training's numbers all the time; ``report`` draws what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trueup.doors.cli import options as shared
from trueup.doors.cli.options import File, Word, Words
from trueup.foundation.model import UsageError

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


def monitor(
    command: shared.Following = None,
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
    json: shared.Json = None,
) -> int:
    """Run a command and take its training's numbers all the time: loss, gradients, updates, moments, activations, attention.

    The command needs no edit. `trueup compare` lines up two monitored runs.
    """
    words = shared.required(command, "monitor", "monitor -o runs/monitor")

    from trueup.analysis.monitor.session import MonitorOptions
    from trueup.recording.recorder import launch

    chosen = MonitorOptions.of(
        every, digests, ranks, alerts, shared.words(on_alert) or "message", alert_command, known, check, shared.words(also) or ()
    )
    found = list[dict[str, Any]]()
    code = launch.run_monitored(output, chosen.to_json(), words, found.append)
    if json is not None:
        from trueup.doors.report.terminal import Terminal

        shared.save_as_json(lambda: found[0], json, Terminal())
    return code




TREND = "Save heat maps: step x rank x module, the line behind each cell."


def report(
    path: Annotated[Path, typer.Argument(metavar="MONITORED", help="What `trueup monitor` wrote.")],
    trend: Annotated[bool, typer.Option("--trend", help=TREND)] = False,
    series: Annotated[Words, typer.Option(metavar="GLOB", help="Only these series: gradient_norm/*; repeated.")] = None,
    output: Annotated[File, typer.Option("--output", "-o", metavar="DIR", help="Saves the page; --trend alone: in trend.")] = None,
    json: shared.Json = None,
) -> int:
    """Say which alerts a monitored run had, and draw its series.

    Exit code 0: no alert, 1: alerts, 2: could not tell.
    """
    from trueup.analysis.monitor.trend import trend as found_in
    from trueup.doors.report.terminal import Terminal, print_saved
    from trueup.doors.report.trend import document, render, save

    found = found_in(path, tuple(series or ()))
    console = Terminal()
    render(found, console)
    if trend or output is not None:
        print_saved(save(found, output or Path("trend")), console)
    shared.save_as_json(lambda: document(found), json, console)
    return found.exit_code


LEARNED = "Check the capture against this file, which an earlier call wrote."


def invariants(
    captures: Annotated[Words, typer.Argument(metavar="CAPTURE...", help="Healthy runs to learn from, or a run to check.")] = None,
    against: Annotated[File, typer.Option("--check", metavar="FILE", help=LEARNED)] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where it goes.")] = Path("invariants.json"),
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many lines to list.")] = 10,
    json: shared.Json = None,
) -> int:
    """Learn what holds in each step of a healthy run, or check another run for it; no baseline of the same numbers is needed.

    Exit code 0: learned, or all of it holds, 1: something does not, 2: could not tell.
    """
    paths = shared.required(captures, "learn from", "invariants runs/healthy", "a capture")
    from rich.text import Text

    from trueup.analysis.invariants.learning import check, learn
    from trueup.analysis.invariants.relations import load, save
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
        shared.save_as_json(lambda: held, json, console)
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
    shared.save_as_json(lambda: told, json, console)
    return found.exit_code
