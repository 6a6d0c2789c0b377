"""Two monitored runs on a terminal and as a document.

DEVIATES  first series to leave: gradient_norm of blocks.1.fc1, step 412
          0.158 in the baseline, 0.231 in the candidate, 34 times the step-to-step noise
          its first other bit: step 411; 12 of 193 series over 1,000 steps (0 to 999) leave, 180 differ
          the loss leaves at step 430
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from trueup.analysis.monitor.comparing import LISTED, Compared
from trueup.doors.report.document import fields, headed
from trueup.doors.report.terminal import COLOURS, labelled, listing, print_lines
from trueup.foundation.words.wording import clean, number

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = (">leaves at", ">rank", "series", ">baseline", ">candidate", ">x noise", ">first other bit")


def compared_document(found: Compared) -> dict[str, Any]:
    """Return it as JSON-ready data."""
    return headed("trueup-series", found, "differing series steps") | fields(found, "left notes")


def render_compared(found: Compared, console: Console) -> None:
    """Print it."""
    print_lines(console, clean(found.sentence).splitlines(), 10, COLOURS[found.verdict])
    rows = [
        (
            f"{one.beyond:,}", str(one.rank), clean(one.series), number(one.baseline, 6), number(one.candidate, 6),
            f"{one.times:,.0f}", f"{one.exact:,}",
        )
        for one in found.left
    ]  # fmt: skip
    listing(console, COLUMNS, rows, LISTED)
    for note in found.notes:
        console.print()
        console.print(labelled([("note", Text(clean(note), overflow="fold"))]))
