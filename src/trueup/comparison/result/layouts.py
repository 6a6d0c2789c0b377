"""A comparison of runs of different layouts: what there is to say where they cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.comparison.layout.described import layout_of
from trueup.comparison.result.summary import SCHEMA, count, summarise
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.model import Result
from trueup.foundation.store import Capture
from trueup.foundation.store.overview import Overview
from trueup.foundation.words.sentence import HEADS


def other_layouts(captures: tuple[Capture, Capture]) -> str:
    """Say how the layouts of two captures differ: ``TP=2 against one process``; empty where they do not."""
    first, second = map(layout_of, captures)
    if not first.differs(second):
        return ""
    said = str(first), str(second)
    return f"{said[0]} against {said[1]}" if said[0] != said[1] else f"{said[0]}, and weights that are cut in different places"


def not_told(captures: tuple[Capture, Capture], why: str, criterion: Criterion, further: Sequence[str] = ()) -> Result:
    """Return the result of a comparison that was not made."""
    head = HEADS["inconclusive"]
    lines = [f"{head}{why}", *(" " * len(head) + f"note: {line}" for line in further)]
    overviews = [Overview(capture) for capture in captures]
    for overview in overviews:
        overview.add_the_rest(frozenset())
    first, second = (summarise(c, o, sorted(c.ranks)) for c, o in zip(captures, overviews, strict=True))
    table = SCHEMA.empty_table()
    notes, counts = [why, *further], count(table, (), 0, 0)
    return Result("inconclusive", "\n".join(lines), [], [], [], notes, criterion.name, first, second, counts, table)
