"""Learning relations from healthy runs, and checking another for them: its capture, or while it goes.

A relation is learned where its query has one outcome in all examples of all healthy runs, or where a condition tells the examples
with an outcome from those without. What a checked run does not hold (a call, a second rank) is not judged, and counted.

While a run goes, some steps in a row are recorded by digests, read, and thrown away. A window is three steps: the first is not
whole, for it begins where the model runs, and is left out (of a TensorFlow function it is not there at all); the two others are
judged as the steps of a capture are. A window that the run's end cuts short is not judged. The first window begins one step after
the monitor does, for optimizers make their state in the first. What ranks hold beside each other is judged one window later, when
all of them have written theirs; nothing is waited for.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trueup.analysis.invariants.conditions import (
    EACH,
    FEWEST,
    PARAMETERS,
    SUPPORT,
    Example,
    Key,
    Ranks,
    Step,
    condition,
    features_of,
    read_step,
    read_steps,
)
from trueup.analysis.invariants.relations import (
    OF_RANKS,
    Invariants,
    Relation,
    beside_another,
    examples,
    expectable,
    first_other,
    neighbours,
)
from trueup.foundation.model import TrueupError, VerdictWord
from trueup.foundation.store import Capture, layout, open_capture
from trueup.foundation.words.wording import counted

_FIRST = {"equal": 0, "alike": 0, "arguments": 2, "calls": 3}  # how early in a step a violation is told; 1: all others
LAST = 4  # whose gradient an optimizer is given, in a step with other calls: a parameter that it leaves out renumbers all after it

WINDOW = 3
FOLDER = "invariants"


@dataclass(frozen=True, slots=True)
class Violation:
    """A relation that does not hold."""

    relation: str
    step: int
    rank: int
    scope: str
    op: str
    slot: str
    said: str


@dataclass(frozen=True)
class Checked:
    """What `check` returns."""

    verdict: VerdictWord
    sentence: str
    violations: tuple[Violation, ...]  # the earliest first
    judged: int  # relations that the run could hold or break
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 all hold, 1 one does not, 2 could not tell."""
        return {"aligned": 0, "deviates": 1, "inconclusive": 2}[self.verdict]


def learn(paths: Iterable[str | Path | Capture]) -> Invariants:
    """Learn from captures of healthy runs. Raises TrueupError where one has under three steps, or nothing holds."""
    return learned(read_steps(open_capture(path), FEWEST - 1) for path in paths)


def learned(runs: Iterable[Ranks]) -> Invariants:
    """Learn from the steps of healthy runs; raises TrueupError where nothing holds."""
    grouped: dict[tuple[str, Key | None], list[Example]] = {}
    steps = []
    for ranks in runs:
        steps += [step for one in ranks.values() for step in one]
        for example in examples(ranks):
            grouped.setdefault((example.relation, example.key), []).append(example)
    common = features_of(steps)
    found = [one for (query, key), held in grouped.items() for one in _learned(query, key, held, common)]
    if not found:
        raise TrueupError(
            "Nothing was learned.\n  expected: relations that hold in each step of the runs\n  got:      none\n"
            "  next:     record more than three steps of one training at detail stats"
        )
    return Invariants(tuple(found))


def _learned(query: str, key: Key | None, held: Sequence[Example], common: Sequence[str]) -> list[Relation]:
    """Return the relation that all examples hold, or those that some hold under a condition; one parameter is no class of them."""
    if key == PARAMETERS and len({one.of for one in held}) < EACH:
        return []
    groups: dict[object, list[Example]] = {}
    for example in held:
        groups.setdefault(expectable(query, key, example.outcome), []).append(example)
    if len(groups) == 1:
        (expected,) = groups
        enough = len(held) >= EACH or query in OF_RANKS
        return [Relation(query, key, expected)] if expected is not None and enough else []
    found = []
    for expected, some in groups.items():
        if expected is not None and len(some) >= SUPPORT:
            others = [one for other, ones in groups.items() if other != expected for one in ones]
            when = condition(some, others, common)
            if when is not None:
                found.append(Relation(query, key, expected, when))
    return found


def check(known: Invariants, path: str | Path | Capture) -> Checked:
    """Check a capture. Raises TrueupError where it has under two steps."""
    capture = open_capture(path)
    violations, judged = broken(known, read_steps(capture, 2))
    notes = [*capture.problems]
    if lost := known.count - judged:
        gone = counted(lost, "relation")
        notes.append(f"{gone} of the healthy run could not be looked at: the calls, a second rank, or the condition are not here")
    unsure = not judged or bool(capture.lost)
    verdict: VerdictWord = "deviates" if violations else "inconclusive" if unsure else "aligned"
    return Checked(verdict, _sentence(verdict, violations, judged), violations, judged, tuple(notes))


def broken(known: Invariants, ranks: Ranks | Iterable[Example]) -> tuple[tuple[Violation, ...], int]:
    """Return the violations of some ranks' steps, or of examples, the earliest first; and how many relations they were about."""
    found: list[tuple[str, int, Violation]] = []
    seen: set[int] = set()
    for example in examples(ranks) if isinstance(ranks, dict) else ranks:
        for relation in known.known.get((example.relation, example.key), ()):
            if relation.when is not None and not relation.when.holds(example):
                continue
            seen.add(id(relation))
            if example.of is not None and (example.relation, example.of) in known.known:
                continue  # it has a relation of its own
            if not relation.holds(example.outcome):
                key = example.of or example.key
                place = 0 if key is None else example.now.order.get(key, 0)
                found.append((relation.query, place, _violation(relation, example)))
    otherwise = {(one.step, one.rank) for query, _, one in found if query == "calls"}

    def when(held: tuple[str, int, Violation]) -> tuple[int, int, int]:
        query, place, one = held
        first = LAST if query == "same" and (one.step, one.rank) in otherwise else _FIRST.get(query, 1)
        return one.step, first, place

    return tuple(one[-1] for one in sorted(found, key=when)), len(seen)


def _violation(relation: Relation, example: Example) -> Violation:
    now, key = example.now, example.of or example.key
    if key is None:
        place = first_other(relation.expected, example.outcome)
        _, scope, op = next((held[place] for held in (example.outcome, relation.expected) if place < len(held)), ("", "", ""))
        slot = ""
    else:
        scope, op, slot = key[2], key[3], key[5]
    said = f"step {now.number}, rank {now.rank}: {relation.broken(example)}"
    return Violation(relation.name, now.number, now.rank, scope, op, slot, said)


def _sentence(verdict: VerdictWord, violations: Sequence[Violation], judged: int) -> str:
    if violations:
        return f"BROKEN  {violations[0].said}\n        {counted(len(violations), 'violation')} of {counted(judged, 'relation')}"
    if verdict == "aligned":
        return f"HOLDS  {counted(judged, 'relation')} of the healthy run hold in each step"
    return "COULD NOT TELL  no relation of the healthy run is about what this one holds, or records are lost"


class Live:
    """The windows of one rank; each relation of each place is told once."""

    def __init__(self, known: Invariants, directory: Path, rank: int, every: int) -> None:
        self._known, self._directory, self._rank, self._every = known, directory / FOLDER, rank, every
        self._next: int | None = None
        self._steps: list[tuple[int, list[Step]]] = []  # of the last window: its first step, and what was held
        self._told: set[tuple[str, str, str, str]] = set()
        self.levels = tuple(dict.fromkeys(one.key[0] for one in known.relations if one.key is not None)) or ("module", "api")
        shutil.rmtree(self._own(), ignore_errors=True)  # of a run that was killed

    def due(self, step: int) -> bool:
        """Tell whether a window begins with a step."""
        if self._next is None:
            self._next = step + 1
        return step >= self._next

    def folder(self, step: int) -> Path:
        """Return where a window that begins with a step is recorded."""
        self._next = step + max(self._every, WINDOW + 1)
        return self._own() / f"step-{step:06d}"

    def _own(self, rank: int | None = None) -> Path:
        return self._directory / layout.rank_name(self._rank if rank is None else rank)

    def judge(self, first: int) -> list[Violation]:
        """Judge the window that began with a step; what was told before is not told again. Raises TrueupError or OSError where
        nothing can be read."""
        now = self._read(self._rank, first)
        found = list(broken(self._known, {self._rank: now})[0])
        if self._steps:
            before, steps = self._steps[-1]
            for rank in neighbours(self._rank, range(self._rank)):
                try:
                    others = self._read(rank, before)
                except (TrueupError, OSError):  # it is late, or no such rank is checked
                    continue
                for one, step in zip(others, steps, strict=False):
                    found += broken(self._known, list(beside_another(one, step)))[0]
        self._steps.append((first, now))
        if len(self._steps) > 2:
            gone, _ = self._steps.pop(0)
            shutil.rmtree(self._own() / f"step-{gone:06d}", ignore_errors=True)
        new = [one for one in found if (one.relation, one.scope, one.op, one.slot) not in self._told]
        self._told |= {(one.relation, one.scope, one.op, one.slot) for one in new}
        return new

    def _read(self, rank: int, first: int) -> list[Step]:
        capture = open_capture(self._own(rank) / f"step-{first:06d}")
        some = len(capture.steps) < WINDOW  # the function that ran as the window began was not recorded, only what followed it
        there = capture.steps[not some : WINDOW]
        shift = first + WINDOW - 1 - max(there, default=0)
        steps = [one for number in there if (one := read_step(capture, rank, number, shift)) is not None]
        return [replace(one, whole=False) if some and one is steps[0] else one for one in steps]

    def close(self) -> None:
        """Remove what is left."""
        shutil.rmtree(self._own(), ignore_errors=True)
        try:
            self._directory.rmdir()
        except OSError:  # another rank's
            return
