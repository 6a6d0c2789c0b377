"""Where a step's time goes, on a terminal: a sentence, the classes with their shares, and what to do about the first.

    62 % of a step is host: the step waits for its data; most in enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__.

    class  share  most in                     calls  line
    host    62 %  enumerate(DataLoader)#_...      5  train.py:31
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.doors.report.html import ours, page
from trueup.doors.report.terminal import labelled, listing, print_lines
from trueup.foundation.words.wording import clean, shorten
from trueup.migration.profile.classes import remedy, sign

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.profile.judging import Compared, Profile

SHOWN = 0.005  # share of a step from which a part is listed
LISTED = 3  # parts listed of each class
COLOURS = {
    "operator": "#2e8b57", "copy and format": "#d98200", "framework": "#8a6fd1", "compile": "#c2185b", "host": "#c0392b",
    "communication": "#1976d2",
}  # fmt: skip
TONES = {0: "aligned", 1: "deviates", 2: "inconclusive"}


def render_profile(found: Profile, limit: int, console: Console) -> None:
    """Print the conclusion, the parts of each class up to ``limit``, and sign and remedy of what slows the steps down."""
    print_lines(console, [found.sentence], 0, "bold")
    rows = []
    for kind, share in found.shares.items():
        for place, part in enumerate(one for one in found.of(kind)[:LISTED] if found.share(one) >= SHOWN):
            rows.append((
                *((kind, _share(share)) if not place else ("", "")), shorten(clean(part.name), 60), _share(found.share(part)),
                f"{part.calls:,}", ", ".join(map(clean, part.lines)),
            ))  # fmt: skip
    listing(console, ("class", "share", "most in", "share", "calls", "lines"), rows, limit)
    slow, why = found.finding, [("why", clean(text)) for text in found.compiled[:LISTED]]
    if slow is not None:
        console.print()
        variant = found.variant(slow.kind)
        console.print(labelled([("sign", sign(slow.kind, variant)), *why, ("next", remedy(slow.kind, variant))]))
    elif why:
        console.print()
        console.print(labelled(why))
    remarks = [*found.remarks, *([f"Unreliable: {found.unreliable}."] if found.unreliable and not found.doubtful else [])]
    if remarks:
        console.print()
        print_lines(console, remarks, 0, "dim")


def render_compared(found: Compared, limit: int, console: Console) -> None:
    """Print how much slower a step is, and up to ``limit`` changes that matter."""
    print_lines(console, [found.sentence], 0, "bold")
    rows = [
        (kind, shorten(clean(name), 60), f"{before / 1e3:,.3f}", f"{after / 1e3:,.3f}", f"{(after - before) / 1e3:+,.3f}")
        for kind, name, before, after in _changes(found)
    ]
    listing(console, ("class", "name", "ms before", "ms now", "change"), rows, limit)
    if found.exit_code == 1:
        kind = found.changes[0][0]
        console.print()
        console.print(labelled([("next", remedy(kind, found.candidate.variant(kind)))]))


def _changes(found: Compared) -> list[tuple[str, str, float, float]]:
    """Return the changes that matter, the largest first."""
    least = SHOWN * max(found.before, found.after)
    some = (one for one in found.changes if abs(one[3] - one[2]) >= least)
    return sorted(some, key=lambda one: -abs(one[3] - one[2]))


def profile_page(found: Profile, compared: Compared | None = None) -> str:
    """Return the text of a page with the conclusion, one step as lanes, and the parts of each class; with ``compared`` of both
    traces, and what changed."""
    slow = found.finding.kind if found.finding else ""
    if compared is not None:
        slow = compared.changes[0][0] if compared.exit_code == 1 else ""
    classes = [(kind, share, found.of(kind)[:20]) for kind, share in found.shares.items()]
    shown = [("before", compared.baseline), ("now", found)] if compared else [("", found)]
    sides = [(name, one.lanes, one.window / max(one.steps, 1) / 1e3) for name, one in shown if one.lanes]
    return page(
        "profile.html.j2", [ours("page.js")], found=found, compared=compared, tone=TONES[(compared or found).exit_code],
        colours=COLOURS, sides=sides, changes=_changes(compared) if compared else [],
        remedy="" if not slow else remedy(slow, found.variant(slow)), classes=classes,
        shown={bar.kind for _, lanes, _ in sides for lane in lanes for bar in lane.bars},
        remarks=[*found.compiled, *found.remarks, *([f"Unreliable: {found.unreliable}."] if found.unreliable else [])],
    )  # fmt: skip


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"
