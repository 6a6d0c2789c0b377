"""What `trueup assess` found: on a terminal a sentence, and each operator that the device lacks with its line and what to do; a
page with all of it; and tables as MindStudio's analysis names them.

    Of 36 operators on Ascend A2 (PyTorch 2.13.0), 32 have a kernel, 3 are made of others, 1 goes through the CPU.

    CPU fallback: aten::huber_loss
    where  train.py:20, 1 call
    next   1 PyTorch makes it of others: torch._decomp.get_decompositions([torch.ops.aten.huber_loss])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trueup.doors.report.html import at_the_margin, ours, page
from trueup.doors.report.saving import save_csv, save_json, write_text
from trueup.doors.report.terminal import entry, listing, print_lines, print_more_by_limit
from trueup.foundation.words.wording import counted
from trueup.migration.assess.assessing import percent

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.assess import Assessment, Operator
    from trueup.migration.assess.assessing import Offered

QUIET = ("kernel", "composite")
"""Grades of operators that are counted and not listed."""
API_COLUMNS = ("File", "Start Line", "End Line", "OP", "Tips")
"""The columns of MindStudio's analysis (unsupported_api.csv, unknown_api.csv)."""
DYNAMIC = "A device that compiles for shapes compiles for each. Pad the data, or drop the last batch."
READS = "The host waits for the device there. Read seldom: not in each step."
UNITS = ("bytes", "KB", "MB", "GB", "TB")


def render(found: Assessment, limit: int, console: Console) -> None:
    """Print the conclusion, up to ``limit`` rows of each kind that need a hand, and where the facts are from."""
    print_lines(console, [found.sentence], 0, "bold")
    listed = [one for one in found.operators if one.grade not in QUIET]
    for one in listed[:limit]:
        entry(console, f"{one.grade}: {one.name}", _rows(one))
    print_more_by_limit(console, len(listed), limit)
    for held in found.limits[:limit]:
        where = [("where", places(held.places))] if held.places else []
        entry(console, f"limit: {held.says}", [*where, ("next", held.remedy), ("source", held.source)])
    print_more_by_limit(console, len(found.limits), limit)
    _kernels(found, limit, console)
    _rewrites(found.rewrites, limit, console)
    if found.dynamic:
        listing(console, ("shapes that change", "how"), found.dynamic, limit)
        print_lines(console, [DYNAMIC], 0)
    if found.reads:
        listing(console, ("reads a number", "times in a step"), [(place, f"{often:.3g}") for place, often in found.reads], limit)
        print_lines(console, [READS], 0)
    console.print()
    if found.memory:
        print_lines(console, [f"memory   tensors hold {size(found.memory)} at most, kernels' own buffers aside"], 9, "dim")
    for source in found.sources:
        print_lines(console, [f"table    {source.repository}, commit {source.commit[:12]}{source.commit[40:]}"], 9, "dim")


def _rewrites(found: Sequence[Offered], limit: int, console: Console) -> None:
    for made in found[:limit]:
        rows = [("where", made.place), ("with", made.after.strip()), ("why", made.why), ("proof", made.proof)]
        entry(console, f"rewrite: {made.title}", rows)
    print_more_by_limit(console, len(found), limit)


def _rows(one: Operator) -> list[tuple[str, str]]:
    """Return what is said of an operator that needs a hand."""
    share = f", {percent(one.share)} of the FLOPs" if one.share else ", no formula for its FLOPs"
    rows = [("where", f"{places(one.places)}, {counted(one.calls, 'call')}{share}")] if one.places else []
    numbered = one.remedies if len(one.remedies) < 2 else [f"{at}. {text}" for at, text in enumerate(one.remedies, 1)]
    return [*rows, ("why", one.why), *[("next" if not at else "", text) for at, text in enumerate(numbered)]]


def _kernels(found: Assessment, limit: int, console: Console) -> None:
    """Print what is written in CUDA: in packages, and beside the script."""
    linked = [(one.name, ", ".join(one.cuda[:3]) + (" ..." if len(one.cuda) > 3 else "")) for one in found.packages if one.cuda]
    own = [(one.place, ", ".join(one.kernels) or "builds kernels") for one in found.extensions]
    if linked:
        listing(console, ("package with CUDA", "modules that link it"), linked, limit)
        print_lines(console, ["Look for the package's build for the device, or replace what the training uses of it."], 0)
    if own:
        listing(console, ("kernels in CUDA", "names"), own, limit)
        print_lines(console, ["Write each with PyTorch's functions, or develop an operator for the device."], 0)


def places(listed: Sequence[str]) -> str:
    """Return the first line, and how many more there are."""
    more = f" and {counted(len(listed) - 1, 'other line')}" if len(listed) > 1 else ""
    return f"{listed[0]}{more}" if listed else ""


def size(number: int) -> str:
    """Write bytes in a unit that people read."""
    value, unit = float(number), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {UNITS[unit]}"


# ---------------------------------------------------------------- files
def render_page(found: Assessment) -> str:
    """Return the text of index.html."""
    tone = {0: "aligned", 1: "deviates", 2: "inconclusive"}[found.exit_code]
    return page(
        "assess.html.j2", [ours("page.js")], found=found, tone=tone, quiet=QUIET, percent=percent, size=size,
        at_the_margin=at_the_margin, dynamic_advice=DYNAMIC, reads_advice=READS, linked=[one for one in found.packages if one.cuda],
    )  # fmt: skip


def save(found: Assessment, directory: Path) -> Path:
    """Write a page, assess.json, operators.csv, unsupported_api.csv and unknown_api.csv; raises TrueupError if it cannot."""
    expected = "a directory that can be made and written, for the report"
    write_text(render_page(found), directory / "index.html", expected)
    save_json(found.document(), directory / "assess.json")
    lacking = [one for one in found.operators if one.grade in ("unsupported", "CPU fallback", "dtype-limited")]
    unknown = [one for one in found.operators if one.grade == "unknown"]
    tables: dict[str, tuple[Sequence[str], Sequence[Sequence[object]]]] = {
        "operators.csv": (("Operator", "Grade", "Calls", "FLOPs", "Share", "Dtypes", "Places"), [
            (one.name, one.grade, one.calls, one.flops, f"{one.share:.6g}", " ".join(one.dtypes), " ".join(one.places))
            for one in found.operators
        ]),
        "unsupported_api.csv": (API_COLUMNS, [row for one in lacking for row in _api_rows(one)]),
        "unknown_api.csv": (API_COLUMNS, [row for one in unknown for row in _api_rows(one)]),
    }  # fmt: skip
    for name, (head, rows) in tables.items():
        save_csv(head, rows, directory / name, expected)
    return directory


def _api_rows(one: Operator) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for place in one.places:
        file, _, line = place.rpartition(":")
        file, line = (file, line) if line.isdecimal() else (place, "")
        found.append((file, line, line, one.name, "; ".join([one.why, *one.remedies])))
    return found


