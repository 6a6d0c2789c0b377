"""Arming a process that knows nothing of Trueup: when it imports PyTorch, its capture begins.

`trueup capture -- COMMAND` puts the folder ``site`` on PYTHONPATH; every Python process of the command then runs its
``sitecustomize``, which calls `install`. Standard library only, until a framework is really imported.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "TRUEUP_CAPTURE"
"""Environment variable that holds, as JSON: directory, run, options (encoded `CaptureOptions`), command, root."""

SITE = str(Path(__file__).parent / "site")


def install() -> None:
    """Arm this process if the environment asks for it."""
    text = os.environ.get(VARIABLE)
    if text:
        sys.meta_path.insert(0, _WhenImported("torch", json.loads(text)))


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls `_arm` right after the first import of a framework."""

    def __init__(self, name: str, order: dict[str, Any]) -> None:
        self._name, self._order = name, order

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the framework as usual, and follow its loader."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Following(spec.loader, self._order)
        return spec


class _Following(importlib.abc.Loader):
    """A loader that arms the process when the module is loaded."""

    def __init__(self, loader: Any, order: dict[str, Any]) -> None:
        self._loader, self._order = loader, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, then begin the capture."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _arm(self._order)


def _arm(order: dict[str, Any]) -> None:
    directory = Path(order["directory"])
    try:
        from trueup.adapters.torch import arm
        from trueup.recorder.options import CaptureOptions

        session = arm(directory, CaptureOptions.from_json(order["options"]), order["root"])
        failure = None
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the observer, the training goes on
        session, failure = None, f"{type(error).__name__}: {error}"
        print(f"trueup: this process is not captured: {failure}", file=sys.stderr, flush=True)
    pid = os.getpid()
    atexit.register(_report, directory, pid, session, failure)


def _report(directory: Path, pid: int, session: Any, failure: str | None) -> None:
    """Leave ``processes/<pid>.json``: what this process recorded, or why nothing."""
    if os.getpid() != pid:  # a forked child: it was never captured
        return
    from trueup.store import write_process

    report: dict[str, Any] = {"argv": sys.argv[:64], "failure": failure, "rank": None, "calls": 0, "steps": 0}
    if session is not None:
        session.finish()
        report |= session.report()
    try:
        write_process(directory, report)
    except OSError as error:
        print(f"trueup: process {pid} could not leave its report in {directory}: {error}", file=sys.stderr)
