"""All recorded calls of a capture, executed again: which ones, in how many processes, and how far it got when it was killed.

    OUT/replay.json        what was asked for; with the verdict, once it is there
    OUT/outcomes.jsonl     one line for each call that is done, appended as it comes: what a killed replay goes on from
    OUT/outcomes.parquet   the same as a table
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trueup.analysis.rerun import processes as processing
from trueup.analysis.rerun.journal import Journal
from trueup.foundation.model import PHASES, TrueupError
from trueup.foundation.store import open_capture
from trueup.recording.execution.outcomes import Outcome, Replay
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls
from trueup.recording.recorder.filters import Patterns

LEVELS = ("aten", "api")


@dataclass(frozen=True)
class Settings:
    """What to replay, and where."""

    base: str
    device: str
    levels: tuple[str, ...] = LEVELS
    phases: tuple[str, ...] = tuple(p for p in PHASES if p != "collective")
    patterns: tuple[str, ...] = ()
    """Globs or ``/expressions/`` on operators and scopes, or execution numbers."""
    dedup: bool = False
    draws: bool = True
    simulated: bool = False
    recorded: bool = False
    """Judge the recorded results and not the device's."""
    threads: int = 0
    """Of each process; 0: the framework's default."""
    reference: str = "float64"
    verify: bool = False
    """Execute where it was recorded, and compare bits."""


def replay(
    base: str | Path, device: str, output: str | Path | None = None, *, processes: int = 0, timeout: float = 300.0, **options: Any
) -> Replay:
    """Execute recorded calls again, each with its recorded inputs, and judge each by itself.

    >>> trueup.replay("runs/gpu", "npu", patterns=("*layer_norm*",)).sentence
    'npu computes aten::native_layer_norm forward wrong from the recorded inputs (...).'

    Args:
        base: a capture, best of detail ``tensor``.
        device: where: ``npu``, ``cuda:1``, ``cpu``.
        output: where results are kept; one that holds a part of the same replay is gone on with. None: nothing is kept.
        processes: 0 executes the calls in this one, where a crash is a crash.
        timeout: seconds that a call may take before its process is ended.
        options: fields of `Settings`.

    Raises:
        TrueupError: the capture cannot be read, the device is not there, or ``output`` holds another replay.
    """
    options.setdefault("recorded", device.partition(":")[0] == "cpu")
    settings = Settings(str(base), device, **options)
    return run(settings, None if output is None else Path(output), processes=processes, timeout=timeout)


def run(settings: Settings, output: Path | None = None, *, processes: int = 1, timeout: float = 300.0) -> Replay:
    """Execute the calls of a capture again and judge each; see `replay`.

    Args:
        settings: what.
        output: as there; so are the others.

    Raises:
        TrueupError: as there.
    """
    started = time.perf_counter()
    capture = open_capture(settings.base)
    journal = Journal(output, asdict(settings))
    tasks = _Tasks(settings, RecordedCalls(capture), journal.done)
    notes: dict[str, None] = {}
    if processes:
        processing.execute(asdict(settings), tasks, journal, processes, timeout, notes)
    else:
        _here(settings, tasks, journal, notes)
    if not tasks.found and not journal.done:
        raise TrueupError(_nothing(settings, capture.path))
    outcomes = [replace(o, times=tasks.times.get(o.place, 1)) for o in journal.done.values()]
    for text in [*capture.problems, *_said(outcomes)]:
        notes.setdefault(text)
    found = Replay(
        settings.base, _subject(settings, capture.ranks), settings.reference, sorted(outcomes, key=lambda o: o.place), tuple(notes),
        time.perf_counter() - started,
    )  # fmt: skip
    journal.finish(found)
    return found


def _subject(settings: Settings, ranks: dict[int, dict[str, Any]]) -> str:
    """Name what is judged: the device, or that of the capture."""
    if not settings.recorded:
        return settings.device
    names = [name for rank in ranks.values() for name in rank.get("devices") or ()]
    return f"{next((n for n in names if n != 'cpu'), 'cpu')}, as recorded,"


def _said(outcomes: Sequence[Outcome]) -> list[str]:
    drawn = sum(o.drawn for o in outcomes)
    text = f"{drawn:,} calls were given inputs that were drawn to match recorded numbers: the capture holds no elements"
    return [text] if drawn else []


def _nothing(settings: Settings, path: Path) -> str:
    chosen = f"level {', '.join(settings.levels)}, phase {', '.join(settings.phases)}"
    asked = f", calls {', '.join(settings.patterns)}" if settings.patterns else ""
    expected = f"calls of {chosen}{asked}"
    return f"{path} has no call to replay\n  expected: {expected}\n  got:      none\n  next:     `trueup show {path}` lists them"


class _Tasks:
    """The calls to execute, in the order of execution, handed out to whoever asks next."""

    def __init__(self, settings: Settings, calls: RecordedCalls, done: dict[tuple[int, int, int], Outcome]) -> None:
        self._settings, self._calls, self._done = settings, calls, done
        self._patterns = Patterns(tuple(p for p in settings.patterns if not p.isdigit()))
        self._numbers = {int(p) for p in settings.patterns if p.isdigit()}
        self._lock = threading.Lock()
        self._iterator = self._walk()
        self.found = 0
        self.times: dict[tuple[int, int, int], int] = {}

    def next(self) -> RecordedCall | None:
        """Return the next call, or None."""
        with self._lock:
            return next(self._iterator, None)

    def _walk(self) -> Iterator[RecordedCall]:
        first: dict[tuple[Any, ...], tuple[int, int, int]] = {}
        for rank in sorted(self._calls.capture.ranks):
            for step in self._calls.capture.steps:
                for call in self._calls.of_step(rank, step, self._settings.levels, self._settings.phases):
                    place = (rank, step, call.seq)
                    if not self._chosen(call):
                        continue
                    self.found += 1
                    if self._settings.dedup:
                        same = first.setdefault(call.signature(), place)
                        self.times[same] = self.times.get(same, 0) + 1
                        if same != place:
                            continue
                    if place not in self._done:
                        yield call

    def _chosen(self, call: RecordedCall) -> bool:
        if not call.computed:
            return False
        if not self._settings.patterns:
            return True
        return call.seq in self._numbers or (bool(self._patterns) and self._patterns.match(call.key.scope, call.key.op))


def _here(settings: Settings, tasks: _Tasks, journal: Journal, notes: dict[str, None]) -> None:
    from trueup.analysis.rerun.worker import prepare

    replayer, _ = prepare(asdict(settings))
    notes.update(dict.fromkeys(replayer.notes()))
    with replayer.undisturbed():
        while (call := tasks.next()) is not None:
            journal.add(replayer.verify(call) if settings.verify else replayer.replay(call))
