"""The life of an armed process: its capture begins with the framework and ends with the process, however that ends."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from trueup.arming.roles import data_worker, role

EXIT_SECONDS = 10.0
"""How long `os._exit` waits for the capture to reach the disk; it may be called where a lock is held."""


def begin(order: str) -> None:
    """Arm this process: capture it from now on, or once it joins a process group, or not at all if it is a launcher."""
    process = _Process(json.loads(order))
    process.arm()
    atexit.register(process.end)
    _before_hard_exit(process)


class _Process:
    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._directory = Path(order["directory"])
        self._role = role()
        self._armed: Any = None
        self._failure: str | None = None
        self._ended: int | None = None

    def arm(self) -> None:
        """Begin; whatever is wrong with the observer, the training goes on."""
        if self._role == "launcher":
            return
        try:
            from trueup.adapters.torch.armed import Armed
            from trueup.recorder.options import CaptureOptions

            options = CaptureOptions.from_json(self._order["options"])
            self._armed = Armed(self._directory, options, self._order["root"])
            self._armed.begin(at_once=self._role == "run")
        except Exception as error:  # noqa: BLE001
            self._failure = f"{type(error).__name__}: {error}"
            print(f"trueup: process {os.getpid()} is not captured: {self._failure}", file=sys.stderr, flush=True)

    def end(self, *, quietly: bool = False) -> None:
        """Write what is left and leave ``processes/<pid>.json``: what this process recorded, or why nothing.

        Args:
            quietly: leave no report if nothing was recorded (a forked child of multiprocessing, which may be any worker).
        """
        if self._ended == os.getpid():
            return
        self._ended = os.getpid()
        report: dict[str, Any] = {
            "argv": sys.argv[:64], "role": self._name(), "failure": self._failure, "rank": None, "calls": 0, "steps": 0,
        }  # fmt: skip
        if self._armed is not None:
            error = getattr(sys, "last_value", None)
            self._armed.finish(None if error is None else f"the run ended with {type(error).__name__}: {str(error)[:200]}")
            report |= self._armed.report()
        if quietly and not report["calls"]:
            return
        from trueup.store import write_process

        try:
            write_process(self._directory, report)
        except OSError as error:
            print(f"trueup: process {os.getpid()} left no report in {self._directory}: {error}", file=sys.stderr)

    def _name(self) -> str:
        return "data worker" if self._role == "child" and data_worker() else self._role


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
        finally:
            leave(status)

    os._exit = _exit  # type: ignore[assignment]
