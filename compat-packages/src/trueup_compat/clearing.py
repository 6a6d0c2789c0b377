"""What an earlier run of an old tool's script left is replaced, as the tools do; nothing else is ever removed."""

from __future__ import annotations

import shutil
from pathlib import Path

from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout


def remove(directory: Path) -> None:
    """Remove the capture in a directory; one that is empty or not there is left alone.

    Raises:
        TrueupError: what is there is no capture.
    """
    if not directory.exists() or not any(directory.iterdir()):
        return
    entries = (entry.name for entry in directory.iterdir())
    if not (directory / layout.MANIFEST).is_file() and any(layout.number(layout.RANK, name) is None for name in entries):
        raise TrueupError(f"{directory} is in the way and no capture: move it away, or choose another tag")
    shutil.rmtree(directory)
