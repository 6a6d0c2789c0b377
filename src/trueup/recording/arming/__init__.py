"""Arming a process that knows nothing of Trueup: when it imports a framework that has an adapter, its capture begins.

`trueup capture -- COMMAND` puts the folder ``site`` on PYTHONPATH; every Python process of the command then runs its
``sitecustomize``, which calls `install`. Standard library only, until a framework is really imported; `process` is what follows.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False  # as typing has it: typing and importlib.abc take longer to load than all else here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader, MetaPathFinder
    from types import ModuleType
    from typing import Any
else:
    Loader = MetaPathFinder = object

VARIABLE = "TRUEUP_CAPTURE"
"""Environment variable that holds, as JSON: directory, run, options (encoded `CaptureOptions`), command, root."""

SITE = os.path.join(os.path.dirname(__file__), "site")  # noqa: PTH118, PTH120 - loaded at every start-up: no pathlib


def install() -> None:
    """Arm this process if the environment asks for it."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    from trueup.recording.registry import ADAPTERS

    for adapter in ADAPTERS:
        sys.meta_path.insert(0, WhenImported(adapter.name, text))


class WhenImported(MetaPathFinder):
    """Arms the process right after a framework was imported, and stays until then: a library that only asks for one
    (`importlib.util.find_spec("torch")`), or an import that fails, does not use it up."""

    def __init__(self, name: str, order: str) -> None:
        self._name, self._order = name, order
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the framework as usual, and follow its loader."""
        if fullname != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Following(spec.loader, self)
        return spec

    def remove(self) -> None:
        """Wait no longer. The list is another one then: an import on another thread that walks along it would miss a finder."""
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def loaded(self) -> None:
        """Arm, once."""
        if self not in sys.meta_path:
            return
        self.remove()
        from trueup.recording.arming.process import begin

        begin(self._order, self._name)


class _Following(Loader):
    """A loader that says when its module is loaded."""

    def __init__(self, loader: Any, finder: WhenImported) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, then begin the capture."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.loaded()
