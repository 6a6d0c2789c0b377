"""What `trueup port` changed and left: on a terminal a sentence and a line for each change, and the guide's tables. And what
`trueup assess` found: a sentence, and each operator that the device lacks with its line and what to do; a page with all of it; and
tables as MindStudio's analysis names them.

    Converted, not proved: 4 changes in 1 of 1 script, for npu.

    train.py
       24 - device = 'cuda' if torch.cuda.is_available() else 'cpu'
          + device = 'npu' if torch.npu.is_available() else 'cpu'

    Of 36 operators on Ascend A2 (PyTorch 2.13.0), 32 have a kernel, 3 are made of others, 1 goes through the CPU.

    CPU fallback: aten::huber_loss
    where  train.py:20, 1 call
    next   1 PyTorch makes it of others: torch._decomp.get_decompositions([torch.ops.aten.huber_loss])
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from trueup.doors.report.html import at_the_margin, ours, page
from trueup.doors.report.saving import replaced, save_csv, save_json, write_text
from trueup.doors.report.terminal import entry, listing, print_lines, print_more_by_limit
from trueup.foundation.words.wording import counted, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.assess import Assessment, Operator
    from trueup.migration.assess.assessing import Offered
    from trueup.migration.port import Ported
    from trueup.migration.port.proving import Proof, Spread
    from trueup.migration.port.running import Ran

HEADER = ("File", "Start Line", "End Line", "Operation Type", "Message")
"""The columns that MindStudio's converter gives its list of changes."""

QUIET = ("kernel", "composite")
"""Grades of operators that are counted and not listed."""
API_COLUMNS = ("File", "Start Line", "End Line", "OP", "Tips")
"""The columns of MindStudio's analysis (unsupported_api.csv, unknown_api.csv)."""
DYNAMIC = "A device that compiles for shapes compiles for each. Pad the data, or drop the last batch."
READS = "The host waits for the device there. Read seldom: not in each step."
UNITS = ("bytes", "KB", "MB", "GB", "TB")


def render(result: Ported, limit: int, console: Console) -> None:
    """Print the conclusion, up to ``limit`` changes, and what somebody has to look at."""
    print_lines(console, [result.sentence], 0, "bold")
    lines = [(file.path, *one) for file in result.changed for one in file.lines]
    for path in dict.fromkeys(path for path, *_ in lines[:limit]):
        console.print(f"\n{escape(path)}", highlight=False)
        for _, number, before, after in [one for one in lines[:limit] if one[0] == path]:
            for sign, texts, style in (("-", before.splitlines(), "red"), ("+", after.splitlines(), "green")):
                for k, text in enumerate(texts):
                    print_lines(console, [f"{number + k if sign == '-' else '':>5} {sign} {one_line(text)}"], 8, style)
    print_more_by_limit(console, len(lines), limit)
    look = [(f"{seen.path}:{seen.line}", one_line(seen.text), seen.reason) for seen in result.look]
    listing(console, ("look at", "text", "why"), look, limit)
    left = len(result.seen) - len(result.look)
    lines_left = f"note     {counted(left, 'line')} with the letters cuda or nccl reach no device and stay: --json lists them"
    notes = [lines_left] if left else []
    notes += [f"unread   {one}" for one in result.unread]
    notes += [f"effect   {one}" for one in result.effects]
    notes += [f"new      {one}" for one in result.added]
    if result.written is not None and result.changes:
        notes.append(f"undo     trueup port {result.written} --undo")
    console.print()
    for note in notes:
        print_lines(console, [note], 9, "dim")


def render_page(document: dict[str, Any]) -> str:
    """Return a page of what `Ported.document` holds, with the proof of it where there is one."""
    proofs = [document[name] for name in ("proof", "spread") if name in document]
    seen = [one for one in document["seen"] if not one["look"]]
    reasons = Counter(one["reason"] for one in seen)
    codes = [{None: 2, True: 0, False: 1}[one["same"]] if "same" in one else one["exit_code"] for one in proofs]
    tone = "deviates" if 1 in codes else "aligned" if codes and not any(codes) else "inconclusive"
    size = f"{counted(document['scripts'], 'script')}, {counted(document['lines'], 'line')}"
    return page(
        "port.html.j2", [ours("page.js")], found=document, size=size, proofs=[one["sentence"] for one in proofs], tone=tone,
        look=[one for one in document["seen"] if one["look"]], left=seen, reasons=reasons.most_common(),
        at_the_margin=at_the_margin, rules={file["path"]: list(file["changes"]) for file in document["changed"]},
    )  # fmt: skip


def render_proof(proof: Proof | Spread, console: Console) -> None:
    """Print whether the port trains the same."""
    console.print()
    print_lines(console, proof.sentence.splitlines(), 0, "bold")


def render_ran(ran: Ran, limit: int, console: Console) -> None:
    """Print what a redirected run asked of CUDA, a place a line."""
    print_lines(console, [ran.sentence], 0, "bold")
    listing(console, ("place", "asked for", "what was done"), [(one.place, one.name, one.what) for one in ran.places], limit)


def render_undone(count: int, kept: tuple[str, ...], console: Console) -> None:
    """Print how many changes were taken back, and which were not."""
    print_lines(console, [f"{counted(count, 'change')} taken back" + (f", {len(kept)} not:" if kept else ".")], 0, "bold")
    print_lines(console, [f"  {one}" for one in kept], 2)


def save_tables(result: Ported, folder: Path) -> list[Path]:
    """Write what MindStudio's converter writes, under its names, and return their paths: ``change_list.csv``,
    ``unsupported_api.csv``, ``msFmkTranspltlog.txt``; and ``unsupported_op.xlsx`` where xlsxwriter is installed."""
    changes = []
    for file in result.changed:
        for one in file.changes:
            kind, message = "MODIFY" if one.before else "INSERT", f"{one.rule}: {one.before!r} -> {one.after!r}"
            changes.append((file.path, one.line, one.line + one.before.count("\n"), kind, message))
    unsupported = [(one.path, one.line, one.line, one.text, one.reason) for one in result.look]
    log = [result.sentence, *(f"{file}:{line} [{kind}] {message}" for file, line, _, kind, message in changes)]
    log += [f"{file}:{line} [UNSUPPORTED] {text}: {reason}" for file, line, _, text, reason in unsupported]
    header = (*HEADER[:3], "OP", "Tips")
    written = [
        save_csv(HEADER, changes, folder / "change_list.csv", "a table of changes"),
        save_csv(header, unsupported, folder / "unsupported_api.csv", "a table of changes"),
        write_text("\n".join(map(one_line, log)) + "\n", folder / "msFmkTranspltlog.txt", "a log of changes"),
    ]
    return [*written, *_workbook(folder / "unsupported_op.xlsx", header, unsupported)]


def _workbook(path: Path, header: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> list[Path]:
    if importlib.util.find_spec("xlsxwriter") is None:
        return []
    import xlsxwriter

    with replaced(path, "a workbook") as temporary, xlsxwriter.Workbook(str(temporary), {"strings_to_formulas": False}) as book:
        sheet = book.add_worksheet("unsupported")
        for number, row in enumerate((header, *rows)):
            sheet.write_row(number, 0, row)
    return [path]


def render_assessment(found: Assessment, limit: int, console: Console) -> None:
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
    from trueup.migration.assess.assessing import percent  # here: a port is shown without it

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


def assessment_page(found: Assessment) -> str:
    """Return the text of index.html."""
    from trueup.migration.assess.assessing import percent  # here: a port is shown without it

    tone = {0: "aligned", 1: "deviates", 2: "inconclusive"}[found.exit_code]
    return page(
        "assess.html.j2", [ours("page.js")], found=found, tone=tone, quiet=QUIET, percent=percent, size=size,
        at_the_margin=at_the_margin, dynamic_advice=DYNAMIC, reads_advice=READS, linked=[one for one in found.packages if one.cuda],
    )  # fmt: skip


def save_assessment(found: Assessment, directory: Path) -> Path:
    """Write a page, assess.json, operators.csv, unsupported_api.csv and unknown_api.csv; raises TrueupError if it cannot."""
    expected = "a directory that can be made and written, for the report"
    write_text(assessment_page(found), directory / "index.html", expected)
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
