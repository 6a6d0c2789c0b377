"""The life of an armed process: its capture begins with the framework and ends with the process, however that ends.

Standard library only, so that a launcher or a data worker loads nothing more than it would without Trueup.

Only a process that trains is captured at once (`role`, from how Python was started). A launcher computes nothing. A child of
multiprocessing may be a data worker or a training worker, and its environment does not tell: it inherits RANK from its parent. It
is captured when it joins a process group, which no data worker does.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import random
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Literal

Role = Literal["run", "launcher", "child"]

LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "horovodrun", "mpirun", "colossalai", "fleetrun")
"""Console scripts that start the training in other processes (torch 2.13, accelerate 1.x, deepspeed 0.17, paddle 3.3)."""

LAUNCHER_MODULES = (
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands", "deepspeed.launcher", "paddle.distributed.launch",
    "paddle.distributed.fleet.launch",
)  # fmt: skip
"""The same, started with ``python -m``."""

CHILDREN = ("--multiprocessing-fork", "multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""In the command line of what multiprocessing starts by spawn and forkserver (CPython 3.10 to 3.14)."""


def role(command: Sequence[str] | None = None) -> Role:
    """Tell the role of the process with this command line (its interpreter first), by default this one."""
    words = list(sys.orig_argv if command is None else command)
    if any(mark in word for word in words[1:] for mark in CHILDREN) or (command is None and _forked_child()):
        return "child"
    module, script = _program(words)
    if module is not None:
        launches = any(module == name or module.startswith(f"{name}.") for name in LAUNCHER_MODULES)
    else:
        launches = script is not None and PurePath(script).name in LAUNCHERS
    return "launcher" if launches else "run"


def _program(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the module after ``-m``, or the script, of a Python command line."""
    skip = False
    for position, word in enumerate(words[1:], 1):
        if skip:
            skip = False
        elif word == "-m":
            return (words[position + 1] if position + 1 < len(words) else None), None
        elif word in ("-W", "-X"):
            skip = True
        elif word == "-c":
            return None, None
        elif not word.startswith("-"):
            return None, word
    return None, None


def _forked_child() -> bool:
    """Tell whether multiprocessing forked this process (before it imported the framework)."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and (
        process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)
    )


def data_worker() -> bool:
    """Tell whether this process served a DataLoader."""
    torch = sys.modules.get("torch.utils.data._utils.worker")
    paddle = sys.modules.get("paddle.io.dataloader.worker")
    return any(getattr(worker, "_worker_info", None) is not None for worker in (torch, paddle))


EXIT_SECONDS = 10.0
"""How long `os._exit` waits for the capture to reach the disk; it may be called where a lock is held."""

Report = dict[str, Any]

_process: _Process | None = None


def begin(order: str, framework: str) -> None:
    """Arm this process, which has just imported a framework: captured from now on, or once it joins a process group, or not at
    all if it is a launcher; of two frameworks imported each is captured if something runs in it."""
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
        self._armed: dict[str, Any] = {}  # by framework
        self._failure: str | None = None
        self._switching: dict[str, Any] = {}
        """By framework: what was switched off in it (`trueup.recording.engine.replacing`), where the order says so."""
        self._ended: int | None = None

    def arm(self, framework: str) -> None:
        """Begin; whatever is wrong with the observer, the training goes on, unless it is to stop then."""
        if self.role == "launcher":
            return
        self._leave_report({"state": "running"})
        order = self._order
        if order.get("seed") is not None:
            seed_imported(order["seed"])
        try:
            if order.get("switches"):
                switching = import_module("trueup.recording.engine.replacing")
                self._switching[framework] = switching.Switching(framework, order["switches"])
            armed = import_module(f"trueup.recording.adapters.{framework}.armed")
            policy, watch = order.get("policy"), order.get("watch")
            options = order.get("options_of", {}).get(framework, order["options"])
            directory, root = Path(order["directory"]), order["root"]
            if order.get("monitor") is not None:
                monitored = import_module("trueup.analysis.monitor.session")
                begun = monitored.armed(armed.Armed, directory, options, root, order["monitor"])
            else:
                begun = armed.Armed(directory, options, root, policy, watch)
            self._armed[framework] = begun
            begun.begin(at_once=self.role == "run")
        except Exception as error:  # noqa: BLE001
            self._failure = f"{type(error).__name__}: {error}"
            print(f"trueup: process {os.getpid()} is not captured: {self._failure}", file=sys.stderr, flush=True)
            if self.stops or self._order.get("policy") is not None:  # a run without its policy would be taken for one with it
                self.end()
                raise SystemExit(2) from None

    def end(self, *, quietly: bool = False) -> None:
        """Write what is left and leave a report; ``quietly`` leaves none of nothing (a child that multiprocessing forked may be
        any worker)."""
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


def seed_imported(seed: int) -> None:
    """Seed Python, and NumPy and each framework that is imported: PyTorch's reaches every device it knows, a registered one too."""
    random.seed(seed)
    functions = {"numpy": "random.seed", "torch": "manual_seed", "paddle": "seed", "tensorflow": "random.set_seed"}
    for name, function in functions.items():
        if (module := sys.modules.get(name)) is not None:
            attrgetter(function)(module)(seed)


def _calls(report: Report) -> int:
    return report.get("calls") or 0


def _last_words(error: BaseException) -> str:
    return f"the run ended with {type(error).__name__}: {str(error)[:200]}"


def _stop_in_words() -> None:
    """End a run whose capture failed with one message that says why, exit code 2 and no traceback."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind.__name__ != "RunStopped":
            before(kind, error, trace)
            return
        print(f"trueup: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2)  # CPython takes it from a hook too

    sys.excepthook = hook


def _before_hard_exit(process: _Process) -> None:
    """Let `os._exit`, which runs no exit handlers, write what was recorded first. Scripts call it to leave a hanging collective;
    multiprocessing ends every forked child with it."""
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
