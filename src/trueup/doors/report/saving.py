"""Writing a report: every file is rendered before the first is written, and each appears whole or not at all.

A CI system reads a verdict as JUnit's XML (a test that passes or fails) and SARIF (findings at lines of code):

    <testsuite name="trueup compare" tests="2" failures="2" errors="0">
      <testcase classname="trueup.compare" name="runs/npu against runs/cpu"><failure message="DEVIATES  first culprit: ...">...
      <testcase classname="trueup.culprit" name="neck.lstm, backward, step 0, rank 0" file="net.py" line="57"><failure ...

What could not be told is an error in JUnit and a result of its own in SARIF: neither is ever green by it.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as parquet

from trueup.doors.report.document import document, dumps
from trueup.doors.report.html import render_page
from trueup.foundation.model import Finding, Result, TrueupError
from trueup.foundation.store.durable import replacing, write_file
from trueup.foundation.version import VERSION
from trueup.foundation.words.wording import clean, one_line, own_frame

if TYPE_CHECKING:
    from xml.etree import ElementTree

    from trueup.analysis.recipes.recipe import RecipeResult

FRAME = re.compile(r"(?P<file>.+):(?P<line>[1-9]\d*) in .*", re.DOTALL)


def save(result: Result, directory: str | Path, recipe: RecipeResult | None = None) -> Path:
    """Write ``verdict.json``, ``calls.parquet`` and ``index.html`` into ``directory``, each atomically, and return its path. It
    is made if need be; an earlier report in it is replaced. The page shows the steps of ``recipe`` first. Raises TrueupError if
    it cannot be made or written."""
    target = Path(directory)
    rows = io.BytesIO()
    parquet.write_table(result.calls, rows, compression="zstd")
    files = {
        "verdict.json": dumps(document(result)).encode("ascii"),
        "calls.parquet": rows.getvalue(),
        "index.html": render_page(result, recipe).encode("utf-8", "backslashreplace"),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_file(target / name, [content])
    except OSError as error:
        expected = f"a directory that can be made and written, for {', '.join(files)}"
        raise _refused(error, "The report", target, expected, "name another directory with -o") from error
    return target


@contextmanager
def replaced(path: Path, expected: str) -> Iterator[Path]:
    """Give a temporary file beside ``path`` that is flushed to the disk and takes its place when the block ends well. Raises
    TrueupError if it cannot be written; ``expected`` says what was to be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise _refused(error, path.name, path.parent, expected, "name another file") from error


def write_text(text: str, path: Path, expected: str) -> Path:
    """Write text as UTF-8, what that cannot hold spelled out; raises TrueupError, with what was ``expected``, if it cannot."""
    with replaced(path, expected) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path


def write_patch(text: str, path: Path) -> Path:
    """Write a patch, whose bytes that are no UTF-8 are those of the file it is for; raises TrueupError if it cannot."""
    with replaced(path, "a file that can be made and written, for the patch") as temporary:
        temporary.write_bytes(text.encode(errors="surrogateescape"))
    return path


def save_json(document: dict[str, Any], file: Path) -> Path:
    """Write a document as strict JSON and return its path; raises TrueupError where the file cannot be written."""
    return write_text(dumps(document), file, f"a file that can be made and written, for {document['schema']} as JSON")


def save_csv(head: Sequence[str], rows: Iterable[Sequence[object]], file: Path, expected: str) -> Path:
    """Write rows below their headings as CSV and return its path; raises TrueupError, with what was ``expected``, if it cannot."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([text_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return write_text(text.getvalue(), file, expected)


@lru_cache(maxsize=1 << 16)  # a table repeats its names
def text_cell(value: str) -> str:
    """Return text as a cell: no control characters, an apostrophe before what a spreadsheet would take for a formula."""
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


def _refused(error: OSError, what: str, target: Path, expected: str, instead: str) -> TrueupError:
    return TrueupError(
        f"{what} could not be written: {error.strerror or error}.\n"
        f"  where:    {error.filename or target}\n"
        f"  expected: {expected}\n"
        f"  got:      {_what(target)}\n"
        f"  next:     {instead}, or make this one writable"
    )


def _what(path: Path) -> str:
    for place in (path, *path.parents):
        if place.is_dir():
            writable = "writable" if os.access(place, os.W_OK) else "not writable"
            return f"{place} is a directory, {writable}"
        if place.exists():
            return f"{place} is a file"
    return f"{path} does not exist"


def write_junit(result: Result, file: Path) -> Path:
    """Write a verdict as a suite of JUnit: the comparison, and each culprit; raises TrueupError where it cannot be written."""
    from xml.etree import ElementTree  # here: few reports are for a CI system

    named = f"{result.candidate.path} against {result.baseline.path}"
    cases = [_case("trueup.compare", named, _kind(result), result.sentence)]
    for finding in result.culprits:
        case = _case("trueup.culprit", finding.name, "failure", finding.sentence)
        if place := _place(finding):
            case.set("file", place[0])
            case.set("line", str(place[1]))
        cases.append(case)
    suite = ElementTree.Element("testsuite", {"name": "trueup compare", "tests": str(len(cases))})
    for kind in ("failure", "error"):
        suite.set(f"{kind}s", str(sum(case.find(kind) is not None for case in cases)))
    suite.extend(cases)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    text = f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'
    return write_text(text, file, "a file that can be made and written, for JUnit's XML")


def _kind(result: Result) -> str:
    return {"aligned": "", "deviates": "failure", "inconclusive": "error"}[result.verdict]


def _case(group: str, name: str, kind: str, text: str) -> ElementTree.Element:
    from xml.etree import ElementTree

    case = ElementTree.Element("testcase", classname=group, name=one_line(name))
    if kind:
        said = ElementTree.SubElement(case, kind, message=one_line(text.partition("\n")[0]), type=group)
        said.text = clean(text)
    return case


def write_sarif(result: Result, file: Path) -> Path:
    """Write culprits as results of SARIF 2.1.0; raises TrueupError where it cannot be written."""
    return write_text(dumps(sarif(result)), file, "a file that can be made and written, for SARIF")


def sarif(result: Result) -> dict[str, Any]:
    """Return the log: a result for each culprit, at the line of the user's code that made the call, where that is known."""
    found = [_result(finding) for finding in result.culprits]
    if not found and result.verdict != "aligned":
        found = [{"ruleId": result.verdict, "level": "warning", "message": {"text": clean(result.sentence)}}]
    driver = {"name": "trueup", "version": VERSION, "rules": _rules(str(one["ruleId"]) for one in found)}
    notes = [{"level": "note", "message": {"text": clean(note)}} for note in result.notes]
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True, "exitCode": result.exit_code, "toolExecutionNotifications": notes}],
        "results": found,
        "properties": {"verdict": result.verdict, "sentence": clean(result.sentence)},
    }
    return {"version": "2.1.0", "runs": [run]}


RULES = {
    "operator": "A call's inputs agree and its outputs do not",
    "argument": "An argument of a call differs",
    "random": "Random numbers differ",
    "input": "Data or weights differ",
    "overwritten": "A tensor was overwritten before it was read",
    "ranks": "Ranks of one run do not hold what they should",
    "unmatched": "A call exists in one run only",
    "region": "Calls without a counterpart compute something else",
    "inconclusive": "The comparison could not tell",
    "deviates": "The runs differ, and no call was named",
}
"""What each kind of a finding says."""


def _rules(names: Iterable[str]) -> list[dict[str, Any]]:
    return [{"id": name, "shortDescription": {"text": RULES.get(name, name)}} for name in dict.fromkeys(names)]


def _result(finding: Finding) -> dict[str, Any]:
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": one_line(finding.name), "kind": "function"}]}
    if place := _place(finding):
        location["physicalLocation"] = {"artifactLocation": {"uri": _uri(place[0])}, "region": {"startLine": place[1]}}
    where = f"{finding.op} in {finding.name}" if finding.scope else finding.name
    text = f"{where}: {finding.cause or finding.sentence.removeprefix(f'{finding.name}: ')}"
    level = "error" if finding.confidence == "high" else "warning"
    return {"ruleId": finding.kind, "level": level, "message": {"text": clean(text)}, "locations": [location]}


def _place(finding: Finding) -> tuple[str, int] | None:
    """Return file and line of the user's own code that made the call, None where no stack was recorded."""
    read = FRAME.fullmatch(own_frame(finding.source or "", finding.stack))
    if read is None:
        return None
    path, here = read["file"].replace("\\", "/"), Path.cwd().as_posix()
    return one_line(path.removeprefix(f"{here}/")), int(read["line"])


def _uri(path: str) -> str:
    from urllib.parse import quote

    return f"file://{quote(path)}" if path.startswith("/") else quote(path)
