"""What came of an export, on a terminal: a sentence, then how it was made and checked.

    net.onnx computes what the model does, node by node: 3 inputs, batch sizes 2, 1, 3, largest error 1.2e-7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.doors.report.terminal import labelled, print_lines
from trueup.foundation.words.wording import clean, counted, sci

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.export import Exported

LISTED = 5  # nodes that differ


def render_exported(found: Exported, console: Console) -> None:
    """Print the conclusion, what was chosen, the error of each run, and what ATC would not take."""
    print_lines(console, [found.sentence], 0, "bold")
    console.print()
    runs = ", ".join(f"batch {run.batch}: {sci(run.error)}" for run in found.runs)
    rows = [("chosen", clean(found.chosen)), ("file", f"opset {found.opset}, {found.nodes:,} nodes"), ("errors", runs)]
    rows.append(("judged", _judged(found)))
    rows += [("differs", f"{node.name}, {node.op}: {node.why or '; '.join(node.settings)}") for node in found.differ[:LISTED]]
    console.print(labelled([*rows, *(("atc", one) for one in found.atc)]))


def _judged(found: Exported) -> str:
    if found.coarse or found.unjudged:
        return found.unjudged or "the outputs alone: the nodes bear no names that torch.onnx gives with dynamo"
    return f"{counted(found.judged, 'value')}, each made of the framework's values before it, by the rounding of its operators"
