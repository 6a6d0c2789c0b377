"""Which adapter executes the calls of a capture again, that of the framework that recorded it; and the processes that do.

>>> executing(framework_of(trueup.open_capture("runs/cpu")))
<module 'trueup.recording.adapters.paddle.executing' ...>

The registry (`adapters.Adapter.executes`) says whose calls can be executed; the adapter's module ``executing`` is an `Executing`.
A process has both its ends here: a crash is a finding, and several cores work. It reads lines of JSON from standard input (the
settings, then a call each) and writes a line for each to its original standard output; prints go to standard error. A journal on
disk lets a killed replay go on.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol, cast

from trueup.foundation.model import TrueupError
from trueup.foundation.progress import advance
from trueup.foundation.store import Capture
from trueup.foundation.store.durable import write_json
from trueup.recording.execution.case_errors import CaseErrors
from trueup.recording.execution.judging import Bitwise, Judging, Outcome, Replay, outcome
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls
from trueup.recording.registry import ADAPTERS, adapter, listed

OUTCOMES, SUMMARY, TABLE = "outcomes.jsonl", "replay.json", "outcomes.parquet"


class Executing(Protocol):
    """What an adapter offers."""

    CASES: CaseErrors  # makes tests of calls

    def provide(self, device: str, *, simulated: bool) -> None:
        """Make sure that the framework knows a device; raises TrueupError if it does not."""

    def limit_threads(self, number: int) -> None:
        """Let each operator use so many threads."""

    def Replayer(self, calls: RecordedCalls, device: str, *, draws: bool, recorded: bool) -> Judging[Any]:
        """Return what executes and judges calls."""

    def Verifier(self, calls: RecordedCalls, device: str) -> Bitwise[Any]:
        """Return what executes calls where they were recorded, and compares bits."""


def framework_of(capture: Capture) -> str:
    """Return a capture's framework, by default PyTorch; raises TrueupError if its calls cannot be executed again."""
    names = [str(manifest["framework"]) for manifest in capture.ranks.values() if manifest.get("framework")]
    name = names[0] if names else "torch"
    known = {adapter.name: adapter.title for adapter in ADAPTERS if adapter.executes}
    if name not in known:
        raise TrueupError(
            f"{capture.path} was recorded in {name[:40]}, whose calls Trueup cannot execute again\n"
            f"  expected: a capture of {listed(list(known.values()))}\n  got:      framework {name[:40]}\n"
            "  next:     trueup compare, show, diff and overflow take it"
        )
    return name


def executing(framework: str) -> Executing:
    """Return the adapter that executes calls of a framework; raises TrueupError if the framework is not installed."""
    known = adapter(framework)
    try:
        importlib.import_module(framework)
    except ImportError:
        raise TrueupError(
            f"This executes calls with {known.title}, which is not installed\n  next:     pip install {known.executes}"
        ) from None
    return cast("Executing", importlib.import_module(f"trueup.recording.adapters.{framework}.executing"))


def only_torch(capture: Capture, what: str) -> None:
    """Refuse, by TrueupError, a capture of another framework than PyTorch."""
    name = framework_of(capture)
    if name != "torch":
        raise TrueupError(
            f"{what} executes calls of PyTorch alone.\n  expected: a capture of PyTorch\n"
            f"  got:      one of {adapter(name).title}\n"
            "  next:     trueup replay and verify-capture execute its calls"
        )


class Journal:
    """The results so far, on disk if wanted; raises TrueupError if the folder holds another replay or cannot be written."""

    def __init__(self, output: Path | None, settings: dict[str, Any]) -> None:
        self.done: dict[tuple[int, int, int], Outcome] = {}
        self._lock = threading.Lock()
        self._folder, self._settings = output, settings | {"base": str(Path(settings["base"]).resolve())}
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
        elif any(path.name != f"{SUMMARY}.tmp" for path in output.iterdir()):
            raise TrueupError(f"{output} is not empty and holds no replay\n  next:     name another folder with -o")
        else:
            write_json(summary, {"settings": self._settings})
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
            advance("executing", "calls", len(self.done))
            if self._file is not None:
                self._file.write(json.dumps(outcome.to_json()) + "\n")
                self._file.flush()

    def finish(self, replayed: Replay) -> None:
        """Write the verdict and the table."""
        if self._folder is None or self._file is None:
            return
        self._file.close()
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [{name: getattr(o, name) for name in o.__dataclass_fields__} for o in replayed.outcomes]
        table = pa.Table.from_pylist(rows) if rows else pa.table({"verdict": pa.array([], pa.string())})
        pq.write_table(table, self._folder / TABLE)
        write_json(self._folder / SUMMARY, {"settings": self._settings} | to_json(replayed))


def to_json(replay: Replay) -> dict[str, Any]:
    """Return the verdict as JSON: what ``replay.json`` holds beside the settings."""
    return {
        "verdict": {0: "accurate", 1: "wrong", 2: "inconclusive"}[replay.exit_code],
        "sentence": replay.sentence,
        "device": replay.device,
        "reference": replay.reference,
        "counts": replay.counts,
        "seconds": round(replay.seconds, 3),
        "culprits": [o.to_json() for o in replay.culprits[:100]],
        "groups": [
            {"operator": g.kind, "level": g.level, "given": g.shapes, "calls": g.calls, "verdicts": g.verdicts}
            | {"worst": g.worst.to_json()}
            for g in replay.groups
        ],
        "notes": list(replay.notes),
    }  # fmt: skip


AHEAD = 8  # calls that a process is given before it has answered: it need not wait to be asked
LATE = "took longer than it may and was ended"  # how a call ended whose process had to be


class Tasks(Protocol):
    """What gives the calls."""

    def next(self) -> RecordedCall | None:
        """Return the next call, or None."""


def execute(
    settings: dict[str, Any], tasks: Tasks, journal: Journal, processes: int, timeout: float, notes: dict[str, None]
) -> None:  # fmt: skip
    """Let processes, each with its own thread, execute the calls of ``tasks`` and put the outcomes into ``journal``. A call may
    take ``timeout`` seconds; the keys of ``notes`` are remarks on the device. Raises TrueupError if the processes cannot."""
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
        while thread.is_alive():  # a Ctrl-C that no lock is woken by is seen between two waits
            thread.join(0.2)
    if failures:
        raise failures[0]


def _serve(settings: dict[str, Any], tasks: Tasks, journal: Journal, timeout: float, notes: dict[str, None]) -> None:
    worker: Worker | None = None
    waiting: deque[RecordedCall] = deque()
    try:
        while True:
            while len(waiting) < AHEAD and (call := tasks.next()) is not None:
                waiting.append(call)
                if worker is not None:
                    worker.send(call)
            if not waiting:
                return
            if worker is None:
                worker = Worker(settings)
                for call in waiting:
                    worker.send(call)
            answer = worker.answer(timeout)
            notes.update(dict.fromkeys(worker.notes))
            if answer is None:  # it died of the first of those that have no answer
                how = f"executing it {worker.end()}"
                journal.add(outcome(waiting.popleft(), verdict="crashed", sentence=how, rule="process"))
                worker = None
            else:
                waiting.popleft()
                journal.add(answer)
    finally:
        if worker is not None:
            worker.end()


class Worker:
    """A process that executes calls, in the order in which they are sent."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._open([sys.executable, "-m", "trueup.analysis.rerun.processes"], settings)

    def _begin(self, command: list[str], settings: dict[str, Any]) -> None:
        self._open(command, settings)
        self._greet()

    def _open(self, command: list[str], settings: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, encoding="utf-8"
        )
        self._late = self._ready = False
        self._how: str | None = None
        self.notes: list[str] = []
        self.greeting: dict[str, Any] = {}
        self._say(settings)

    def send(self, call: RecordedCall) -> None:
        """Have a call executed."""
        self._say([call.key.rank, call.seq])

    def answer(self, timeout: float) -> Outcome | None:
        """Return the next outcome, None if the call killed the process or was late; raises TrueupError if it never started."""
        if not self._ready:
            self._greet()
        answer = self._hear(timeout)
        return None if answer is None else Outcome.from_json(answer)

    def _greet(self) -> None:
        answer = self._hear(600.0)
        if answer is None:
            raise TrueupError(f"The process that executes calls did not start: {self.end()}")
        if "error" in answer:
            raise TrueupError(answer["error"])
        self.notes, self._ready, self.greeting = answer["notes"], True, answer

    def _exchange(self, message: Any, timeout: float) -> Any:
        """Return the answer to a message, or None if the process died of it or took too long."""
        self._say(message)
        return self._hear(timeout)

    def _say(self, message: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it is heard that it died
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def _hear(self, timeout: float) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(timeout, self._expire)
        timer.daemon = True  # else a process that was interrupted waits for it
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        return json.loads(line) if line.endswith("\n") else None

    def _expire(self) -> None:
        self._late = True
        self._process.kill()

    def end(self) -> str:
        """End the process and say how it ended."""
        if self._how is None:
            self._how = self._end()
        return self._how

    def _end(self) -> str:
        with suppress(BrokenPipeError, OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read()[-2000:].decode(errors="replace").strip().splitlines()
        self._errors.close()
        if self._late:
            return LATE
        return how_ended(code) + (f": {last[-1][:200]}" if last and code >= 0 else "")


def how_ended(code: int) -> str:
    """Say how a process ended, by its exit code: minus the number of a signal."""
    return f"ended the process by {signal.Signals(-code).name}" if code < 0 else f"ended the process with code {code}"


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    try:
        replayer, calls = prepare(settings)
        print(json.dumps({"ready": True, "notes": replayer.notes()}), file=answers, flush=True)
    except TrueupError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    for line in sys.stdin:
        rank, seq = json.loads(line)
        call = calls.at(rank, seq)
        found = replayer.verify(call) if settings["verify"] else replayer.replay(call)
        print(json.dumps(found.to_json()), file=answers, flush=True)


def prepare(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return what executes calls, and the calls; raises TrueupError without the framework, the device or a readable capture."""
    from trueup.foundation.store import open_capture
    from trueup.recording.execution.recorded import RecordedCalls

    capture = open_capture(settings["base"])
    adapter = executing(framework_of(capture))
    adapter.provide(settings["device"], simulated=settings["simulated"])
    if settings["threads"]:
        adapter.limit_threads(settings["threads"])
    calls = RecordedCalls(capture)
    if settings["verify"]:
        return adapter.Verifier(calls, settings["device"]), calls
    return adapter.Replayer(calls, settings["device"], draws=settings["draws"], recorded=settings["recorded"]), calls


if __name__ == "__main__":
    main()
    os._exit(0)  # every answer is flushed, and taking a framework apart lasts a second
