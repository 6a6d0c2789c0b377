"""The commands that end in a training's own, and run it: ``trueup capture -o DIR -- COMMAND``.

``watch`` says which call gave the first bad value; ``triage`` and ``bisect`` run it again and again; ``heal`` with a policy.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup.doors.cli import options as shared
from trueup.doors.cli.options import File, Number, Word, Words
from trueup.foundation.model import LEVELS, PHASES, TrueupError, UsageError
from trueup.foundation.store.layout import url_of
from trueup.foundation.words.wording import say
from trueup.recording.recorder.options import FRAMES

Steps = Annotated[Word, typer.Option(metavar="STEPS", help="0:3 (steps 0, 1, 2), 5: or 0,2,5; else all.")]
Ranks = Annotated[Word, typer.Option(metavar="RANKS", help="Likewise; else all.")]
Include = Annotated[Words, typer.Option(metavar="PATTERN", help="Scopes or operators to record: a glob or /expression/.")]
Exclude = Annotated[Words, typer.Option(metavar="PATTERN", help="Scopes or operators to leave out.")]
COMPILE = "off runs the Python code of what torch.compile compiled and sees all of it; through follows the compiled run."
Compile = Annotated[str, typer.Option(metavar="COMPILE", help=COMPILE)]

DETAIL = "digest, stats or tensor: how much is kept of each tensor."
ON_ERROR = "continue or stop: the run, where the capture cannot be written."
INPUTS_FROM = "Give each module what it was given in this capture (of --detail tensor), so that it shows its own error alone."
FORCE = "With --inputs-from: to which calls: module, api or aten; else the first of these that BASE has."
SHADOW = "Compute each operator once more there (cpu:float64) with the same inputs, and say which is wrong by itself."
SAMPLE = "Share of the calls; the first of each kind always."
RUN_ID = "The same on each node that records into one shared DIR: $SLURM_JOB_ID, --rdzv-id."
SHADOW_EXIT = "Exit with 1 where a call is wrong, 2 where nobody can tell; else as the command did."


def capture(
    output: shared.Made,
    command: shared.Following = None,
    level: Annotated[Words, typer.Option(metavar="LEVEL", help="module, api or aten, repeated; or all (the default).")] = None,
    detail: Annotated[str, typer.Option(metavar="DETAIL", help=DETAIL)] = "stats",
    steps: Steps = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the run when the last of --steps is recorded.")] = False,
    ranks: Ranks = None,
    include: Include = None,
    exclude: Exclude = None,
    phase: Annotated[Words, typer.Option(metavar="PHASE", help=f"{', '.join(PHASES)}; else all.")] = None,
    on_error: Annotated[str, typer.Option("--on-error", metavar="WHAT", help=ON_ERROR)] = "continue",
    compile: Compile = "off",
    policy: Annotated[File, typer.Option(metavar="FILE", help="Run calls as this policy.toml says (docs/policy.md).")] = None,
    inputs_from: Annotated[File, typer.Option(metavar="BASE", help=INPUTS_FROM)] = None,
    force: Annotated[Word, typer.Option(metavar="LEVEL", help=FORCE)] = None,
    shadow: Annotated[Word, typer.Option(metavar="DEVICE:DTYPE", help=SHADOW)] = None,
    shadow_sample: Annotated[float, typer.Option(metavar="SHARE", help=SAMPLE)] = 1.0,
    shadow_seed: Annotated[int, typer.Option(metavar="N", help="Chooses which.")] = 0,
    shadow_time: Annotated[Word, typer.Option(metavar="LIMIT", help="Most that a step may take longer: 200ms, 0.5x.")] = None,
    shadow_largest: Annotated[
        float, typer.Option(metavar="MB", help="Calls with a larger tensor are left out, and counted.")
    ] = 1024.0,
    shadow_exit: Annotated[bool, typer.Option("--shadow-exit", help=SHADOW_EXIT)] = False,
    run_id: Annotated[Word, typer.Option(metavar="ID", help=RUN_ID)] = None,
    overwrite: shared.Overwrite = False,
    json: shared.Json = None,
) -> int:
    """Run a command and record what its training computes.

    The command needs no edit; python, torchrun and scripts that start workers are all followed.
    """
    command = shared.required(command, "capture", "capture -o runs/cpu")
    url = url_of(output)
    if overwrite:
        _cleared(output, url, run_id)
    options: dict[str, Any] = {
        "level": shared.levels(level) or LEVELS, "detail": detail, "steps": steps, "stop": stop,
        "ranks": ranks, "include": tuple(include or ()) or None, "exclude": tuple(exclude or ()) or None,
        "phase": shared.words(phase) or None, "on_error": on_error, "compile": compile,
        "policy": None if policy is None else str(policy),
    } | ({} if run_id is None else {"run_id": run_id})  # fmt: skip
    options |= _forced(inputs_from, force)

    if shadow is not None:
        options["shadow"] = _shadow(shadow, sample=shadow_sample, seed=shadow_seed, time=shadow_time, largest_mb=shadow_largest)

    from trueup.doors.report.progress import shown
    from trueup.recording.recorder import launch

    found = list[dict[str, Any]]()
    with _folder(output, url, shared=run_id is not None) as directory:
        with shown(below=True):
            see = None if json is None else found.append
            code = launch.run({"directory": str(directory), **options}, command, see)
        if shadow is not None:
            code = tell_shadow(directory, code, decides=shadow_exit)
    if json is not None:
        _document(found[0] | {"exit_code": code} | ({} if url is None else {"directory": url}), json)
    return code


def _shadow(device: str, **options: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from trueup.recording.recorder.options import ShadowOptions

    return asdict(ShadowOptions.of(device, **options))


def _folder(output: Path, url: str | None, *, shared: bool) -> AbstractContextManager[Path]:
    """Give the folder that is recorded into: for object storage one of this machine."""
    if url is None:
        return nullcontext(output)
    from trueup.foundation.store.objects import spooled

    return spooled(url, shared=shared, say=say)


def _document(told: dict[str, Any], json: Path) -> None:
    from trueup.doors.report.terminal import Terminal

    shared.save_as_json(lambda: told, json, Terminal())


def _cleared(output: Path, url: str | None, run_id: str | None) -> None:
    """Remove the old capture; raises UsageError where several nodes record into it, or it lies on object storage."""
    if url is not None:
        said = "Nothing on object storage is written over.\n  got:      --overwrite\n"
        raise UsageError(f"{said}  next:     choose another URL than {url}")
    if run_id is not None:
        raise UsageError(
            "A node would remove what another one records.\n  expected: --run-id, or --overwrite\n  got:      both\n"
            "  next:     name another -o, or remove the old capture before the nodes start"
        )
    shared.cleared(output)


def _forced(inputs_from: Path | None, force: str | None) -> dict[str, Any]:
    if inputs_from is not None:
        from trueup.recording.execution.recorded import BaselineInputs

        force = shared.one(force, LEVELS, "--force")
        BaselineInputs(inputs_from, force)  # that it can lend its inputs is found out before anything runs
        return {"inputs_from": str(inputs_from.absolute()), "force": force}
    if force is not None:
        said = "--force needs a baseline.\n  expected: --inputs-from BASE\n  got:      none\n  next:     name one, or leave it out"
        raise UsageError(said)
    return {}


def tell_shadow(directory: Path, code: int, *, decides: bool) -> int:
    """Say on stderr what the shadow found in a capture, and return the command's exit ``code``. If that is 0 and ``decides``,
    return the verdict's: 0 nothing wrong, 1 wrong, 2 could not tell."""
    from trueup.recording.execution.shadow import open_result

    try:
        result = open_result(directory)
    except TrueupError as error:  # nothing was captured, and that was said
        if directory.exists():
            say(f"what the shadow found cannot be read: {error}")
        return code or (2 if decides else 0)
    for line in result.sentence.splitlines():
        say(line)
    say(f"the table of errors: trueup shadow-report {directory}")
    return code or (result.exit_code if decides else 0)


def push(
    path: Annotated[Path, typer.Argument(metavar="CAPTURE", help="The capture, or the spool of one.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where it goes: s3://bucket/name, gs:// or az://.")],
    json: shared.Json = None,
) -> None:
    """Bring a capture to object storage, or go on with a push that was killed: what is there already is not put again."""
    if (target := url_of(url)) is None:
        said = f"URL cannot be read.\n  expected: s3://bucket/name, gs:// or az://\n  got:      {url!r}"
        raise UsageError(f"{said}\n  next:     correct it")
    from trueup.doors.report.progress import shown
    from trueup.foundation.store.layout import read_root
    from trueup.foundation.store.objects import Push

    read_root(path)
    with shown():
        put = Push(path, target).push(complete=True)
    say(f"{path} is at {target}: {put:,} bytes were put")
    if json is not None:
        _document({"schema": "trueup-push", "schema_version": 1, "capture": str(path), "url": target, "bytes": put}, json)


def compact(
    path: Annotated[Path, typer.Argument(metavar="CAPTURE", help="The capture, on a disk of this machine.")],
    json: shared.Json = None,
) -> None:
    """Pack the steps of a capture: one file for many of them, and a fifth of the bytes or less. Everything reads it as before."""
    from dataclasses import asdict

    from trueup.doors.report.progress import shown
    from trueup.foundation.progress import leaving
    from trueup.foundation.store import open_capture
    from trueup.foundation.store.writer import compact as pack

    if (url := url_of(path)) is not None:
        raise UsageError(f"{url} lies on object storage.\n  expected: a folder\n  next:     compact it before `trueup push`")
    with shown(), leaving(f"nothing of {path} is lost: the same command goes on"):
        done = pack(open_capture(path))
    if done.parts:
        said = f"{done.parts:,} parts are {done.files:,} {'file' if done.files == 1 else 'files'} now"
        say(f"{path}: {said}; {done.before / 1e6:,.1f} MB are {done.after / 1e6:,.1f}, {done.after / done.rows:.0f} bytes a row")
    else:
        say(f"{path} is packed already")
    if json is not None:
        _document({"schema": "trueup-compact", "schema_version": 1, "capture": str(path), **asdict(done)}, json)


OUTPUT = "Where hits are saved; else trueup-watch, or the next free of that name."
STOP_AFTER = "Stop the run after the N-th hit, with exit code 3; or never."
BUDGET = "What each rank may write, 500MB or 2GB; later hits are only counted."


def watch(
    command: shared.Following = None,
    output: Annotated[File, typer.Option("--output", "-o", metavar="DIR", help=OUTPUT)] = None,
    stop_after: Annotated[str, typer.Option("--stop-after", metavar="N", help=STOP_AFTER)] = "never",
    frames: Annotated[int, typer.Option(metavar="N", help="Calls saved before the bad one, and after it.")] = FRAMES,
    budget: Annotated[str, typer.Option(metavar="SIZE", help=BUDGET)] = "1GB",
    level: Annotated[Words, typer.Option(metavar="LEVEL", help="module, api (the default) or aten, repeated; or all.")] = None,
    phase: Annotated[Words, typer.Option(metavar="PHASE", help=f"{', '.join(PHASES)}; else all but optimizer.")] = None,
    steps: Steps = None,
    ranks: Ranks = None,
    include: Include = None,
    exclude: Exclude = None,
    compile: Compile = "off",
    json: shared.Json = None,
) -> int:
    """Run a command and watch its training for NaN, Inf and saturation.

    Nothing is written while all is well. The command needs no edit; python, torchrun and scripts that start workers are followed.
    """
    command = shared.required(command, "watch", "watch --stop-after 1")

    from trueup.recording.recorder import launch
    from trueup.recording.recorder.options import WatchOptions, capture_options

    chosen = capture_options(
        shared.levels(level), shared.words(phase) or None, tuple(include or ()) or None, tuple(exclude or ()) or None,
        steps, ranks, compile,
    )  # fmt: skip
    options, found = WatchOptions.of(stop_after, frames, budget), list[dict[str, Any]]()
    code = launch.run_watched(output, chosen, options, command, found.append)
    if json is not None:
        _document(found[0], json)
    return code


FUSION_RESULT = "Ascend's fusion_result.json: its rules become switches."


def triage(
    command: shared.Following = None,
    baseline: Annotated[File, typer.Option(metavar="CAPTURE", help="A capture of the training where it is right.")] = None,
    output: Annotated[File, typer.Option("--output", "-o", metavar="DIR", help="For runs and report; else trueup-triage.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of a run, which then ends.")] = 10,
    timeout: shared.Timeout = 3600.0,
    switch: Annotated[Words, typer.Option(metavar="NAME", help="Only this optimisation, repeated for several.")] = None,
    switches: Annotated[File, typer.Option(metavar="FILE", help="A table of switches of your own (docs/triage.md).")] = None,
    fusion_result: Annotated[File, typer.Option(metavar="FILE", help=FUSION_RESULT)] = None,
    every: Annotated[bool, typer.Option("--all", help="Make all three steps, also after one that explains it.")] = False,
    json: shared.Json = None,
) -> int:
    """Find out whether a training is wrong by a float anomaly, by the compiler or fusion, or by an operator.

    The command is run some ten times, N steps each. Exit code 0: nothing found, 1: explained, 2: could not tell.
    """
    command = shared.required(command, "run", "triage --baseline runs/gpu")

    from trueup.analysis.triage import triage as run
    from trueup.analysis.triage.running import load
    from trueup.doors.report.audit import save_overflow
    from trueup.doors.report.progress import shown
    from trueup.doors.report.terminal import Terminal, print_saved
    from trueup.doors.report.triage import document, render, save, trials_progress
    from trueup.foundation.progress import leaving

    console = Terminal()
    table = load(switches, shared.words(switch), fusion_result)
    tell = trials_progress(console)
    with shown(below=True), leaving(f"its runs are in {output or 'trueup-triage'}: the same command goes on there"):
        found = run(
            command, output, baseline=baseline, steps=steps, timeout=timeout or None, table=table, every=every, tell=tell,
            save_page=save_overflow,
        )  # fmt: skip
    render(found, console)
    print_saved(save(found), console)
    shared.save_as_json(lambda: document(found), json, console)
    return found.exit_code


OVER = "scopes, operators, switches, environment, packages, commits or steps: what is changed."
BASELINE = "In place of a check: good where the losses are these."
CHECK = "Ends with 0 after a good run, 1 after a bad one, 125: cannot be judged. Else the training's own exit code."
GOOD = "Capture or file with good variables or versions; a good commit."
CHANGE = "float32, float64, bfloat16, cpu or deterministic: how they run; repeated. aten: not compiled by Inductor."


def bisect(
    command: shared.Following = None,
    over: Annotated[str, typer.Option(metavar="WHAT", show_default=False, help=OVER)] = "scopes",
    check: Annotated[Word, typer.Option(metavar="COMMAND", help=CHECK)] = None,
    baseline: Annotated[File, typer.Option(metavar="CAPTURE", help=BASELINE)] = None,
    output: Annotated[
        File, typer.Option("--output", "-o", metavar="DIR", help="The search goes on there; else trueup-bisect.")
    ] = None,
    capture: Annotated[File, typer.Option(metavar="CAPTURE", help="Of the training; else its first step is recorded.")] = None,
    good: Annotated[Word, typer.Option(metavar="SIDE", help=GOOD)] = None,
    bad: Annotated[Word, typer.Option(metavar="SIDE", help="Likewise; else this environment, what is installed, HEAD.")] = None,
    change: Annotated[Words, typer.Option("--as", metavar="HOW", help=CHANGE)] = None,
    suspects: Annotated[File, typer.Option(metavar="REPORT", help="What this comparison names is tried first.")] = None,
    most: Annotated[Number, typer.Option(metavar="N", min=1, help="Of --over steps: the longest training.")] = None,
    timeout: shared.Timeout = 3600.0,
    json: shared.Json = None,
) -> int:
    """Find the smallest set of changes with which a training is right again, by running it again and again.

    Exit code 0: found; 1: it is right as it is, or wrong with all changes; 2: could not tell.
    """
    from trueup.analysis.bisection import bisect as run
    from trueup.analysis.bisection.changes import in_steps
    from trueup.doors.report.document import headed
    from trueup.doors.report.executed import attempts_progress, render_bisection
    from trueup.doors.report.progress import shown
    from trueup.doors.report.terminal import Terminal
    from trueup.foundation.progress import leaving
    from trueup.foundation.words.wording import one_line

    console = Terminal()
    tell = attempts_progress(console, in_steps if over == "steps" else one_line)
    with shown(below=True), leaving(f"its runs are in {output or 'trueup-bisect'}: the same command goes on there"):
        found = run(
            over, command or (), output, check=check, baseline=baseline, capture=capture, good=good, bad=bad,
            change=shared.words(change), suspects=suspects, most=most, timeout=timeout or None, tell=tell,
        )  # fmt: skip
    render_bisection(found, console)
    shared.save_as_json(lambda: headed("trueup-bisection", found, "chosen directory runs advice"), json, console)
    return found.exit_code


def heal(
    path: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A capture of the run that overflowed, or differs.")],
    command: Annotated[Words, typer.Argument(metavar="-- COMMAND...", help="The same training.")] = None,
    output: Annotated[
        File, typer.Option("--output", "-o", metavar="DIR", help="For policy.toml and runs; else CAPTURE-healed.")
    ] = None,
    policy: Annotated[File, typer.Option(metavar="FILE", help="Verify this policy; with --baseline by its losses.")] = None,
    baseline: Annotated[File, typer.Option(metavar="CAPTURE", help="Heal what differs from this run: set causes back.")] = None,
    undone: Annotated[File, typer.Option(metavar="RUN", help="With --baseline: a run with the cause set back by hand.")] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Runs at most; each adds a rule for what is wrong then.")] = 6,
    json: shared.Json = None,
) -> int:
    """Find a policy with which a run is right, and verify it by running the training again.

    Of an overflow: wider dtypes for the calls of that step. With --baseline: the settings that a comparison names are set back one
    after the other, and what is left has to be what it called independent. Exit code 0: healed; 1: not healed; 2: could not tell.
    """
    from trueup.analysis.remedy.healing import Healed, verify
    from trueup.analysis.remedy.healing import heal as run
    from trueup.analysis.remedy.undoing import Undone, judge, undo
    from trueup.doors.report.document import headed
    from trueup.doors.report.executed import render_healing
    from trueup.doors.report.progress import shown
    from trueup.doors.report.terminal import Terminal
    from trueup.foundation.progress import leaving

    if undone is not None and (baseline is None or command):
        raise typer.BadParameter("a run that was mended by hand goes with --baseline, and without a command", param_hint="--undone")
    found: Healed | Undone
    with shown(below=True), leaving(f"its runs are in {output or f'{path}-healed'}: the same command goes on there"):
        if baseline is not None and undone is not None:
            found = judge(baseline, path, undone)
        else:
            command = shared.required(command, "run", "heal runs/npu")
            if baseline is not None and policy is not None:
                found = verify(path, baseline, command, policy, output, rounds=rounds)
            elif baseline is not None:
                found = undo(baseline, path, command, output, rounds=rounds)
            else:
                found = run(path, command, output, policy=policy, rounds=rounds)
    console = Terminal()
    render_healing(found, console)
    shared.save_as_json(lambda: headed("trueup-healing", found, "policy runs uses"), json, console)
    return found.exit_code
