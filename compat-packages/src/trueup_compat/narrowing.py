"""A capture seen through one rank and step of it, which is what an old tool's folder holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, layout, salvage


def narrowed(path: Path, rank: int, step: int | None) -> Capture:
    """Open one rank of a capture and, where it is given, one step.

    Raises:
        TrueupError: it is no capture, or has no such rank or step.
    """
    content = layout.read_root(path)
    found = salvage.scan(path, content)
    parts = [part for part in found.parts if part.rank == rank and step in (None, part.step)]
    if rank not in found.ranks or not parts:
        where = f"rank {rank}" if step is None else f"rank {rank}, step {step}"
        raise TrueupError(f"{path} holds nothing of {where}: the capture was recorded anew, or in part")
    return Capture(path, content, dataclasses.replace(found, parts=parts, ranks={rank: found.ranks[rank]}))


def beside(path: Path, ending: str) -> Path | None:
    """Return the native capture whose name is that of a file and ``ending``, None where it is not there."""
    found = Path(f"{path}{ending}")
    return found if found.is_dir() else None
