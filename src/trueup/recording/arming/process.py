"""The life of an armed process: its capture begins with the framework and ends with the process, however that ends.

Standard library only, so that a launcher or a data worker loads nothing more than it would without Trueup.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from trueup.recording.arming.roles import data_worker, role

EXIT_SECONDS = 10.0
"""How long `os._exit` waits for the capture to reach the disk; it may be called where a lock is held."""

Report = dict[str, Any]


_process: _Process | None = None


def begin(order: str, framework: str) -> None:
    """Arm this process, which has just imported a framework.

    It is captured from now on, or once it joins a process group, or not at all if it is a launcher. Where it imports two
    frameworks, each is captured if something runs in it.
    """
    global _process
    if _process is not None:
        _process.arm(framework)
        return
    _process = process = _Process(json.loads(order))
    if process.stops:
        _stop_in_words()
    process.arm(framework)
    atexit.register(process.end)
    if process.role != "launcher":
        _before_hard_exit(process)


class _Process:
    def __init__(self, order: dict[str, Any]) -> None:
        self.role = role()
        self._order = order
        self.stops = json.loads(order["options"]).get("on_error") == "stop"
        self._armed: dict[str, Any] = {}
        """By framework."""
        self._failure: str | None = None
        self._switching: dict[str, Any] = {}
        """By framework: what was switched off in it (`trueup.recording.recorder.switching`), where the order says so."""
        self._ended: int | None = None

    def arm(self, framework: str) -> None:
        """Begin; whatever is wrong with the observer, the training goes on, unless it is to stop then."""
        if self.role == "launcher":
            return
        self._leave_report({"state": "running"})
        order = self._order
        try:
            if order.get("switches"):
                switching = import_module("trueup.recording.recorder.switching")
                self._switching[framework] = switching.Switching(framework, order["switches"])
            armed = import_module(f"trueup.recording.adapters.{framework}.armed")
            policy, watch = order.get("policy"), order.get("watch")
            options = order.get("options_of", {}).get(framework, order["options"])
            begun = armed.Armed(Path(order["directory"]), options, order["root"], policy, watch)
            self._armed[framework] = begun
            begun.begin(at_once=self.role == "run")
        except Exception as error:  # noqa: BLE001
            self._failure = f"{type(error).__name__}: {error}"
            print(f"trueup: process {os.getpid()} is not captured: {self._failure}", file=sys.stderr, flush=True)
            if self.stops or self._order.get("policy") is not None:  # a run without its policy would be taken for one with it
                self.end()
                raise SystemExit(2) from None

    def end(self, *, quietly: bool = False) -> None:
        """Write what is left and leave a report: what this process recorded, or why nothing.

        Args:
            quietly: leave none if nothing was recorded (a child that multiprocessing forked may be any worker).
        """
        if self._ended == os.getpid():
            return
        self._ended = os.getpid()
        error = getattr(sys, "last_value", None)
        for armed in self._armed.values():
            armed.finish(None if error is None else _last_words(error))
        # Of two frameworks that with the training.
        reports = ({"framework": name, **armed.report()} for name, armed in self._armed.items())
        told: Report = max(reports, key=_calls, default={})
        report: Report = {"state": "ended", "calls": 0, **told}
        if report["calls"] or not quietly:
            self._leave_report(report)

    def _leave_report(self, report: Report) -> None:
        """Write ``processes/<pid>.json``."""
        role_now = "data worker" if self.role == "child" and data_worker() else self.role
        said = {"pid": os.getpid(), "argv": sys.argv[:64], "role": role_now, "failure": self._failure, **report}
        if self._switching:
            said["switches"] = {framework: switching.report() for framework, switching in self._switching.items()}
        from trueup.foundation.redaction import redacted

        text = json.dumps(redacted(said), indent=1, default=str)
        path = Path(self._order["directory"], "processes", f"{os.getpid()}.json")
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)  # without parents: a capture that was removed stays removed
            temporary.write_text(text, errors="backslashreplace")
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
                if error.errno == errno.ENOSPC:  # over the first report, whose block is ours: better at risk than missing
                    path.write_text(text, errors="backslashreplace")
                    return
            print(f"trueup: process {os.getpid()} cannot write {path}: {error.strerror}", file=sys.stderr)


def _calls(report: Report) -> int:
    return report.get("calls") or 0


def _last_words(error: BaseException) -> str:
    return f"the run ended with {type(error).__name__}: {str(error)[:200]}"


def _stop_in_words() -> None:
    """Let a run that ends because its capture failed say why in one message, with exit code 2 and without a traceback."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind.__name__ != "RunStopped":
            before(kind, error, trace)
            return
        print(f"trueup: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2)  # CPython takes it from a hook too

    sys.excepthook = hook


def _before_hard_exit(process: _Process) -> None:
    """Let `os._exit`, which runs no exit handlers, write what was recorded first.

    Scripts call it to leave a hanging collective; multiprocessing ends every forked child with it.
    """
    leave = os._exit

    def _exit(status: int) -> None:
        writer = threading.Thread(target=process.end, kwargs={"quietly": True}, daemon=True)
        try:
            writer.start()
            writer.join(EXIT_SECONDS)
            if writer.is_alive():
                print(f"trueup: os._exit waits no longer than {EXIT_SECONDS:.0f} s for the disk: the capture of process "
                      f"{os.getpid()} lacks what was recorded last", file=sys.stderr, flush=True)  # fmt: skip
        finally:
            leave(status)

    os._exit = _exit  # type: ignore[assignment]
