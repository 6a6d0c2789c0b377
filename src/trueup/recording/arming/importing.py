"""Following the import of a framework, so that a capture begins the moment it is loaded."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys

TYPE_CHECKING = False  # as typing has it: typing and importlib.abc take longer to load than all else here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader, MetaPathFinder
    from types import ModuleType
    from typing import Any
else:
    Loader = MetaPathFinder = object


class WhenImported(MetaPathFinder):
    """Arms the process right after a framework was imported.

    It stays until then: a library that only asks whether there is one (`importlib.util.find_spec("torch")`), or an
    import that fails, does not use it up.
    """

    def __init__(self, name: str, order: str) -> None:
        self._name, self._order = name, order
        self._asking = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
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

    def loaded(self) -> None:
        """Arm, once."""
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
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
