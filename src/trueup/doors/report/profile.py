"""Where a step's time goes, on a terminal: a sentence, the classes with their shares, and what to do about the first.

    62% of a step is host: the step waits for its data; most in enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__.

    class  share  most in                     calls  line
    host     62%  enumerate(DataLoader)#_...      5  train.py:31
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.doors.report.terminal import labelled, listing, print_lines
from trueup.foundation.words.wording import clean, shorten
from trueup.migration.profile.classes import remedy, sign

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.profile.judging import Compared, Profile

SHOWN = 0.005  # share of a step from which a part is listed
LISTED = 3  # parts listed of each class


def render_profile(found: Profile, limit: int, console: Console) -> None:
    """Print the conclusion, the parts of each class up to ``limit``, and sign and remedy of what slows the steps down."""
    print_lines(console, [found.sentence], 0, "bold")
    rows = []
    for kind, share in found.shares.items():
        for place, part in enumerate(one for one in found.of(kind)[:LISTED] if found.share(one) >= SHOWN):
            rows.append((
                *((kind, f"{share:.1%}") if not place else ("", "")), shorten(clean(part.name), 60), f"{found.share(part):.1%}",
                f"{part.calls:,}", ", ".join(map(clean, part.lines)),
            ))  # fmt: skip
    listing(console, ("class", "share", "most in", "share", "calls", "lines"), rows, limit)
    slow = found.finding
    if slow is not None:
        console.print()
        variant = found.variant(slow.kind)
        console.print(labelled([("sign", sign(slow.kind, variant)), ("next", remedy(slow.kind, variant))]))
    remarks = [*found.remarks, *([f"Unreliable: {found.unreliable}."] if found.unreliable and not found.doubtful else [])]
    if remarks:
        console.print()
        print_lines(console, remarks, 0, "dim")


def render_compared(found: Compared, limit: int, console: Console) -> None:
    """Print how much slower a step is, and up to ``limit`` changes that matter."""
    print_lines(console, [found.sentence], 0, "bold")
    least = SHOWN * max(found.before, found.after)
    rows = [
        (kind, shorten(clean(name), 60), f"{before / 1e3:,.3f}", f"{after / 1e3:,.3f}", f"{(after - before) / 1e3:+,.3f}")
        for kind, name, before, after in sorted(found.changes, key=lambda one: -abs(one[3] - one[2]))
        if abs(after - before) >= least
    ]
    listing(console, ("class", "name", "ms before", "ms now", "change"), rows, limit)
