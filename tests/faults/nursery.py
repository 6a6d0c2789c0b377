"""A process that has imported PyTorch and transformers once, and forks a child for each job: they start in milliseconds.

A job is a function of `jobs`, called with the keywords of its line. What it prints goes to the file named in the line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.running import environment

TESTS = Path(__file__).parents[1]
LIMIT = 180.0
"""Seconds after which a job is killed and the test fails: no fault may hang the training."""


@dataclass
class Child:
    """A job under way."""

    nursery: Nursery
    pid: int
    log: Path
    started: float

    @property
    def said(self) -> str:
        """What it printed so far, on stdout and stderr."""
        return self.log.read_text()

    def see(self, text: str) -> None:
        """Wait until it has printed ``text``."""
        while text not in self.said:
            assert time.monotonic() - self.started < LIMIT, f"never said {text!r}, but: {self.said}"
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill it, as the out-of-memory killer does."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return its exit code, negative for a signal."""
        return int(self.nursery.ask("wait", pid=self.pid))


class Nursery:
    """The test's side of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._count = 0

    def ask(self, what: str, **arguments: Any) -> str:
        """Send a line and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def start(self, job: str, log: Path, **arguments: Any) -> Child:
        """Begin a job of `jobs`."""
        log.write_text("")
        texts = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
        return Child(self, int(self.ask("start", job=job, log=str(log), arguments=texts)), log, time.monotonic())


@contextmanager
def nursery() -> Iterator[Nursery]:
    """Start the process, and end it with all its children."""
    path = os.pathsep.join([str(TESTS), environment()["PYTHONPATH"]])
    process = subprocess.Popen(
        [sys.executable, "-m", "faults.nursery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment(PYTHONPATH=path), start_new_session=True,
    )  # fmt: skip
    try:
        yield Nursery(process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _serve() -> None:
    """Answer lines until there are no more."""
    import torch  # noqa: F401

    import faults.training  # noqa: F401
    from faults import jobs

    answers = os.fdopen(os.dup(1), "w")
    running: set[int] = set()
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        if order["what"] == "start":
            pid = os.fork()
            if pid == 0:
                _work(getattr(jobs, order["job"]), order["log"], order["arguments"])
            running.add(pid)
            answers.write(f"{pid}\n")
        else:
            answers.write(f"{_end(order['pid'])}\n")
        answers.flush()


def _end(pid: int) -> int:
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -99  # it hung


def _work(job: Any, log: str, arguments: dict[str, Any]) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        job(**arguments)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:  # noqa: BLE001 - the child must not go on as the nursery
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
