"""The commands that execute recorded calls: ``trueup replay BASE --device npu`` judges each by itself, with its recorded inputs.

``verify-capture``: is all recorded that it takes? ``shadow-report``: what a shadow run found. ``reproduce``: a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trueup.doors.cli import loading, options
from trueup.doors.cli.options import File, Word, Words
from trueup.foundation.model import DETAILS, LEVELS, PHASES, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.rerun.replay import Screening, Settings
    from trueup.recording.execution.judging import Replay

Calls = Annotated[Words, typer.Option(metavar="PATTERN", help="Operators or scopes (glob, /expression/), or call numbers.")]
Level = Annotated[Words, typer.Option(metavar="LEVEL", help="api or aten; else both, as far as recorded.")]
Processes = Annotated[int, typer.Option("--jobs", "-j", metavar="N", help="Processes.", min=1)]
NOTHING = "nothing was kept: with -o DIR it goes on where it was interrupted"
Output = Annotated[File, typer.Option("--output", "-o", metavar="DIR", help="Save results there; go on where it was killed.")]


def replay(
    bases: Annotated[list[Path], typer.Argument(metavar="BASE...", help="Captures whose calls are executed again.")],
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where: npu, cuda:1, cpu.")],
    calls: Calls = None,
    level: Level = None,
    phase: Annotated[Words, typer.Option(metavar="PHASE", help=f"{', '.join(PHASES)}; else all but collective.")] = None,
    reference: Annotated[str, typer.Option(metavar="DTYPE", help="Precision of the truth: float64 on the CPU.")] = "float64",
    dedup: Annotated[bool, typer.Option("--dedup", help="Once for each operator, dtype, shape, strides and attributes.")] = False,
    processes: Processes = 1,
    output: Output = None,
    simulated: options.Simulated = False,
    judge: Annotated[
        str, typer.Option(metavar="WHICH", help="device or recorded; else what is no CPU: whose results are judged.")
    ] = "",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="After which a call is given up.", min=1)] = 300.0,
    json: options.Json = None,
) -> int:
    """Execute each recorded call again with its recorded inputs, and compare its own error with the baseline's.

    Of several models: which operators are wrong in which, as one list and policy. Exit code 0: all that was judged is accurate,
    1: some calls are wrong, 2: could not tell.
    """
    if reference != "float64":
        raise UsageError(f"--reference cannot be read.\n  expected: float64\n  got:      {reference!r}\n  next:     leave it out")
    which = options.one(judge or None, ("device", "recorded"), "--judge")

    from trueup.analysis.rerun.processes import to_json
    from trueup.analysis.rerun.replay import LEVELS as EXECUTED
    from trueup.analysis.rerun.replay import Settings, screen
    from trueup.doors.report.executed import render
    from trueup.doors.report.progress import shown
    from trueup.doors.report.terminal import Terminal
    from trueup.foundation.progress import leaving

    levels = options.some(options.levels(level) or EXECUTED, EXECUTED, "--level")
    phases = options.some(options.words(phase), PHASES, "--phase")
    recorded = which == "recorded" if which else device.partition(":")[0] == "cpu"
    settings = Settings(
        "", device, levels, phases or tuple(p for p in PHASES if p != "collective"), tuple(calls or ()), dedup,
        simulated=simulated, recorded=recorded, threads=1 if processes > 1 else 0,
    )  # fmt: skip
    with shown(), leaving(f"what was executed is in {output}: the same command goes on there" if output else NOTHING):
        found = _executed(bases, settings, output, processes, timeout)
    console = Terminal()
    if len(bases) > 1:
        return _screened(screen(found), output, console, json)
    (alone,) = found.values()
    render(alone, console)
    if output is not None:
        console.print(f"  saved: {output}/replay.json, outcomes.parquet", style="dim", markup=False)
    options.save_as_json(lambda: {"schema": "trueup-replay"} | to_json(alone), json, console)
    return alone.exit_code


def _executed(
    bases: Sequence[Path], settings: Settings, output: File, processes: int, timeout: float
) -> dict[str, Replay]:  # fmt: skip
    """Replay captures one after the other, several each into a folder of its own; return what was found by their names."""
    from trueup.analysis.rerun.replay import names_of, run
    from trueup.foundation.store import open_capture
    from trueup.foundation.words.wording import say

    found: dict[str, Replay] = {}
    for base in bases:
        if open_capture(base).root.get("detail") != DETAILS[-1]:
            say(f"{base} holds no elements: inputs are drawn to match the recorded numbers")
    for name, base in zip(names_of(bases), bases, strict=True):
        into = output if output is None or len(bases) == 1 else output / name.replace("/", "_")
        found[name] = run(replace(settings, base=str(base)), into, processes=processes, timeout=timeout)
    return found


def _screened(result: Screening, output: File, console: Console, json: File) -> int:
    from trueup.analysis.rerun.processes import to_json
    from trueup.doors.report.document import headed
    from trueup.doors.report.executed import render_screening
    from trueup.doors.report.saving import write_text

    policy = output / "policy.toml" if output is not None and result.policy else None
    if policy is not None:
        write_text(result.policy, policy, "a file that can be written, for the policy")
    render_screening(result, policy, console)
    facts = "sentence device operators policy black_list"
    models = {name: to_json(one) for name, one in result.models.items()}
    options.save_as_json(lambda: headed("trueup-screening", result, facts) | {"models": models}, json, console)
    return result.exit_code


def verify_capture(
    capture: Annotated[Path, typer.Argument(metavar="CAPTURE", help="Of detail tensor.")],
    calls: Calls = None,
    level: Level = None,
    processes: Processes = 1,
    output: Output = None,
    simulated: options.Simulated = False,
    json: options.Json = None,
) -> int:
    """Execute each call on the device that recorded it; its results must be the recorded bits, its tensors undamaged.

    Exit code 0: all are, 1: some calls are not reproducible or some tensors are damaged, and why.
    """
    from trueup.analysis.rerun.replay import LEVELS as EXECUTED
    from trueup.analysis.rerun.replay import verify
    from trueup.doors.report.executed import render_verification
    from trueup.doors.report.progress import shown
    from trueup.doors.report.terminal import Terminal
    from trueup.foundation.progress import leaving

    levels = options.some(options.levels(level) or EXECUTED, EXECUTED, "--level")
    with shown(), leaving(f"what was executed is in {output}: the same command goes on there" if output else NOTHING):
        found = verify(
            capture, levels=levels, patterns=tuple(calls or ()), processes=processes, simulated=simulated, output=output
        )
    console = Terminal()
    render_verification(found, console)
    said = {"schema": "trueup-verification", "schema_version": 1, "exit_code": found.exit_code, "reproduced": found.reproduced}
    options.save_as_json(lambda: said | {"reasons": found.reasons, "damaged": found.damaged}, json, console)
    return found.exit_code


def shadow_report(
    path: Annotated[Path, typer.Argument(metavar="CAPTURE", help="Capture of a shadow run.")],
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="How many operators to list.")] = 20,
    json: options.Json = None,
) -> int:
    """Say which calls of a shadow run are wrong by themselves, and how large the errors of each operator are.

    Exit code 0: nothing wrong, 1: wrong, 2: could not tell.
    """
    with loading():
        from trueup.doors.report.document import headed
        from trueup.doors.report.executed import render_shadow
        from trueup.doors.report.terminal import Terminal
        from trueup.recording.execution.shadow import open_result

    result, console = open_result(path), Terminal()
    render_shadow(result, limit, console)
    facts = "reference culprits suspects counts left unknown steps notes"
    options.save_as_json(lambda: headed("trueup-shadow", result, facts), json, console)
    return result.exit_code


def reproduce(
    capture: Annotated[Path, typer.Argument(metavar="CAPTURE", help="Capture, or folder of a report.")],
    call: Annotated[str, typer.Argument(metavar="CALL", help="A seq or scope/op#n; of a report: culprit, culprit.1 ...")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="New folder to write.")],
    device: Annotated[Word, typer.Option(metavar="DEVICE", help="Where it fails, if that is here: npu, cuda:1.")] = None,
    against: Annotated[str, typer.Option(metavar="DEVICE", help="Whose results are right.")] = "cpu",
    minimise: Annotated[bool, typer.Option("--minimise", help="Shrink it while the same failure stays.")] = False,
    context: Annotated[bool, typer.Option("--context", help="Right by itself: with the fewest calls before it.")] = False,
    seconds: Annotated[float, typer.Option(metavar="N", min=1, help="How long shrinking, or finding calls, may take.")] = 60.0,
    simulated: options.Simulated = False,
    imports: Annotated[str, typer.Option("--import", metavar="MODULE", help="Imported first: it makes a device known.")] = "",
    check: Annotated[bool, typer.Option(help="Run the test on both devices.")] = True,
    phase: options.Phase = None,
    step: options.Step = None,
    rank: options.Rank = None,
    level: Annotated[Word, typer.Option(metavar="LEVEL", help="api or aten.")] = None,
    overwrite: options.Overwrite = False,
    json: options.Json = None,
) -> int:
    """Write a recorded call as a test for pytest that imports its framework and safetensors, and no Trueup.

    Exit code 0: written, 2: written, but on the device it does not fail, or it could not be written.
    """
    phase, level = options.one(phase, PHASES, "--phase"), options.one(level, LEVELS, "--level")

    from trueup.analysis.rerun.reproduce import reproduce as write
    from trueup.doors.report.document import fields
    from trueup.doors.report.progress import shown
    from trueup.doors.report.terminal import Terminal
    from trueup.foundation.progress import leaving

    if overwrite:
        options.cleared(output, "what reproduce wrote", ("inputs.safetensors", "test_*.py"))
    with shown(), leaving(f"the test in {output} is not complete, if there is one: the same command with --overwrite begins again"):
        made = write(
            capture, call, output, device=device, against=against, minimise=minimise, context=context, seconds=seconds,
            simulated=simulated, imports=imports, check=check, phase=phase, step=step, rank=rank, level=level,
        )  # fmt: skip
    console = Terminal()
    console.print(made.sentence, markup=False)
    for note in made.notes:
        console.print(f"  {note}", style="dim", markup=False)
    console.print(f"  written: {made.folder} ({made.size:,} bytes of inputs)", markup=False)
    first = "trueup.simdev" if simulated else imports
    console.print(f"  next:    pytest {made.test}{f' --import {first}' if first else ''}", markup=False)
    facts = {"schema": "trueup-reproducer", "schema_version": 1}
    options.save_as_json(lambda: facts | fields(made, "exit_code sentence folder test fails checked size notes"), json, console)
    return made.exit_code
