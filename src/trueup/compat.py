"""`trueup.compat`: another name for `trueup_compat`, the old tools' functions, where the distribution `trueup-compat` is installed.

``trueup.compat.msprobe`` is the very module ``trueup_compat.msprobe``: a second copy would have switches of its own.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

REAL = "trueup_compat"

if find_spec(REAL) is None:
    raise ModuleNotFoundError(
        f"{__name__} needs the distribution trueup-compat, which is not installed; install it: pip install 'trueup[compat]'",
        name=REAL,
    )


def _real(name: str) -> str:
    return REAL + name.removeprefix(__name__)


class _OtherName(MetaPathFinder, InspectLoader):
    """Finds ``trueup.compat.NAME`` and gives the module ``trueup_compat.NAME``."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}.") or (real := find_spec(_real(fullname))) is None:
            return None
        return ModuleSpec(fullname, self, origin=real.origin, is_package=real.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_real(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has overwritten."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state

    def get_code(self, fullname: str) -> CodeType | None:
        """Return what ``python -m`` runs."""
        real = find_spec(_real(fullname))
        return real.loader.get_code(real.name) if real is not None and isinstance(real.loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        real = find_spec(_real(fullname))
        return real.loader.get_source(real.name) if real is not None and isinstance(real.loader, InspectLoader) else None


__path__: list[str] = []
sys.meta_path.insert(0, _OtherName())  # Python's own would find the file in the folder of `trueup_compat`, and run it once more
