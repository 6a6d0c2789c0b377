"""What `trueup port` changed and left: on a terminal a sentence and a line for each change, and the guide's tables.

Converted, not proved: 4 changes in 1 of 1 script, for npu.

train.py
   24 - device = 'cuda' if torch.cuda.is_available() else 'cpu'
      + device = 'npu' if torch.npu.is_available() else 'cpu'
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from trueup.doors.report.html import at_the_margin, ours, page
from trueup.doors.report.saving import replaced, save_csv, write_text
from trueup.doors.report.terminal import listing, print_lines, print_more_by_limit
from trueup.foundation.words.wording import counted, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.migration.port import Ported
    from trueup.migration.port.proving import Proof
    from trueup.migration.port.proving_ranks import Spread
    from trueup.migration.port.running import Ran

HEADER = ("File", "Start Line", "End Line", "Operation Type", "Message")
"""The columns that MindStudio's converter gives its list of changes."""


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
