"""A Python that starts in a tenth of a second with PyTorch in it, for commands that a test has started and that start further ones.

    bin/python train.py            an executable: sends its command line, environment, folder and the files it inherits, then waits
      nursery                      has imported PyTorch; forks a process for each that asks
        train.py                   runs as if it were started by the interpreter

What runs sees an interpreter that has imported nothing: its arguments, paths, environment and ``sitecustomize`` are its own, and
PyTorch counts as imported once it imports it. Options of the interpreter are taken and left alone. It ends as an interpreter does,
but that its modules are not taken apart: that would write to, and so copy, all that it shares with the nursery, for half a second.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib.machinery
import importlib.util
import marshal
import multiprocessing.spawn
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

PROGRAM = """#!{python} -IS
import marshal, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
files = [0, 1, 2]
for number in {{int(name) for name in os.listdir("/dev/fd")}} - {{0, 1, 2, link.fileno()}}:
    try:
        files += [number] if os.get_inheritable(number) else []
    except OSError:
        pass  # it listed the others
order = marshal.dumps((sys.argv, os.getcwd(), dict(os.environ), files))
socket.send_fds(link, [len(order).to_bytes(4, "big")], files)
link.sendall(order)
for number in files[3:]:
    os.close(number)
process = int.from_bytes(link.recv(4), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(process, number))
code = int.from_bytes(link.recv(4), "big", signed=True)
if code < 0:
    if -code in (signal.SIGINT, signal.SIGTERM):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
TESTS = "TESTS_PROCESS"
"""Variable with the process that workers work for."""
SECONDS = 5.0
"""How often a process that serves looks whether its parent is there still."""
EXIT = os._exit
"""Before a program, or a capture of it, puts something in its place."""
UNFLUSHED = 120
"""Exit code of an interpreter whose output could not be written."""
HIDDEN = ("torch", "paddle", "tensorflow")
"""What counts as imported only when a program imports it, where the nursery has it."""

Order = tuple[list[str], str, dict[str, str]]
"""Command line, folder, environment."""


def write(folder: Path) -> Path:
    """Write the executable whose orders arrive at the socket beside it."""
    path = folder / "python"
    path.write_text(PROGRAM.format(python=sys.executable, path=str(folder / "socket")))
    path.chmod(0o755)
    return path


def listen(folder: Path) -> socket.socket:
    """Open the socket, in place of an earlier one."""
    path = folder / "socket"
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(32)
    return listening


def serve(listening: socket.socket) -> Order:
    """Fork a process for each order, until the parent is gone; return the order in that process, with its files open."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening.settimeout(SECONDS)
    parent = os.getppid()
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            link, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return _begun(link)
            link.close()
    os._exit(0)


def _begun(link: socket.socket) -> Order:
    """Read an order and fork its process; in the parent, wait for it and say how it ended."""
    head, files, _, _ = socket.recv_fds(link, 4, 32)
    size, text = int.from_bytes(head, "big"), b""
    while len(text) < size:
        text += link.recv(size - len(text))
    process = os.fork()
    if process == 0:
        link.close()
        *order, numbers = marshal.loads(text)
        above = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(*numbers, *files) + 1) for file in files]
        for number, file in zip(numbers, above, strict=True):
            os.dup2(file, number)
        for file in {*files, *above} - {*numbers}:
            os.close(file)
        return tuple(order)  # type: ignore[return-value]
    for file in files:
        os.close(file)
    link.sendall(process.to_bytes(4, "big"))
    ended = os.pidfd_open(process)
    if ended not in select.select([ended, link], [], [])[0]:  # who asked was killed
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        link.sendall(code.to_bytes(4, "big", signed=True))
    finally:
        os._exit(0)


class _Loaded:
    """Finds a module that is there, so that what follows its import (`trueup.recording.arming`) does follow it."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._module.__name__:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=self._module.__file__, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        assert self._spec is not None
        module.__spec__, module.__loader__ = self._spec, self._spec.loader
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]  # `remove` shifts what other threads walk along
        if module.__name__ == "torch" and module._is_device_backend_autoload_enabled():
            module._import_device_backends()  # as torch 2.13 does last


def run(order: Order, base: Sequence[str]) -> NoReturn:
    """Be the process of an order.

    Args:
        base: ``sys.path`` of an interpreter without PYTHONPATH.
    """
    words, folder, environment = order
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv, sys.executable = words, words[0]
    multiprocessing.spawn.set_executable(words[0])
    before = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*before, *base]
    sys.modules.pop("trueup.autoload", None)  # which loads a device once in a process
    for name in filter(sys.modules.__contains__, HIDDEN):
        sys.meta_path.insert(0, _Loaded(sys.modules.pop(name)))  # type: ignore[arg-type]
    site = importlib.machinery.PathFinder.find_spec("sitecustomize", before)
    if site is not None and site.loader is not None:
        site.loader.exec_module(importlib.util.module_from_spec(site))
    execute(words[1:])


def execute(words: list[str]) -> NoReturn:
    """Run what follows the interpreter on a command line, and end."""
    code = 0
    try:
        _execute(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, (int, type(None))):
            print(error.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - an interpreter says of any what it was
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # a capture asks for it
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except OSError:
                code = UNFLUSHED
    ctypes.CDLL(None).fflush(None)  # what is written in C
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    EXIT(code & 0xFF)


def _execute(words: list[str]) -> None:
    while words[0][:2] in ("-u", "-B", "-W", "-X"):
        words = words[2 if words[0] in ("-W", "-X") else 1 :]
    option, *arguments = words
    if option == "-m":
        sys.argv = arguments
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        assert not option.startswith("-"), f"{option} is unknown here"
        sys.argv = words
        sys.path.insert(0, str(Path(option).resolve().parent))
        runpy.run_path(option, run_name="__main__")
