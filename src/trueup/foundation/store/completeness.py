"""Whether all that a rank recorded is there: its parts of records against the counts that were written with them.

The seal of each part says how many parts and rows its rank had written before, and the rank's manifest how many in all::

    step-000000/records-0000.parquet    before: 0 parts, 0 rows       holds 567 rows
    step-000001/records-0000.parquet    before: 1 part, 567 rows      holds 567 rows
    step-000003/records-0000.parquet    before: 3 parts, 1,701 rows   so one part of 567 rows is missing
    manifest.json                       written: 4 parts, 2,268 rows

A part that is gone, was cut or comes from elsewhere leaves a gap, and the gap has a place. Captures whose seals do not count, which
are older, are held against the manifest alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout
from trueup.foundation.store.manifest import read_object
from trueup.foundation.store.ownership import RANK_LIMIT
from trueup.foundation.store.parts import Part

NAMED = 8
"""Gaps and strange parts that are named; a hostile capture may have as many as parts."""


@dataclass(frozen=True, slots=True)
class Gap:
    """What is missing between two parts, or at the end."""

    after: Part | None
    parts: int
    rows: int


def absent(root: Path, run: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the ranks that a capture was to hold and does not, the first `NAMED` of them.

    A process that was armed and left a report that it recorded nothing, as the options selected nothing in it, is not missing.

    Args:
        root: the capture.
        run: its manifest.
        ranks: manifests of the ranks that are there.
    """
    sizes = [held["world_size"] for held in ranks.values() if type(held.get("world_size")) is int]
    if "imported" in run or not 1 < max(sizes, default=1) <= RANK_LIMIT:
        return []
    config = run.get("config")
    wanted = config.get("ranks") if isinstance(config, dict) else None
    missing = [rank for rank in range(max(sizes)) if rank not in ranks and _selects(wanted, rank)]
    if not missing:
        return []
    idle = _idle(root)
    return [rank for rank in missing if rank not in idle][:NAMED]


def _selects(ranges: Any, rank: int) -> bool:
    """Tell whether half-open ranges, as a manifest has them, hold a rank; what cannot be read holds all."""
    try:
        return ranges is None or any(start <= rank and (stop is None or rank < stop) for start, stop in ranges)
    except (TypeError, ValueError):
        return True


def _idle(root: Path) -> set[Any]:
    """Return the ranks of processes that say that they ended well and recorded nothing."""
    found = set()
    for path in (root / layout.PROCESSES).glob("*.json"):
        with suppress(OSError, TrueupError, TypeError):
            said = read_object(root, path)
            if said.get("state") == "ended" and not said.get("calls") and not said.get("failure"):
                found.add(said.get("process_rank"))
    return found


def missing(rank: int, manifest: Mapping[str, Any], parts: Sequence[Part]) -> list[str]:
    """Return a sentence for each gap in the records of a rank, and for each part that is of another run.

    Args:
        rank: number of the rank.
        manifest: of the rank, empty where it was lost.
        parts: those of the rank that can be read.
    """
    counted = sorted((part for part in parts if part.before is not None), key=lambda part: (part.before, part.path))
    uncounted = [part for part in parts if part.before is None]
    try:
        whole = _total(manifest)
    except (KeyError, TypeError, ValueError):
        return [f"rank {rank}: its manifest has no counts of parts and rows that can be read"]
    gaps = [*_gaps(counted, whole, is_final=manifest.get("status") == "complete")]
    held = sum(part.rows for part in uncounted)
    if gaps and (sum(gap.parts for gap in gaps), sum(gap.rows for gap in gaps)) == (len(uncounted), held):
        gaps = []  # written by another tool, or before seals counted, and whole
    if gaps and whole is not None and not counted:
        said = [f"rank {rank} wrote {_amount(*whole)}, {_amount(len(uncounted), held)} can be read"]
    else:
        said = [f"rank {rank}: {_gap(gap)}{_rewritten(uncounted)}" for gap in gaps[:NAMED]]
    return said + _of_another_run(rank, manifest, counted)


def _total(manifest: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many parts and rows a rank wrote in all, or up to the end of the last step that was wanted; None: not known."""
    written = manifest.get("written")
    if not isinstance(written, dict) or not (manifest.get("status") == "complete" or manifest.get("steps_over") is True):
        return None
    return int(written["parts"]), int(written["rows"])


def _gaps(counted: Sequence[Part], whole: tuple[int, int] | None, *, is_final: bool) -> Iterator[Gap]:
    """Yield where the count jumps; ``is_final``: nothing was written after ``whole`` was counted."""
    parts = rows = 0
    last = None
    for part in counted:
        before = part.before or (0, 0)
        if before != (parts, rows):
            yield Gap(last, before[0] - parts, before[1] - rows)
        (parts, rows), last = (before[0] + 1, before[1] + part.rows), part
    if whole is not None and (whole > (parts, rows) or (is_final and whole != (parts, rows))):
        yield Gap(last, whole[0] - parts, whole[1] - rows)


def _gap(gap: Gap) -> str:
    place = f"after {_name(gap.after)}" if gap.after is not None else "at the beginning"
    if gap.parts > 0 and gap.rows >= 0:
        return f"{_amount(gap.parts, gap.rows)} {'is' if gap.parts == 1 else 'are'} missing {place}"
    return f"what comes {place} was counted as {gap.parts:+,} parts and {gap.rows:+,} rows away from there: it is not in its place"


def _rewritten(uncounted: Sequence[Part]) -> str:
    """Name parts that another tool wrote in place of what is missing."""
    named = [f"{_name(part)} ({part.rows:,} rows)" for part in uncounted[:NAMED]]
    return f"; not written by the capture: {', '.join(named)}" if named else ""


def _of_another_run(rank: int, manifest: Mapping[str, Any], counted: Sequence[Part]) -> list[str]:
    """Name parts that another process wrote than the one whose manifest this is."""
    own = manifest.get("writer", next((part.writer for part in counted), None))
    strange = [part for part in counted if part.writer != own]
    return [f"rank {rank}: {_name(part)} is of another run than {_owner(manifest)}" for part in strange[:NAMED]]


def _owner(manifest: Mapping[str, Any]) -> str:
    return "the rank's manifest" if "writer" in manifest else "the parts before it"


def _amount(parts: int, rows: int) -> str:
    return f"{parts:,} part{'' if parts == 1 else 's'} of records with {rows:,} row{'' if rows == 1 else 's'}"


def _name(part: Part) -> str:
    return f"{part.path.parent.name}/{part.path.name}"
