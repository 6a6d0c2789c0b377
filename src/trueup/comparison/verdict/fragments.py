"""What keeps a capture from being all that its run did, in words: a run that did not end, other filters, slots recorded twice.

Two runs that were asked to record the same and did so to their end are whole, however little that is. Of a fragment nobody knows
what is missing, so no agreement of what is there makes two runs aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trueup.comparison.graph.streams import NONE, Stream
from trueup.model import PHASES
from trueup.report.sentence import DIFFERENT_FILTERS, FRAGMENT
from trueup.report.wording import counted
from trueup.store import Capture

SIDES = ("baseline", "candidate")
LONGEST = 120
"""Characters of a filter that are shown."""


def fragment_notes(captures: Sequence[Capture]) -> list[str]:
    """Say of each capture whose run did not end, or was not recorded to its end, why that is and what to do."""
    found = []
    for side, capture in zip(SIDES, captures, strict=True):
        if capture.unfinished:
            more = f" (and {len(capture.unfinished) - 1} more)" if len(capture.unfinished) > 1 else ""
            end = f" that ends in step {capture.steps[-1]}" if capture.steps else ""
            found.append(f"the {side} {FRAGMENT}{end}: {capture.unfinished[0]}{more}: record that run again, to its end")
    return found


def filters(captures: Sequence[Capture]) -> str | None:
    """Name the filters of two captures where they differ, or return None.

    Levels, ranks and steps show in what was recorded; `Overlap` compares those.
    """
    first, second = (_filters(capture) for capture in captures)
    if first is None or second is None or first == second:
        return None
    said = [", ".join(its[name] for name in its if first[name] != second[name]) for its in (first, second)]
    return f"baseline {said[0]}, candidate {said[1]}"


def filtered_note(differ: str, one_sided: int) -> str:
    """Say that calls have no counterpart where the runs were recorded through different filters."""
    have = f"{counted(one_sided, 'call')} {'exists' if one_sided == 1 else 'exist'} in one run only"
    return f"{DIFFERENT_FILTERS} ({differ}), and {have}: record both with the same --phase, --include and --exclude"


def detail_note(captures: Sequence[Capture]) -> str | None:
    """Say that one run keeps less of each tensor than the other, or return None."""
    first, second = (capture.root.get("detail") for capture in captures)
    if first == second or not (isinstance(first, str) and isinstance(second, str)):
        return None
    return f"the baseline keeps detail {first[:LONGEST]}, the candidate {second[:LONGEST]}; tensors are compared by what both keep"


def repeated_note(capture: Capture, stream: Stream) -> str | None:
    """Say that a call has a slot twice, which no run records: some part of the records is there twice; or return None."""
    if stream.imported or stream.translated or (slot := _repeated(stream)) == NONE:
        return None
    row = stream.row(int(stream.call[slot]))
    name = stream.names.name(int(stream.slot[slot]))
    place = f"records of rank {row.rank} step {row.step} were copied over others"
    return f"{capture.path.name}: {name} of {row.op} ({row.key}) is recorded twice: {place}"


def _repeated(stream: Stream) -> int:
    """Return a slot that begins its call a second time, `NONE` where there is none.

    A later slot may be there twice: of ``mul(x, x)`` both factors have one gradient.
    """
    begins = stream.starts[:-1][stream.call]
    again = (stream.slot == stream.slot[begins]) & (np.arange(len(stream.slot)) > begins)
    return int(np.argmax(again)) if again.any() else NONE


def _filters(capture: Capture) -> dict[str, str] | None:
    """Return the filters of a capture in words, None where it tells none (another tool's, or one made by hand)."""
    config = capture.root.get("config")
    if not isinstance(config, dict) or not all(isinstance(config.get(name), list) for name in ("phases", "include", "exclude")):
        return None
    said = {}
    for name, option in (("phases", "--phase"), ("include", "--include"), ("exclude", "--exclude")):
        values: list[Any] = sorted(map(str, config[name]))
        nothing = not values or (name == "phases" and set(values) >= set(PHASES))
        said[name] = f"without {option}" if nothing else f"{option} {' '.join(values)[:LONGEST]}"
    return said
