"""Calls for CUDA sent to another device in the live process, and each place of the user's where that was done.

What is sent where is told by a table of names (``torch.cuda.synchronize``) and of functions that take a device. Functions of
PyTorch are reached by a mode, so a value becomes the device where it is used; names are replaced in their modules.
The mode is of the thread that imports PyTorch: a custom function's backward on another thread is not reached.
"""

from __future__ import annotations

import atexit
import functools
import json
import linecache
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trueup.foundation.frameworks import cuda_version
from trueup.recording.adapters.torch.functions import full_name, line_of

VARIABLE = "TRUEUP_REDIRECT"
"""Environment variable: a JSON file with ``device`` (a type, or empty for the accelerator that is there), ``names``, ``sinks`` and
``into``, a folder for what was found."""
CUDA = re.compile(r"cuda(:\d+)?")
_QUIET = (str(Path(torch.__file__).parent), str(Path(__file__).parents[3]), sysconfig.get_path("stdlib"), "<frozen")
_calling = threading.local()
DEVICE = torch.device  # the class itself: a stand-in takes its place
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Given = Callable[[Arguments, Keywords], tuple[Arguments, Keywords]]


@functools.cache
def _read_as_text(file: str) -> frozenset[int]:
    return cuda_version.lines("".join(linecache.getlines(file)))


def calling() -> str:
    """Return the function of PyTorch that the user called and that has not returned, or nothing."""
    return getattr(_calling, "name", "")


class Redirecting:
    """The substitutions of one process."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.device = str(table["device"] or torch.accelerator.current_accelerator() or "cpu")
        self.methods = {name.removeprefix("*.") for sink in table["sinks"] for name in sink["calls"] if name.startswith("*.")}
        self._table = table
        self._seen: dict[tuple[str, int, str], str] = {}
        self._process = os.getpid()

    def begin(self) -> None:
        """Redirect from now on."""
        if self.device == "cuda":
            return
        for name, rule in self._table["names"].items():
            there = _found(rule["to"].replace("torch.npu", f"torch.{self.device}", 1))
            if there is not None and _found(name) is not None:
                self._replace(name, there, functools.partial(self._renamed, name, rule))
        for sink in self._table["sinks"]:
            for name in sink["calls"]:
                if "*" not in name and name not in self._table["names"] and (real := _found(name)) is not None:
                    self._replace(name, real, functools.partial(self._taken, name, sink))
        torch.Tensor.is_cuda = property(self._is_there)
        torch.version.__class__ = type("version", (ModuleType,), {"cuda": property(self._version)})
        _Mode(self).__enter__()
        atexit.register(self.write)

    def translated(self, value: Any, name: str, kind: str = "device") -> Any:
        """Return a value for the device, where it is CUDA's."""
        if isinstance(value, DEVICE):
            if value.type == "cuda":
                self.note(name, f"{value!s} is {self.device}")
                return DEVICE(self.device) if value.index is None else DEVICE(self.device, value.index)
        elif isinstance(value, str):
            if kind == "backend" and value in ("nccl", "cpu:gloo,cuda:nccl"):
                backend = torch.distributed.get_default_backend_for_device(self.device)
                self.note(name, f"{value!r} is {backend!r}")
                return backend
            if kind == "device" and CUDA.fullmatch(value):
                self.note(name, f"{value!r} is {value.replace('cuda', self.device)!r}")
                return value.replace("cuda", self.device)
            if kind == "type" and value.startswith("torch.cuda."):
                self.note(name, f"{value!r} is of {self.device}")
                return value.replace("cuda", self.device, 1)
        elif isinstance(value, dict):
            return {key: self.translated(one, name, kind) for key, one in value.items()}
        return value

    def _is_there(self, tensor: torch.Tensor) -> bool:
        """``tensor.is_cuda``: in the user's code, whether it is on the device; PyTorch's own code has what is true."""
        if self.device == "cuda" or tensor.device.type != self.device or sys._getframe(1).f_code.co_filename.startswith(_QUIET):
            return bool(tensor.device.type == "cuda")
        self.note("torch.Tensor.is_cuda", f"is asked of {self.device}")
        return True

    def _version(self, module: ModuleType) -> str | None:
        """``torch.version.cuda``: a version that is none, where the build has none and a line reads it as a text."""
        caller, found = sys._getframe(1), vars(module).get("cuda")
        if found is None and caller.f_lineno in _read_as_text(caller.f_code.co_filename):
            self.note("torch.version.cuda", "is '0.0'")
            found = "0.0"
        return found

    def note(self, name: str, what: str) -> None:
        """Say a place once."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_QUIET):
            frame = frame.f_back  # type: ignore[assignment]
        place = (frame.f_code.co_filename, frame.f_lineno, name) if frame is not None else ("", 0, name)
        if place not in self._seen:
            self._seen[place] = what
            if place[0] and os.environ.get("RANK", "0") == "0":
                print(f"trueup: {os.path.relpath(place[0])}:{place[1]}: {name}: {what}", file=sys.stderr, flush=True)

    def write(self) -> None:
        """Write the places, for whoever started this process."""
        if os.getpid() == self._process and self._table.get("into"):
            rows = [{"file": file, "line": line, "name": name, "what": what} for (file, line, name), what in self._seen.items()]
            Path(self._table["into"], f"{os.getpid()}.json").write_text(json.dumps(rows), errors="backslashreplace")

    def _renamed(self, name: str, rule: Mapping[str, Any], args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Return the arguments of a function under its new name, which may want the device besides."""
        self.note(name, f"is {rule['to']}")
        named = dict(zip(rule["positional"], args, strict=False))
        if rule["first"]:
            return (self.device, *args[len(named) :]), {**named, **kwargs}
        return args, {rule["keyword"]: self.device, **kwargs} if rule["keyword"] else kwargs

    def _taken(self, name: str, sink: Mapping[str, Any], args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Return the arguments of a function that takes a device."""
        at, keywords, kind = sink["position"], sink["keywords"], sink["kind"]
        first = tuple(self.translated(one, name, kind) if place == at else one for place, one in enumerate(args))
        return first, {key: self.translated(one, name, kind) if key in keywords else one for key, one in kwargs.items()}

    def _replace(self, name: str, real: Any, given: Given) -> None:
        module, _, last = name.rpartition(".")
        if (owner := _found(module)) is None:
            return
        if isinstance(real, type):
            setattr(owner, last, _stand_in(real, given))
        else:
            setattr(owner, last, _wrapper(real, given) if callable(real) else real)


class _Mode(TorchFunctionMode):
    def __init__(self, redirecting: Redirecting) -> None:
        super().__init__()
        self._redirecting = redirecting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        before = calling()
        full = full_name(func) or name
        _calling.name = before or full
        try:
            if func is torch.Tensor.cuda:
                to = args[1] if len(args) > 1 else kwargs.get("device")
                here = self._redirecting.device
                self._redirecting.note("torch.Tensor.cuda", f"is .to({here!r})")
                index = to.index if isinstance(to, DEVICE) else to
                blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
                return args[0].to(here if index is None else f"{here}:{index}", non_blocking=blocking)
            words = name in self._redirecting.methods
            new = tuple(self._changed(one, full, words) for one in args)
            named = {key: self._changed(one, full, words or key in ("device", "map_location"))
                     for key, one in kwargs.items()}  # fmt: skip
            return line_of(func, named)(func, *new, **named)
        finally:
            _calling.name = before

    def _changed(self, value: Any, name: str, words: bool) -> Any:
        if isinstance(value, DEVICE) or (words and isinstance(value, str)):
            return self._redirecting.translated(value, name)
        return value


class _StandIn(type):
    """A class that makes another's objects: what is asked of it is asked of that one."""

    real: type
    given: Given

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cls.given(args, kwargs)
        return cls.real(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.real, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        setattr(cls.real, name, value)


def _stand_in(real: type, given: Given) -> type:
    kept = {"real": real, "given": staticmethod(given), "__module__": real.__module__, "__doc__": real.__doc__}
    return _StandIn(real.__name__, (), kept)


def _wrapper(real: Callable[..., Any], given: Given) -> Callable[..., Any]:
    @functools.wraps(real)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = given(args, kwargs)
        return real(*args, **kwargs)

    return wrapper


def _found(name: str) -> Any:
    """Return the object of a name under torch; None if there is none."""
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def begin(path: str) -> None:
    """Redirect as a file says."""
    Redirecting(json.loads(Path(path).read_text())).begin()
