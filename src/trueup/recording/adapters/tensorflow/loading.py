"""Standing in for attributes of a module that may be loaded later: TensorFlow loads Keras when somebody asks for it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from trueup.recording.arming.importing import WhenImported
from trueup.recording.recorder.replacing import Replacement


class WhenLoaded(WhenImported):
    """Installs replacements now, or right after a module was imported; takes them back with the capture."""

    def __init__(self, name: str, make: Callable[[], list[Replacement]]) -> None:
        super().__init__(name, "")
        self._make = make
        self._made: list[Replacement] = []

    def install(self) -> None:
        """Stand in, or wait."""
        if self._name in sys.modules:
            self._begin()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Take everything back, or wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        made, self._made = self._made, []
        for replacement in reversed(made):
            replacement.remove()

    def loaded(self) -> None:
        """Stand in, once."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._begin()

    def _begin(self) -> None:
        self._made = self._make()
        for replacement in self._made:
            replacement.install()
