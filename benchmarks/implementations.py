"""Other implementations: those that are wrong by x must not pass as aligned, those that are right must, from statistics alone.

    class       what                                             precision  level   size    word
    norm        norm: unbiased variance, one layer, baseline ..  float32    aten    7.9e-03 named
    deleted     one product, dropped, candidate                  float32    api     missing aligned

A row of the first table counts where the difference is coherent and at least 1e-5 (float32) or 1e-2 (half types), or a
hundred times that, or where a call is missing. `make bench-locate` prints both; tests/verdict/test_implementations.py holds a
part.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import implementation_deletions as deletions
import implementation_right
import implementation_wrong
import trueup
from implementation_deletions import Choice
from implementation_models import DOUBLE, PRECISIONS, Alteration, Planted, Row, build
from trueup.foundation.model import Finding, Result

LEVELS = {"module": ["module"], "api": ["module", "api"], "aten": None}
COHERENT = 8.0
"""Coherence of a wrong formula: rounding was measured at 0 to 5, wrong formulas from 11 on."""
SMALLEST = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2, "autocast": 1e-2}
"""Size from which on a coherent difference must show: issue 18."""
LARGE = 100.0
"""Times the smallest size from which on a difference must show that is not coherent."""


@dataclass(frozen=True)
class Cell:
    """One comparison.

    ``table`` is wrong, right, below (a difference too small to count) or beyond (of which modules alone tell nothing). ``word`` is
    the verdict in a word: aligned, named (the right place), hinted (could not tell, but its words name the place), unplaced (could
    not tell), elsewhere (blamed another place); of right implementations aligned, inconclusive or blamed.
    """

    table: str
    kind: str
    what: str
    precision: str
    level: str
    size: float
    coherence: float
    word: str
    said: str


@dataclass
class Ran:
    """What a training did beside its capture."""

    losses: list[float] = field(default_factory=list)
    passes: int = 0
    """How often the model was called: where that differs, no module has a counterpart, and what accumulates is in no module."""


@dataclass
class Bench:
    """Where captures are kept: one of a baseline for all rows that have the same."""

    work: Path
    ran: dict[Path, Ran] = field(default_factory=dict)
    """Of each capture that is there."""

    def record(self, row: Row, precision: str, change: object, into: Path) -> Alteration:
        """Train the model of a row under capture."""
        shutil.rmtree(into, ignore_errors=True)
        alteration = Alteration(build(row.base, precision), precision)
        if callable(change):
            change(alteration)
        training, ran, loss = alteration.training, Ran(), alteration.training.loss

        def counted(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            ran.passes += 1
            return loss(model, batch)

        training.loss, self.ran[into] = counted, ran
        with trueup.capture(into, model=training.model, detail="stats", on_error="stop") as capture:
            for _ in range(row.steps):
                ran.losses.append(training.step().item())
                capture.step()
        return alteration

    def baseline(self, row: Row, precision: str) -> Path:
        into = self.work / re.sub(r"\W+", "-", f"{row.base} {precision} {row.against} {row.steps}")
        if not into.exists():
            self.record(row, precision, row.baseline, into)
        return into

    def cells(self, row: Row, precision: str, table: str, levels: Iterable[str] = LEVELS) -> Iterator[Cell]:
        """Compare a row at each level; none of a model that cannot be trained in a precision."""
        baseline, candidate = self.baseline(row, precision), self.work / "candidate"
        if not all(map(math.isfinite, self.ran[baseline].losses)):
            return
        planted = self.record(row, precision, row.candidate, candidate).planted
        large = any(shows(p, precision) for p in planted)
        for level in (level for level in levels if level in row.levels):
            counts = table if table == "right" or large or level in row.missing else "below"
            if level == "module" and self.ran[baseline].passes != self.ran[candidate].passes:
                counts = "beyond"
            result = trueup.compare(baseline, candidate, level=LEVELS[level])
            word = judged(result) if table == "right" else placed(result, row, planted, precision, level)
            expected = [(p.size, p.coherence) for p in truth(planted, precision)] if planted else []
            numbers = max(expected, default=(0.0, 0.0))
            yield Cell(counts, row.kind, row.name, precision, level, *numbers, word, said(result))

    def deleted(self, precision: str, choices: Mapping[str, Choice], levels: Iterable[str] = LEVELS) -> Iterator[Cell]:
        """Compare a capture with itself less some calls, and with itself written again."""
        row = Row("deleted", "", "text", lambda _: None)
        whole, part = self.baseline(row, precision), self.work / "candidate"
        calls = deletions.calls_of(whole)
        for closed in (False, True):
            deletions.without(whole, [], part, closed=closed)
            for level in levels:
                result = trueup.compare(whole, part, level=LEVELS[level])
                what = f"nothing deleted, {'closed' if closed else 'dropped'}"
                yield Cell("right", "written again", what, precision, level, 0.0, 0.0, judged(result), said(result))
        for name, choice in choices.items():
            gone = list(choice(calls))
            if not gone:
                raise LookupError(f"{name}: no such call in the capture of {row.base}")
            for closed, side in ((False, "candidate"), (False, "baseline"), (True, "candidate")):
                deletions.without(whole, gone, part, closed=closed)
                sides = (whole, part) if side == "candidate" else (part, whole)
                for level in levels:
                    if all(call["level"] not in (LEVELS[level] or [call["level"]]) for call in gone):
                        continue
                    result = trueup.compare(*sides, level=LEVELS[level])
                    what = f"{name}, {'closed' if closed else 'dropped'}, {side}"
                    yield Cell("wrong", "deleted", what, precision, level, 0.0, 0.0, lost(result, gone), said(result))


def shows(planted: Planted, precision: str) -> bool:
    """Tell whether a difference must not pass as aligned."""
    return planted.size >= smallest(planted, precision) * (1 if planted.coherence >= COHERENT else LARGE)


def smallest(planted: Planted, precision: str) -> float:
    """Return the size from which on a coherent difference must show; parameters are float32 under autocast."""
    return SMALLEST["float32" if precision == "autocast" and planted.phase == "optimizer" else precision]


def words_of(result: Result) -> str:
    return "\n".join([result.sentence, *result.notes, *(finding.sentence for finding in result.unmatched)])


def said(result: Result) -> str:
    first = result.culprit
    if first is not None:
        return f"{first.name} {first.level} {first.op} {first.kind} {first.error_out:.1e} of {first.expected:.1e}"
    return " | ".join([*result.sentence.splitlines()[:2], *result.notes[:1]])


def judged(result: Result) -> str:
    """Return the word for a comparison of right implementations."""
    return "blamed" if result.culprits else result.verdict


def placed(result: Result, row: Row, planted: Sequence[Planted], precision: str, level: str) -> str:
    """Return the word for a comparison with a wrong implementation."""
    if result.verdict == "aligned":
        return "aligned"
    scopes, expected = {p.scope for p in planted} | set(row.places), truth(planted, precision)
    if result.culprit is not None:
        return "named" if is_right(result.culprit, expected, scopes, level) else "elsewhere"
    if any(p.phase == "optimizer" for p in expected):
        return "hinted" if re.search(r"step \d+ optimizer|, optimizer, step", words_of(result)) else "unplaced"
    near = row.near if level == "module" else ()
    return "hinted" if any(mentions(words_of(result), scope) for scope in {*scopes, *near}) else "unplaced"


def truth(planted: Sequence[Planted], precision: str) -> list[Planted]:
    """Return what the first culprit may be: differences of the first step that has one which must show.

    A gradient may be blamed only where no result is off by as much.
    """
    plain = [p for p in planted if p.size > DOUBLE]
    certain = [p for p in plain if shows(p, precision)] or plain
    now = [p for p in plain if p.step == min(c.step for c in certain)]
    forward = [p for p in now if p.phase == "forward"]
    return forward if any(p in certain for p in forward) else now


def mentions(words: str, scope: str) -> bool:
    return bool(scope) and re.search(rf"(?<![\w.]){re.escape(scope)}(?![\w])", words) is not None


def is_right(first: Finding, expected: Sequence[Planted], scopes: set[str], level: str) -> bool:
    """Tell whether a culprit is at the place of the mistake.

    What an optimizer does wrong to its state is read in the next step; level module sees what it did to weights one step later.
    """
    steps, phases = {p.step for p in expected}, {p.phase for p in expected}
    if not expected:  # a call that one run lacks, and that changed nothing
        return first.scope in scopes
    if "optimizer" in phases:
        later = {step + n for step in steps for n in range(3 if level == "module" else 2)}
        return first.step in later and (first.phase == "optimizer" or level == "module")
    return first.step in steps and first.scope in scopes and (first.phase in phases or "data" in phases)


def lost(result: Result, gone: Sequence[deletions.Call]) -> str:
    """Return the word for a comparison with a capture that lacks calls."""
    if result.verdict == "aligned":
        return "aligned"
    words = words_of(result)
    known = any(mentions(words, call["scope"]) or call["op"] in words for call in gone)
    if result.culprit is None:
        return "hinted" if known else "unplaced"
    return "named" if any((c["step"], c["scope"]) == (result.culprit.step, result.culprit.scope) for c in gone) else "elsewhere"


def table(
    work: Path, precisions: Sequence[str] = PRECISIONS, kinds: Sequence[str] = (), only: str = "", held_out: bool = False,
    levels: Sequence[str] = tuple(LEVELS), tables: Sequence[str] = ("wrong", "right"),
) -> Iterator[Cell]:  # fmt: skip
    """Yield the cells of both tables, precision by precision, and then captures that lack calls."""
    bench = Bench(work)
    both = [("wrong", row) for row in implementation_wrong.rows()] + [("right", row) for row in implementation_right.rows()]
    chosen = [
        (name, row) for name, row in both
        if name in tables and row.held_out == held_out and (not kinds or row.kind in kinds) and re.search(only, row.name)
    ]  # fmt: skip
    for precision in precisions:
        for name, row in chosen:
            if precision in row.precisions:
                yield from bench.cells(row, precision, name, levels)
    if "float32" in precisions and "wrong" in tables and ("deleted" in kinds or not kinds):
        choices = deletions.HELD_OUT if held_out else deletions.DELETIONS
        yield from bench.deleted("float32", {name: choice for name, choice in choices.items() if re.search(only, name)}, levels)


GOOD = {
    "wrong": ("named", "hinted"), "right": ("aligned",), "below": ("aligned", "named", "hinted", "unplaced"),
    "beyond": ("inconclusive", "hinted", "unplaced"),
}  # fmt: skip
BAD = {"wrong": ("aligned",), "right": ("blamed",), "below": ("elsewhere",), "beyond": ("aligned", "blamed", "named", "elsewhere")}
"""What must not happen at all."""


def rates(cells: Iterable[Cell]) -> dict[tuple[str, str, str, str], tuple[int, int, int]]:
    """Return (good, bad, all) by table, precision, level and class."""
    found: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for cell in cells:
        count = found[cell.table, cell.precision, cell.level, cell.kind]
        count[0] += cell.word in GOOD[cell.table]
        count[1] += cell.word in BAD[cell.table]
        count[2] += 1
    return {key: (good, bad, every) for key, (good, bad, every) in found.items()}


TITLES = {
    "wrong": "Another implementation, wrong by x: place named / aligned / all",
    "right": "Another implementation, right: aligned / blamed / all",
    "below": "Wrong by less than must show: blamed elsewhere is bad: good / bad / all",
    "beyond": "Of which modules alone tell nothing: anything but could not tell is bad: good / bad / all",
}


def totals(cells: Sequence[Cell]) -> list[str]:
    lines = []
    for name in TITLES:
        for level in LEVELS:
            words = Counter(cell.word for cell in cells if (cell.table, cell.level) == (name, level))
            if words:
                counted = ", ".join(f"{word} {count}" for word, count in words.most_common())
                lines.append(f"- {name} at {level}: {words.total()} cells: {counted}")
    return lines


def markdown(cells: Sequence[Cell]) -> str:
    """Lay the rates out as a page: a row per class, a column per precision and level; then every cell that is not good."""
    counted = rates(cells)
    columns = [(p, level) for p in PRECISIONS for level in LEVELS if any((c.precision, c.level) == (p, level) for c in cells)]
    lines = [*totals(cells), ""]
    for name, title in TITLES.items():
        kinds = list(dict.fromkeys(cell.kind for cell in cells if cell.table == name))
        if not kinds:
            continue
        lines += [title, "", f"| | {' | '.join(' '.join(c) for c in columns)} |", "| --- |" + " --- |" * len(columns)]
        for kind in kinds:
            numbers = [counted.get((name, *column, kind)) for column in columns]
            lines.append(f"| {kind} | " + " | ".join("" if n is None else " / ".join(map(str, n)) for n in numbers) + " |")
        lines.append("")
    head = ("table", "what", "precision", "level", "size", "coherence", "word", "said")
    lines += ["Not as it should be:", "", f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    for c in cells:
        if c.word not in GOOD[c.table]:
            numbers, text = f"{c.size:.1e} | {c.coherence:.0f}", c.said.replace("|", "/")[:160]
            lines.append(f"| {c.table} | {c.what} | {c.precision} | {c.level} | {numbers} | {c.word} | {text} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", nargs="*", default=list(PRECISIONS))
    parser.add_argument("--tables", nargs="*", default=["wrong", "right"], choices=["wrong", "right"])
    parser.add_argument("--kinds", nargs="*", default=[], help="only these classes; 'deleted' is one")
    parser.add_argument("--only", default="", help="only rows whose name this regular expression finds")
    parser.add_argument("--held-out", action="store_true", help="the rows that nobody looks at before a change is done")
    parser.add_argument("--json", type=Path, help="write every cell there")
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    cells = []
    with tempfile.TemporaryDirectory() as work:
        chosen = options.precisions, options.kinds, options.only, options.held_out
        for cell in table(Path(work), *chosen, tables=options.tables):
            cells.append(cell)
            good = "" if cell.word in GOOD[cell.table] else f" {cell.said}"
            print(f"{cell.table:5} {cell.what:70} {cell.precision:8} {cell.level:6} {cell.size:.1e} {cell.word}{good}", flush=True)
    print("\n".join(totals(cells)))
    print(f"{time.perf_counter() - started:.0f} s")
    if options.markdown:
        options.markdown.write_text(markdown(cells))
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))


if __name__ == "__main__":
    main()
