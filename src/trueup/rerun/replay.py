"""All recorded calls of a capture, executed again: which ones, in how many processes, and how far it got when it was killed.

    OUT/replay.json        what was asked for; with the verdict, once it is there
    OUT/outcomes.jsonl     one line for each call that is done, appended as it comes: what a killed replay goes on from
    OUT/outcomes.parquet   the same as a table
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from trueup.model import PHASES, TrueupError
from trueup.recorder.filters import Patterns
from trueup.rerun.outcomes import Outcome, Replay
from trueup.rerun.recorded import RecordedCall, RecordedCalls
from trueup.store import open_capture

OUTCOMES, SUMMARY, TABLE = "outcomes.jsonl", "replay.json", "outcomes.parquet"
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
    """Of each process; 0: PyTorch's default."""
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
    journal = Journal(output, settings)
    tasks = _Tasks(settings, RecordedCalls(capture), journal.done)
    notes: dict[str, None] = {}
    if processes:
        _in_processes(settings, tasks, journal, processes, timeout, notes)
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


class Journal:
    """The results so far, on disk if wanted.

    Raises:
        TrueupError: the folder holds another replay, or cannot be written.
    """

    def __init__(self, output: Path | None, settings: Settings) -> None:
        self.done: dict[tuple[int, int, int], Outcome] = {}
        self._lock = threading.Lock()
        self._folder, self._settings = output, asdict(settings) | {"base": str(Path(settings.base).resolve())}
        self._file: IO[str] | None = None
        if output is not None:
            try:
                self._open(output)
            except OSError as error:
                said = f"{output} cannot be written: {error.strerror}\n  next:     name another folder with -o"
                raise TrueupError(said) from None

    def _open(self, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        summary, lines = output / SUMMARY, output / OUTCOMES
        if summary.exists():
            if not self._is_same(summary):
                expected = "the same capture and options"
                raise TrueupError(f"{output} holds another replay\n  expected: {expected}\n  next:     name another folder with -o")
            self._read(lines)
        elif any(output.iterdir()):
            raise TrueupError(f"{output} is not empty and holds no replay\n  next:     name another folder with -o")
        else:
            summary.write_text(json.dumps({"settings": self._settings}, indent=1))
        self._file = lines.open("a", encoding="utf-8")

    def _is_same(self, summary: Path) -> bool:
        try:
            held = json.loads(summary.read_text())["settings"]
        except (ValueError, KeyError, TypeError):
            return False
        return bool(held == json.loads(json.dumps(self._settings)))

    def _read(self, lines: Path) -> None:
        if not lines.exists():
            return
        kept = 0
        with lines.open("rb") as file:
            for line in file:
                try:
                    found = Outcome.from_json(json.loads(line))
                except (ValueError, TypeError, KeyError):
                    break  # cut off when it was killed
                self.done[found.place] = found
                kept += len(line)
        os.truncate(lines, kept)

    def add(self, outcome: Outcome) -> None:
        """Keep one result."""
        with self._lock:
            self.done[outcome.place] = outcome
            if self._file is not None:
                self._file.write(json.dumps(outcome.to_json()) + "\n")
                self._file.flush()

    def finish(self, replayed: Replay) -> None:
        """Write the verdict and the table."""
        if self._folder is None or self._file is None:
            return
        self._file.close()
        import pyarrow.parquet as pq

        from trueup.report.replayed import to_json, to_table

        pq.write_table(to_table(replayed), self._folder / TABLE)
        text = json.dumps({"settings": self._settings} | to_json(replayed), indent=1)
        temporary = self._folder / f"{SUMMARY}.tmp"
        temporary.write_text(text)
        temporary.replace(self._folder / SUMMARY)


def _here(settings: Settings, tasks: _Tasks, journal: Journal, notes: dict[str, None]) -> None:
    from trueup.rerun.worker import prepare

    replayer, _ = prepare(asdict(settings))
    notes.update(dict.fromkeys(replayer.notes()))
    with replayer.undisturbed():
        while (call := tasks.next()) is not None:
            journal.add(replayer.verify(call) if settings.verify else replayer.replay(call))


# ---------------------------------------------------------------- processes
def _in_processes(
    settings: Settings, tasks: _Tasks, journal: Journal, processes: int, timeout: float, notes: dict[str, None]
) -> None:  # fmt: skip
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            _serve(settings, tasks, journal, timeout, notes)
        except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _serve(settings: Settings, tasks: _Tasks, journal: Journal, timeout: float, notes: dict[str, None]) -> None:
    worker: _Worker | None = None
    try:
        while (call := tasks.next()) is not None:
            if worker is None:
                worker = _Worker(settings)
                notes.update(dict.fromkeys(worker.notes))
            answer = worker.ask(call, timeout)
            if answer is None:
                journal.add(_crashed(call, worker.end()))
                worker = None
            else:
                journal.add(answer)
    finally:
        if worker is not None:
            worker.end()


class _Worker:
    """A process that executes calls."""

    def __init__(self, settings: Settings) -> None:
        self._begin([sys.executable, "-m", "trueup.rerun.worker"], asdict(settings))

    def _begin(self, command: list[str], settings: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, encoding="utf-8"
        )
        self._late = False
        answer = self._exchange(settings, 600.0)
        if answer is None or "error" in answer:
            said = self.end() if answer is None else answer["error"]
            raise TrueupError(said if answer is not None else f"The process that executes calls did not start: {said}")
        self.notes: list[str] = answer["notes"]

    def ask(self, call: RecordedCall, timeout: float) -> Outcome | None:
        """Return the outcome of a call, or None where the process died of it or took too long."""
        answer = self._exchange([call.key.rank, call.seq], timeout)
        return None if answer is None else Outcome.from_json(answer)

    def _exchange(self, message: Any, timeout: float) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(timeout, self._expire)
        timer.start()
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        finally:
            timer.cancel()
        return json.loads(line) if line.endswith("\n") else None

    def _expire(self) -> None:
        self._late = True
        self._process.kill()

    def end(self) -> str:
        """End the process and say how it ended."""
        with suppress(BrokenPipeError, OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        self._errors.close()
        if self._late:
            return "took longer than it may and was ended"
        if code < 0:
            return f"ended the process by {signal.Signals(-code).name}"
        return f"ended the process with code {code}{': ' + last[-1][:200] if last else ''}"


def _crashed(call: RecordedCall, how: str) -> Outcome:
    from trueup.rerun.results import outcome

    return outcome(call, verdict="crashed", sentence=f"executing it {how}", rule="process")
