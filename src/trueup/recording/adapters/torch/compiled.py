"""The compiled short ways of this adapter (native/), where they were built."""

from __future__ import annotations

import importlib
from typing import Any

from trueup.foundation import kernels


def quick_module() -> Any | None:
    """Return the extension module; None where the compiled parts are missing or switched off (`kernels.native`)."""
    if kernels.native() is None:
        return None
    try:
        return importlib.import_module("trueup.recording.adapters.torch._quick")
    except ImportError:
        return None
