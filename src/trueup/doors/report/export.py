"""What came of an export, on a terminal: a sentence, then how it was made and checked.

    net.onnx computes what the model does: 3 inputs, batch sizes 2, 1, 3, largest error 1.2e-7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.doors.report.terminal import labelled, print_lines
from trueup.foundation.words.wording import clean, sci

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.export import Exported


def render_exported(found: Exported, console: Console) -> None:
    """Print the conclusion, what was chosen, the error of each run, and what ATC would not take."""
    print_lines(console, [found.sentence], 0, "bold")
    console.print()
    runs = ", ".join(f"batch {run.batch}: {sci(run.error)}" for run in found.runs)
    rows = [("chosen", clean(found.chosen)), ("file", f"opset {found.opset}, {found.nodes:,} nodes"), ("errors", runs)]
    console.print(labelled([*rows, *(("atc", one) for one in found.atc)]))
