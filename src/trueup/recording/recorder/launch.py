"""`trueup capture -- COMMAND` and `trueup watch -- COMMAND`: run a command whose Python processes capture, or watch, themselves.

At the end a capture says what was captured, by whom, and which options selected nothing; a watch says what it found.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.foundation.model import TrueupError
from trueup.foundation.progress import following
from trueup.foundation.store.declared import policy_lines
from trueup.foundation.store.layout import MANIFEST, MONITOR, PROCESSES, holds_records, read_root
from trueup.foundation.version import VERSION
from trueup.foundation.words.wording import say
from trueup.recording.arming import SITE, VARIABLE
from trueup.recording.recorder.options import STOPPED, CaptureOptions, WatchOptions, in_ranges, ranges_text, sentence
from trueup.recording.registry import ADAPTERS, listed

if TYPE_CHECKING:
    from trueup.foundation.store import Capture


PARTS = (PROCESSES, "stop")
"""What may be in a directory before its manifest."""
WATCHED = "trueup-watch"
"""Directory of a watch for which none is named."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of what somebody stopped: they say nothing of the run."""
TIMED_OUT = 124
"""What `execute` returns for a command that did not end in time, as timeout(1) does."""
ASIDE = 2
"""Where a command prints while our standard output is for a document alone (``--json -``): its standard error."""
GRACE = 10.0
"""Seconds between asking a command that is too late to end, and ending it."""


def run(options: Mapping[str, Any], command: Sequence[str], see: Callable[[dict[str, Any]], None] | None = None) -> int:
    """Run a command under capture; ``see`` is given what was captured as a document.

    Args:
        options: ``directory``, ``policy`` (path of a policy to run with, or None), ``run_id`` (the same on all nodes of a run that
            write into one directory, or None), ``doing`` (what the progress says), and the keywords of `CaptureOptions.of`.
        command: the program and its arguments.

    Returns:
        The command's own exit code if it failed (128 + n if signal n ended it), 2 if nothing was captured or the capture
        failed and the run was to stop then (``on_error``), else 0.

    Raises:
        TrueupError: an option is wrong, the command cannot start, or the directory is not empty or cannot be written.
    """
    chosen = dict(options)
    directory = Path(chosen.pop("directory")).absolute()
    policy = _policy(chosen.pop("policy", None), chosen)
    run_id, doing = chosen.pop("run_id", None), chosen.pop("doing", "capturing")
    parsed = CaptureOptions.of(**{k: v for k, v in chosen.items() if v is not None})
    order: dict[str, Any] = {} if policy is None else {"policy": list(policy)}
    code = execute(directory, parsed, command, run_id=run_id, doing=doing, **order)
    return tell(directory, parsed, code, several=run_id is not None, see=see)


def run_watched(
    output: Path | None, options: CaptureOptions, watch: WatchOptions, command: Sequence[str],
    see: Callable[[dict[str, Any]], None] = lambda _: None,
) -> int:  # fmt: skip
    """Run a command under watch; ``see`` is given what was found as a document.

    Returns:
        3 if the run was stopped after as many hits as were asked for, the command's own exit code if it failed, 2 if nothing was
        watched, else 0.

    Raises:
        TrueupError: the command cannot start, or the directory is not empty or cannot be written.
    """
    directory = (_free() if output is None else output).absolute()
    code = execute(directory, options, command, watch=watch.to_json())
    reports = reports_of(directory)  # before they are cleared away
    code = tell_watched(directory, options, code)
    watched = [report["watch"] for report in reports if report.get("watch")]
    see({
        "schema": "trueup-watch", "schema_version": 1, "exit_code": code, "directory": str(directory),
        "steps": max((one["steps"] for one in watched), default=0), "hits": sum(one["hits"] for one in watched),
        "first": [hit for one in watched for hit in one["first"]],
    })  # fmt: skip
    return code


def run_monitored(
    output: Path, monitor: str, command: Sequence[str], see: Callable[[dict[str, Any]], None] = lambda _: None
) -> int:  # fmt: skip
    """Run a command under a monitor, whose options are encoded; a directory of an earlier one is gone on with. ``see`` is given
    what was found as a document.

    Returns:
        3 if an alert stopped the run, the command's own exit code if it failed, 2 if nothing was monitored, else 0.

    Raises:
        TrueupError: the command cannot start, or the directory holds something else or cannot be written.
    """
    directory = output.absolute()
    goes_on = (directory / "manifest.json").is_file() and MONITOR in read_root(directory)
    if goes_on:
        shutil.rmtree(directory / "processes", ignore_errors=True)  # what those of the run before said
        (directory / "stop").unlink(missing_ok=True)
    code = execute(directory, CaptureOptions(), command, goes_on=goes_on, monitor=monitor)
    reports = reports_of(directory)
    code = tell_monitored(directory, code, reports, goes_on=goes_on)
    held = [report["monitor"] for report in reports if report.get("monitor")]
    see({
        "schema": "trueup-monitor", "schema_version": 1, "exit_code": code, "directory": str(directory), "ranks": len(held),
        "steps": max((one["steps"] for one in held), default=0), "series": max((one["series"] for one in held), default=0),
        "alerts": sum(one["alerts"] for one in held), "first": [alert for one in held for alert in one["first"]],
    })  # fmt: skip
    return code


_asked: list[int] = []
"""Signals that asked the last command to stop: one that was about to end has another exit code."""


def uninterrupted(code: int) -> int:
    """Return the exit code of the last command; raises KeyboardInterrupt where somebody stopped it, so that it is not run again."""
    if code in INTERRUPTED or _asked:
        raise KeyboardInterrupt
    return code


def _free() -> Path:
    names = (Path(f"{WATCHED}{'' if k == 1 else f'-{k}'}") for k in range(1, 10_000))
    return next(name for name in names if not name.exists())


def execute(
    directory: Path, options: CaptureOptions, command: Sequence[str], *, environment: Mapping[str, str | None] | None = None,
    output: Path | None = None, timeout: float | None = None, folder: Path | None = None, goes_on: bool = False,
    run_id: str | None = None, doing: str = "capturing", **order: Any,
) -> int:  # fmt: skip
    """Run a command whose processes arm themselves; return its exit code, as a shell would, or `TIMED_OUT`.

    Args:
        directory: where they write.
        options: what they see.
        command: the program and its arguments.
        environment: variables that are set for it besides, or with None taken away.
        folder: that it runs in; else our own.
        run_id: the same on all nodes of a run that write into one directory.
        doing: what the progress says.
        output: file that what it prints goes to; else where our own goes.
        timeout: seconds after which it is ended, with all that it started.
        goes_on: the directory may hold what was written before.
        order: further orders for them (see `trueup.recording.arming.process`).

    Raises:
        TrueupError: the command cannot start, or the directory is not empty or cannot be written.
    """
    path = program(command[0])
    made = [] if goes_on else _prepare(directory, run_id)
    try:
        given = {name: value for name, value in {**os.environ, **(environment or {})}.items() if value is not None}
        told = _environment(given, directory, options, list(command), order, run_id)
        with following(doing, options.planned, counts=order.get("watch") is None) as variables:
            return run_to_the_end([path, *command[1:]], told | variables, output, timeout, folder)
    except OSError as error:
        _undo(made)
        raise TrueupError(_not_started(command[0], f"{path}: {error.strerror or error}")) from None


def _policy(path: str | None, options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return path and text of the policy to run with."""
    if path is None:
        return None
    from trueup.recording.policy_file import load

    read = load(path)
    if options.get("compile") == "through":
        raise TrueupError(
            "A policy and --compile=through exclude each other; nothing was run.\n"
            f"  where:    --policy {path}\n  expected: --compile=off, which runs the Python code of what was compiled\n"
            "  got:      through\n"
            "  next:     leave out --compile=through: no rule reaches into compiled code"
        )
    return read.path, read.text


def program(name: str) -> str:
    """Return the path of a program; raises TrueupError with what is there instead."""
    found = shutil.which(name)
    if found is None:
        path = Path(name)
        if path.is_dir():
            got = "a directory"
        elif path.is_file():
            got = "a file that is not executable" if os.sep in name else f"a file that is not on PATH; write ./{name}"
        else:
            got = "no such file" if os.sep in name else "no program of that name on PATH"
        raise TrueupError(_not_started(name, got))
    return found


def _not_started(name: str, got: str) -> str:
    return (
        f"The command cannot start; nothing was captured.\n"
        f"  where:    {name}\n"
        f"  expected: a program on PATH, or the path of an executable\n"
        f"  got:      {got}\n"
        f"  next:     correct what follows -- (for example: trueup capture -o runs/cpu -- python train.py)"
    )


def _prepare(directory: Path, run_id: str | None = None) -> list[Path]:
    """Make the directory and prove that it can be written; return the folders that were made, innermost first. It is to be empty,
    but for what other nodes of the same run have written by now."""
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()) and not (run_id is not None and _of_run(directory, run_id)):
            whose = "" if run_id is None else ", and of another run"
            raise TrueupError(_not_writable(directory, f"{directory} is not empty{whose}"))
        probe = directory / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        _undo(made)
        raise TrueupError(_not_writable(directory, _obstacle(directory, error))) from None
    return made


def _of_run(directory: Path, run_id: str) -> bool:
    """Tell whether what is in a directory was written by other nodes of a run: its manifest says so, or there is none yet."""
    if not (directory / MANIFEST).exists():
        return all(one.name.startswith((".", "rank-")) or one.name in PARTS for one in directory.iterdir())
    try:
        return bool(read_root(directory).get("run") == run_id)
    except (OSError, TrueupError):
        return False


def _undo(made: Sequence[Path]) -> None:
    for folder in made:
        try:
            folder.rmdir()
        except OSError:  # it was never made
            continue


def _obstacle(directory: Path, error: OSError) -> str:
    place = next((place for place in (directory, *directory.parents) if place.exists()), directory)
    return f"{place} is a directory: {error.strerror}" if place.is_dir() else f"{place} is not a directory"


def _not_writable(directory: Path, got: str) -> str:
    return (
        f"The capture cannot be written; nothing was run.\n"
        f"  where:    {directory}\n"
        f"  expected: a new or an empty directory that can be written\n"
        f"  got:      {got}\n"
        f"  next:     name another directory with -o, or remove this one"
    )


def _environment(
    given: Mapping[str, str], directory: Path, options: CaptureOptions, command: list[str], more: Mapping[str, Any],
    run_id: str | None,
) -> dict[str, str]:  # fmt: skip
    root: dict[str, Any] = {
        "trueup_version": VERSION, "command": command, "levels": list(options.levels), "detail": options.detail,
        "config": json.loads(options.to_json()), "run": run_id or uuid.uuid4().hex,
    }  # fmt: skip
    order = {"directory": str(directory), "options": options.to_json(), "root": root, **more}
    if "policy" in more:
        root["policy"] = dict(zip(("path", "text"), more["policy"], strict=True))
    return {**given, VARIABLE: json.dumps(order), "PYTHONPATH": search_path(given)}


def search_path(given: Mapping[str, str]) -> str:
    """Return the PYTHONPATH with which a Python runs our ``sitecustomize`` first."""
    package = str(Path(__file__).resolve().parents[3])
    # An installed Trueup is found by its own Python; its neighbours must not get before those of another one.
    installed = Path(package).name in ("site-packages", "dist-packages")
    return os.pathsep.join([SITE, *([] if installed else [package]), *filter(None, [given.get("PYTHONPATH")])])


def run_to_the_end(
    command: Sequence[str], environment: Mapping[str, str], output: Path | None, timeout: float | None, folder: Path | None = None
) -> int:
    """Run a command, passing on the signals that ask us to stop; return the exit code as a shell would, or `TIMED_OUT`. With a
    time limit it is the first of a process group of its own, ended as a whole. Raises OSError where it did not start."""
    started: list[subprocess.Popen[bytes]] = []
    _asked.clear()

    def pass_on(number: int, _: Any) -> None:
        _asked.append(number)
        own_group = timeout is not None
        if started and (own_group or not (number == signal.SIGINT and _asked.count(number) == 1 and _has_terminal())):
            started[0].send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        with nullcontext(ASIDE if sys.stdout is sys.stderr else None) if output is None else output.open("wb") as to:
            errors = None if output is None else subprocess.STDOUT
            own = timeout is not None
            started.append(
                subprocess.Popen(command, env=environment, stdout=to, stderr=errors, start_new_session=own, cwd=folder)
            )
        for number in _asked:  # before there was anything to pass it on to
            started[0].send_signal(number)
        code = _waited(started[0], timeout)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _waited(process: subprocess.Popen[bytes], timeout: float | None) -> int:
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(GRACE)
        return TIMED_OUT


def _has_terminal() -> bool:
    """Tell whether Ctrl-C in our terminal reaches the command by itself: a second one would cut its clean-up short."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


# ---------------------------------------------------------------- what is said at the end
Report = dict[str, Any]

NAMES, TITLES = listed([adapter.name for adapter in ADAPTERS]), listed([adapter.title for adapter in ADAPTERS])
NO_FRAMEWORK = (
    f"no process of the command imported {TITLES}\n"
    f"  expected: a Python process that imports {NAMES}, started with the environment of the command\n"
    "  got:      none\n"
    "  next:     name the training command; python -I, -E or -S, or a PYTHONPATH set anew, hides a process from Trueup"
)


def tell(
    directory: Path, options: CaptureOptions, code: int, *, several: bool = False,
    see: Callable[[dict[str, Any]], None] | None = None,
) -> int:  # fmt: skip
    """Say on stderr what was captured; return ``code`` if the command failed, else 2 if nothing was captured or the capture
    failed and the run was to stop then, else 0. Of ``several`` nodes others may still write: nothing is cleared away. ``see`` is
    given the same as a document."""
    notes: list[str] = []
    ended, capture = _told(directory, options, code, several, notes)
    if see is not None:
        held = {"ranks": 0, "steps": 0, "rows": 0, "bytes": 0}
        if capture is not None:
            files = [one.lstat().st_size for one in directory.rglob("*") if one.is_file() and not one.is_symlink()]
            held = {"ranks": len(capture.ranks), "steps": len(capture.steps), "rows": capture.rows, "bytes": sum(files)}
        see({
            "schema": "trueup-capture", "schema_version": 1, "exit_code": ended, "command_exit_code": code,
            "directory": str(directory), "captured": capture is not None, **held, "notes": notes,
        })  # fmt: skip
    return ended


def _told(
    directory: Path, options: CaptureOptions, code: int, several: bool, notes: list[str]
) -> tuple[int, Capture | None]:
    """Say what was captured, and add to the ``notes``; return the exit code and the capture, if something was captured."""
    reports = reports_of(directory)
    capture = _capture(directory)
    ended = f"; the command ended with exit code {code}" if code else ""
    if capture is None and holds_records(directory):
        notes.append(f"what was captured into {directory} cannot be opened{ended}; nothing of it was removed")
        say(f"{notes[0]}\n  next:     trueup show {directory} says why")
        return code or 2, None
    if capture is None or not capture.rows or _only_losses(capture, reports):
        why = _why_nothing(directory, options, reports) or (NO_FRAMEWORK.splitlines()[0] if code else NO_FRAMEWORK)
        notes.append(f"nothing was captured into {directory}{ended}: {why}")
        say(notes[0])
        if not several:
            _clear(directory)
        return _exit_code(options, reports, capture, code) or 2, None
    ranks = f", {len(capture.ranks)} ranks" if len(capture.ranks) > 1 else ""
    steps = f"{len(capture.steps)} step{'s' if len(capture.steps) != 1 else ''}"
    say(f"captured {capture.rows:,} slots over {steps}{ranks} into {directory}{ended}")
    for text in policy_lines(capture.ranks.values()):
        say(f"policy: {text}")
    if several and any(manifest.get("status") == "recording" for manifest in capture.ranks.values()):
        notes.append("other nodes are still recording; trueup show says later whether all ranks are complete")
        say(f"note: {notes[0]}")
        return _exit_code(options, reports, capture, code), capture
    notes += [*_unused(options, reports), *_remarks(reports), *capture.problems]
    for text in notes:
        say(f"note: {text}")
    if code in INTERRUPTED:
        say(f"interrupted: {directory} holds what was recorded, for trueup show and compare; --overwrite records it anew")
    return _exit_code(options, reports, capture, code), capture


def _exit_code(options: CaptureOptions, reports: Sequence[Report], capture: Capture | None, code: int) -> int:
    """Return the command's own exit code, or 2 where it was to stop with its capture and that failed."""
    if options.on_error == "continue":
        return code
    told = any(report.get("failure") for report in reports)
    # A process that could not leave its last report (the disk is full) has left a manifest that was never finished.
    untold = not code and capture is not None and any(m.get("status") != "complete" for m in capture.ranks.values())
    return 2 if told or untold else code


def _capture(directory: Path) -> Capture | None:
    if not directory.is_dir() or not any(directory.iterdir()):
        return None
    from trueup.foundation.store import open_capture

    try:
        return open_capture(directory)
    except TrueupError:
        return None


def reports_of(directory: Path) -> list[Report]:
    """Return the reports that the processes of a run left in its directory."""
    reports = []
    for path in sorted((directory / "processes").glob("*.json")):
        with suppress(OSError, ValueError):
            reports.append(json.loads(path.read_text()))
    return reports


def _clear(directory: Path) -> None:
    """Leave nothing in the way of the next attempt: what was empty before, and holds nothing now, is removed."""
    for name in ("processes", "rank-*", "unranked-*"):
        for folder in directory.glob(name):
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        (directory / "manifest.json").unlink(missing_ok=True)
        directory.rmdir()


def _only_losses(capture: Capture, reports: Sequence[Report]) -> bool:
    """Tell whether no option selected a call: the loss curve alone, which is always kept, is no capture."""
    told = [r for r in reports if r.get("calls") and not r.get("displaced")]
    return len(told) == len(capture.ranks) and not any(r.get("selected", True) for r in told)


def _why_nothing(directory: Path, options: CaptureOptions, reports: Sequence[Report]) -> str:
    if not directory.is_dir():
        return "the directory was removed, or replaced, while the command ran"
    said = [*_unused(options, reports), *(f"{_name(r)} failed: {r['failure']}" for r in reports if r.get("failure"))]
    said += [f"{_name(r)} was killed before its first flush, or could not write its report" for r in reports if _killed(r)]
    if not said:
        said = [f"{_name(r)}: {r['why']}" for r in reports if r.get("why")][:8]
    if not said and reports:
        said = [f"{_name(r)} is a launcher, and nothing that it started imported {TITLES}" for r in reports[:1]]
    return "; ".join(said)


def _unused(options: CaptureOptions, reports: Sequence[Report]) -> list[str]:
    """Return the options that selected nothing in any process that trained."""
    trained = [r for r in reports if r.get("role") in ("run", "child") and "unused" in r]
    said = []
    ranks = sorted({r["process_rank"] for r in trained if r.get("process_rank") is not None})
    if options.ranks is not None and ranks:
        missing = [r for r in options.ranks if not any(in_ranges(rank, (r,)) for rank in ranks)]
        if missing:
            were = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            said.append(f"ranks {ranges_text(tuple(missing))} selected nothing: {were} ran")
        trained = [r for r in trained if in_ranges(r["process_rank"] or 0, options.ranks)]
    first = trained[0]["unused"] if trained else {}
    return said + [sentence(option, first[option]) for option in first if all(option in r["unused"] for r in trained)]


def _remarks(reports: Iterable[Report]) -> list[str]:
    """Return a sentence for each process that needs one; processes that had nothing to record are counted."""
    said, quiet = [], Counter[str]()
    for report in reports:
        if _killed(report):
            continue  # its rank, if it has one, reads as interrupted
        if report.get("failure"):
            said.append(f"{_name(report)} failed to capture: {report['failure']}")
        elif report.get("displaced"):
            said.append(f"what {_name(report)} recorded before its ranks started is not part of the capture")
        elif not report.get("calls"):
            quiet[_kind(report)] += 1
    if quiet:
        counted = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in quiet.items())
        said.append(f"nothing to record in {counted}")
    return said


def _killed(report: Report) -> bool:
    """Tell whether a process left no last report."""
    return report.get("state") == "running" and report.get("role") == "run"


def _kind(report: Report) -> str:
    kind = str(report.get("role", "run"))
    return {"run": "other process", "child": "worker without process group"}.get(kind, kind)


def _name(report: Report) -> str:
    return f"process {report.get('pid')} ({' '.join(map(str, report.get('argv', [])[:3]))})"


# ---------------------------------------------------------------- of a watch
NAMED = 8
"""Hits that are named at the end."""


def tell_watched(directory: Path, options: CaptureOptions, code: int) -> int:
    """Say on stderr what was found; return the exit code."""
    reports = reports_of(directory)
    watched = [report for report in reports if report.get("watch") and report.get("calls")]
    stopped = (directory / "stop").exists()
    ended = f"; the command ended with exit code {code}" if code and not stopped else ""
    if not watched and not any(directory.glob("step-*")):
        why = _why_nothing(directory, options, reports) or NO_FRAMEWORK
        say(f"nothing was watched{ended}: {why}")
        _clear(directory)
        return code or 2
    for report in reports:
        if report.get("failure"):
            say(f"note: {_name(report)} stopped to watch: {report['failure']}")
    say(f"{_found(watched)}{ended}")
    for line in _hits(watched):
        say(f"  {line}")
    for scale in dict.fromkeys(report["watch"]["loss_scale"]["said"] for report in watched):
        if scale:
            say(scale)
    if stopped:
        return STOPPED
    if not any(report["watch"]["hits"] for report in watched) and not any(directory.glob("step-*")):
        _clear(directory)  # nothing was bad
    return code


def _found(watched: Sequence[dict[str, Any]]) -> str:
    steps = max((report["watch"]["steps"] for report in watched), default=0)
    hits = sum(report["watch"]["hits"] for report in watched)
    skipped = max((report["watch"]["transients"] for report in watched), default=0)
    ranks = f" on {len(watched)} ranks" if len(watched) > 1 else ""
    some = f"watched {steps:,} step{'s' if steps != 1 else ''}{ranks}: "
    some += f"{hits:,} hit{'s' if hits != 1 else ''}" if hits else "nothing bad"
    return some + (f"; {skipped:,} steps overflowed and were skipped by the loss scaling, as it is meant to" if skipped else "")


def _hits(watched: Sequence[dict[str, Any]]) -> list[str]:
    hits = sorted((hit for report in watched for hit in report["watch"]["first"]), key=lambda hit: (hit["step"], hit["rank"]))
    lines = [f"{hit['said']} ({hit['path'] or hit['tensors']})" for hit in hits]
    more = sum(report["watch"]["hits"] for report in watched) - NAMED
    return lines[:NAMED] + ([f"and {more:,} more"] if more > 0 else [])


# ---------------------------------------------------------------- of a monitor
KILLED = 128  # exit codes above it: by a signal


def tell_monitored(directory: Path, code: int, reports: Sequence[Report], *, goes_on: bool) -> int:
    """Say on stderr what was monitored; return the exit code."""
    held = [report for report in reports if report.get("monitor") and report["monitor"]["steps"]]
    stopped = (directory / "stop").exists()
    ended = f"; the command ended with exit code {code}" if code and not stopped else ""
    if not held:
        said = [*(f"{_name(one)} failed: {one['failure']}" for one in reports if one.get("failure"))]
        said = said or [f"{_name(one)}: {one['why']}" for one in reports if one.get("why")]
        if code > KILLED and not said:
            from trueup.foundation.store.series import last_step  # loads Arrow

            last = max((held_to for one in directory.glob("rank-*") if (held_to := last_step(one)) is not None), default=None)
            where = f"its series in {directory} end with step {last:,}" if last is not None else "it had written no series yet"
            say(f"the command was killed (exit code {code}); {where}")
            return code
        say(f"nothing was monitored{ended}: {'; '.join(said) or NO_FRAMEWORK}")
        if not goes_on:
            _clear(directory)
        return code or 2
    for report in held:
        if report["monitor"]["failure"]:
            say(f"note: {_name(report)}: {report['monitor']['failure']}")
    steps, series = (max(report["monitor"][name] for report in held) for name in ("steps", "series"))
    ranks = f" on {len(held)} ranks" if len(held) > 1 else ""
    alerts = sum(report["monitor"]["alerts"] for report in held)
    found = f"{alerts:,} alert{'s' if alerts != 1 else ''}" if alerts else "no alert"
    say(f"monitored {series:,} series over {steps:,} step{'s' if steps != 1 else ''}{ranks} into {directory}: {found}{ended}")
    return STOPPED if stopped else code
