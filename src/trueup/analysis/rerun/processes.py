"""Processes that execute calls, so that a crash is a finding and more than one core works."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

from trueup.analysis.rerun.journal import Journal
from trueup.foundation.model import TrueupError
from trueup.recording.execution.outcomes import Outcome
from trueup.recording.execution.recorded import RecordedCall
from trueup.recording.execution.results import outcome

AHEAD = 8
"""Calls that a process is given before it has answered: it need not wait to be asked."""
LATE = "took longer than it may and was ended"
"""How a call ended whose process had to be."""


class Tasks(Protocol):
    """What gives the calls."""

    def next(self) -> RecordedCall | None:
        """Return the next call, or None."""


def execute(
    settings: dict[str, Any], tasks: Tasks, journal: Journal, processes: int, timeout: float, notes: dict[str, None]
) -> None:  # fmt: skip
    """Have calls executed by processes, each by a thread of its own, until there are no more.

    Args:
        settings: what `trueup.analysis.rerun.worker` is to know.
        tasks: gives the calls; asked by several threads.
        journal: gets their outcomes.
        processes: how many.
        timeout: seconds that a call may take.
        notes: gets what a reader must know of the device, as keys.

    Raises:
        TrueupError: the processes cannot execute calls.
    """
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
                journal.add(_crashed(waiting.popleft(), worker.end()))
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
        self._open([sys.executable, "-m", "trueup.analysis.rerun.worker"], settings)

    def _begin(self, command: list[str], settings: dict[str, Any]) -> None:
        """Start a process and wait until it can work."""
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
        """Return the outcome of the first call that has none yet, or None where the process died of it or took too long.

        Raises:
            TrueupError: the process cannot execute calls.
        """
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
        """Return the answer to a message, or None where the process died of it or took too long."""
        self._say(message)
        return self._hear(timeout)

    def _say(self, message: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it is heard that it died
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def _hear(self, timeout: float) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(timeout, self._expire)
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


def _crashed(call: RecordedCall, how: str) -> Outcome:
    return outcome(call, verdict="crashed", sentence=f"executing it {how}", rule="process")
