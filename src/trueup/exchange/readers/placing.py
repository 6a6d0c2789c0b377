"""Which rank and step a file of a dump belongs to, told by the folders it lies in."""

from __future__ import annotations

from collections.abc import Iterable

from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.tree import base, places
from trueup.foundation.model import TrueupError


def numbered(paths: Iterable[str], notes: Notes) -> dict[str, tuple[int, int]]:
    """Return ``(rank, step)`` of each file, in order of step and rank.

    Folders ``stepN`` and ``rankN`` say it. Processes that had no rank (``proc4711``) get the lowest free numbers in the order of
    their process ids; what has no such folder is rank 0, step 0.

    Raises:
        TrueupError: the files are of several dumps, or two claim the same rank and step.
    """
    paths = sorted(paths)
    above = sorted({base(path) for path in paths})
    if len(above) > 1:
        some = ", ".join(repr(folder or ".") for folder in above[:5])
        raise TrueupError(f"there are {len(above)} dumps, in {some}{', …' if len(above) > 5 else ''}: import one of them at a time")
    found = {path: places(path) for path in paths}
    taken = {place["rank"] for place in found.values() if "rank" in place}
    processes = sorted({place["proc"] for place in found.values() if "proc" in place and "rank" not in place})
    free = (rank for rank in range(len(taken) + len(processes)) if rank not in taken)
    ranks = dict(zip(processes, free, strict=False))
    if len(processes) > 1:
        notes.say(f"{len(processes)} processes knew no rank; they were numbered in the order of their process ids")
    placed = {
        path: (place.get("rank", ranks.get(place.get("proc", -1), 0)), place.get("step", 0)) for path, place in found.items()
    }
    seen: dict[tuple[int, int], str] = {}
    for path, at in placed.items():
        if at in seen:
            raise TrueupError(f"{seen[at]} and {path} are both of rank {at[0]}, step {at[1]}: import one of them by its own path")
        seen[at] = path
    return dict(sorted(placed.items(), key=lambda item: (item[1][1], item[1][0])))
