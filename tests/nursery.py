"""A process that has imported PyTorch and transformers once, and forks a child for each job: they start in milliseconds.

    tests, however many workers run them
      one process imports              ends with the tests
        a fork for each worker         answers lines: begin a job, wait for it
          a child for each job

A job is a function, named with its module (`faults.jobs.train`) and called with the keywords of its line, under the environment
variables of its line. What it prints goes to the file named in the line.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trueup
import warm_python
from launch.running import environment

TESTS = Path(__file__).parent
LIMIT = 400.0
"""Seconds after which a job is killed and the test fails: no fault may hang the training."""
READY = (
    "faults.jobs", "pyarrow.compute", "pyarrow.parquet", "transformers.models.gpt2.modeling_gpt2", "trueup.analysis.bisection",
    "trueup.doors.cli.app", "trueup.doors.cli.running", "trueup.doors.comparing", "trueup.doors.report.document",
    "trueup.doors.report.progress", "trueup.doors.report.terminal", "trueup.doors.training", "trueup.foundation.store.writer",
    "trueup.recording.adapters.torch.armed", "trueup.recording.adapters.torch.ruled", "trueup.recording.adapters.torch.session",
    "trueup.recording.execution.shadow", "trueup.recording.recorder.columns",
)  # fmt: skip
"""What most children use; each would import it anew, half a second long."""
HUNG = -99
"""Exit code of a job that was killed for it."""


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

    @property
    def complained(self) -> str:
        """What a script (`Nursery.script`) printed on stderr so far."""
        return self.log.with_suffix(".errors").read_text()

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

    def __init__(self, link: socket.socket) -> None:
        self._lines = link.makefile("rw")
        self.pid = int(self._lines.readline())
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")  # short: the path of a socket has 107 characters at most
        self.python = str(warm_python.write(Path(self._folder.name)))
        """An executable to use in place of Python's: what it runs is a child of the nursery."""
        self.ask("serve", folder=self._folder.name)

    def ask(self, what: str, **arguments: Any) -> str:
        """Send a line and return the answer."""
        self._lines.write(json.dumps({"what": what, **arguments}) + "\n")
        self._lines.flush()
        return self._lines.readline().strip()

    def close(self) -> None:
        """Remove the executable."""
        self._folder.cleanup()

    def load(self, *modules: str) -> None:
        """Import modules that the jobs to come need."""
        self.ask("load", modules=modules)

    def start(self, job: str, log: Path, variables: dict[str, str] | None = None, **arguments: Any) -> Child:
        """Begin a job; one of `faults.jobs` needs no module before its name."""
        log.write_text("")
        texts = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
        pid = self.ask("start", job=job, log=str(log), arguments=texts, variables=variables or {})
        return Child(self, int(pid), log, time.monotonic())

    def script(
        self, log: Path, path: Path, *arguments: str | Path, variables: dict[str, str] | None = None, **capture: Any
    ) -> Child:
        """Begin a Python script, as the interpreter would run it; what it says on stderr goes to a file of its own.

        Args:
            capture: the arguments of a capture around the script; none for no capture.
        """
        told = {name: str(value) if isinstance(value, Path) else value for name, value in capture.items()}
        texts, errors = [str(argument) for argument in arguments], log.with_suffix(".errors")
        return self.start("nursery.run_script", log, variables, path=path, arguments=texts, errors=errors, capture=told)


@contextmanager
def nursery() -> Iterator[Nursery]:
    """Fork the process for this worker, and end the fork with all its children."""
    link = _connected()
    started = Nursery(link)
    try:
        yield started
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        link.close()
        started.close()


def _connected() -> socket.socket:
    """Reach the process that all workers share; the first one starts it."""
    tests = int(os.environ.get(warm_python.TESTS, os.getpid()))
    path = Path(tempfile.gettempdir(), f"warm-{os.getuid()}-{tests}")
    link = socket.socket(socket.AF_UNIX)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            link.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
            folders = os.pathsep.join([str(TESTS), str(TESTS.parent / "benchmarks"), environment()["PYTHONPATH"]])
            subprocess.Popen(
                [sys.executable, "-m", "nursery", str(path), str(tests)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env=environment(PYTHONPATH=folders), start_new_session=True,
            )  # fmt: skip
            until = time.monotonic() + LIMIT
            while not path.exists():
                assert time.monotonic() < until, "the process that jobs are forked of did not start"
                time.sleep(0.05)
            link.connect(str(path))
    return link


def _fork_for_each(path: Path, tests: int) -> warm_python.Order | None:
    """Import, then fork for each worker that connects, until the tests end; in the fork, serve it."""
    import torch._dynamo  # noqa: F401 - which the first optimizer would import

    for name in READY:
        importlib.import_module(name)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path.with_suffix(".new")))
    listening.listen(32)
    listening.settimeout(1.0)
    path.with_suffix(".new").rename(path)  # there is no socket that nobody listens at yet
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    while _is_alive(tests):
        with suppress(TimeoutError):
            link, _ = listening.accept()
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                link.setblocking(True)
                return _serve(link)
            link.close()
    for left in (path, path.with_suffix(".lock")):
        left.unlink(missing_ok=True)
    return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _serve(link: socket.socket) -> warm_python.Order | None:
    """Answer lines until there are no more; in a process that `warm_python` forks, return what it is to be."""
    lines = link.makefile("rw")
    lines.write(f"{os.getpid()}\n")
    lines.flush()
    server, folder = 0, ""
    for line in iter(lines.readline, ""):
        order = json.loads(line)
        if order["what"] == "start":
            gc.freeze()  # no collection of a child's looks at, and so copies, what it inherits
            pid = os.fork()
            if pid == 0:
                os.environ.update(order["variables"])
                _work(order["job"], order["log"], order["arguments"])
            lines.write(f"{pid}\n")
        elif order["what"] in ("load", "serve"):
            with suppress(ImportError):  # the job that needs it says so
                for name in order.get("modules", ()):
                    importlib.import_module(name)
            folder = order.get("folder", folder)
            listening = warm_python.listen(Path(folder))
            before = server
            gc.freeze()
            server = os.fork()
            if server == 0:
                lines.detach()
                link.close()
                return warm_python.serve(listening)
            listening.close()
            if before:
                os.kill(before, signal.SIGKILL)
                os.waitpid(before, 0)
            lines.write("loaded\n")
        else:
            lines.write(f"{_end(order['pid'])}\n")
        lines.flush()
    os.killpg(0, signal.SIGKILL)  # the worker is gone, and so is what it started
    return None


def _end(pid: int) -> int:
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return HUNG


def _work(job: str, log: str, arguments: dict[str, Any]) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    module, _, name = job.rpartition(".")
    try:
        getattr(importlib.import_module(module or "faults.jobs"), name)(**arguments)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:  # noqa: BLE001 - the child must not go on as the nursery
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def run_script(path: str, arguments: list[str], errors: str, capture: dict[str, Any]) -> None:
    """Run a script as ``python PATH ARGUMENTS`` does."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).parent)
    with trueup.capture(**capture) if capture else nullcontext():
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    given = {str(Path(path).resolve()) for path in ("", *os.environ.get("PYTHONPATH", "").split(os.pathsep))}
    paths = [path for path in sys.path if path and str(Path(path).resolve()) not in given]
    program = _fork_for_each(Path(sys.argv[1]), int(sys.argv[2]))
    if program is not None:
        warm_python.run(program, paths)
