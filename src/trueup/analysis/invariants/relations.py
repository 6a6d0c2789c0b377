"""The relations, after TrainCheck (OSDI 2025), as queries over the steps of a capture; the file that holds what was learned; and
how they are learned from healthy runs and checked on another: its capture, or while it goes.

- **changes**: a tensor has other bytes in each step than in the step before; of a weight: the optimizer's step changes it.
- **stays**: a weight has the same bytes in each step: it is frozen.
- **equal**: a tensor has the same bytes on all ranks, in each step.
- **same**: the gradient that an optimizer is given is the one that a backward call made in that step.
- **arguments**: a call has the same arguments in each step, on all ranks.
- **types**: a tensor has the same dtype in each step; **shapes**: and the same shape, whichever that is in another run; **alike**:
  and in each step the same shape on all ranks.
- **calls**: a step makes the same calls of modules and functions, in the same order.

Each query gives examples with an outcome: *changed*, a dtype, the arguments. A relation says which outcome is expected, always or
under a condition (`conditions`). So weights that are frozen until step 3 and a dropout that is off in evaluation are no exceptions.
It is learned where its query has one outcome in all examples of all healthy runs, or where a condition tells the examples with an
outcome from those without. What a checked run does not hold (a call, a second rank) is not judged, and counted.

While a run goes, some steps in a row are recorded by digests, read, and thrown away. A window is three steps: the first is not
whole, for it begins where the model runs, and is left out (of a TensorFlow function it is not there at all); the two others are
judged as the steps of a capture are. A window that the run's end cuts short is not judged. The first window begins one step after
the monitor does, for optimizers make their state in the first. What ranks hold beside each other is judged one window later, when
all of them have written theirs; nothing is waited for.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from trueup.analysis.invariants.conditions import (
    EACH,
    FEATURES,
    FEWEST,
    PARAMETERS,
    SUPPORT,
    Condition,
    Example,
    Key,
    Ranks,
    Step,
    condition,
    features_of,
    read_step,
    read_steps,
)
from trueup.foundation.model import TrueupError, VerdictWord
from trueup.foundation.store import Capture, layout, open_capture
from trueup.foundation.store.durable import write_json
from trueup.foundation.words.wording import counted, shorten

SCHEMA, VERSION = "trueup-invariants", 2
LARGEST = 1 << 26  # bytes of a file of invariants
CHANGED, KEPT = "changes", "stays"
OF_RANKS = ("equal", "alike")  # queries of a tensor beside that of another rank: of either nothing but "it is" is expected
QUERIES = ("bytes", "equal", "same", "arguments", "types", "shapes", "alike", "calls")

_FIRST = {"equal": 0, "alike": 0, "arguments": 2, "calls": 3}  # how early in a step a violation is told; 1: all others
LAST = 4  # whose gradient an optimizer is given, in a step with other calls: a parameter that it leaves out renumbers all after it

WINDOW = 3
FOLDER = "invariants"


@dataclass(frozen=True, slots=True)
class Relation:
    """What comes out of a query, always or under a condition."""

    query: str
    key: Key | None
    expected: Any
    when: Condition | None = None

    @property
    def name(self) -> str:
        """What it is called: as the query, and of bytes whether they change or stay."""
        return str(self.expected) if self.query == "bytes" else self.query

    def holds(self, outcome: Any) -> bool:
        """Tell whether an outcome is the expected one; of a gradient: whether that source is among those with its bytes."""
        return self.expected in outcome if self.query == "same" else bool(outcome == self.expected)

    def broken(self, example: Example) -> str:
        """Say how an example breaks it."""
        if self.query == "same":
            assert self.key is not None
            words = f"{named(self.key)} is not {named(self.expected)}, as in the healthy run: it was changed or not cleared"
        else:
            words = f"{_SAID[self.query](self, example)}; in the healthy run {_HEALTHY.get(self.name) or _was(self, example)}"
        if self.key == PARAMETERS:
            return f"{words}, {self.when or 'for all parameters'}"
        return words if self.when is None else f"{words} {self.when}"


def _was(relation: Relation, example: Example) -> str:
    if relation.query == "arguments":
        return shorten(relation.expected, 80)
    if relation.query == "calls":
        return _call(relation.expected, first_other(relation.expected, example.outcome))
    return f"it is {relation.expected}"


_HEALTHY = {
    "changes": "each step changes it", "stays": "no step changes it", "equal": "it is", "shapes": "it keeps one",
    "alike": "ranks have the same shape",
}  # fmt: skip


@dataclass(frozen=True)
class Invariants:
    """What was learned."""

    relations: tuple[Relation, ...]

    @property
    def count(self) -> int:
        """How many relations."""
        return len(self.relations)

    @cached_property
    def kinds(self) -> Counter[str]:
        """How many of each name."""
        return Counter(one.name for one in self.relations)

    @property
    def conditional(self) -> int:
        """How many hold under a condition."""
        return sum(one.when is not None for one in self.relations)

    @cached_property
    def known(self) -> Mapping[tuple[str, Key | None], list[Relation]]:
        """The relations by what they are about."""
        found: dict[tuple[str, Key | None], list[Relation]] = {}
        for one in self.relations:
            found.setdefault((one.query, one.key), []).append(one)
        return found


# ---------------------------------------------------------------- queries
def examples(ranks: Ranks) -> Iterator[Example]:
    """Yield the outcomes of all queries over the steps of some ranks."""
    for steps in ranks.values():
        for now in steps:
            yield from in_step(now)
        for before, now in pairwise(steps):
            yield from between(before, now)
    for rank, steps in ranks.items():
        for other in neighbours(rank, ranks):
            for one, beside in zip(ranks[other], steps, strict=False):
                yield from beside_another(one, beside)


def neighbours(rank: int, ranks: Sequence[int] | Ranks) -> Iterator[int]:
    """Yield the lower ranks that a rank is compared with: those 1, 2, 4, 8 ... below, which any group of a power of two shares."""
    apart = 1
    while apart <= rank:
        if rank - apart in ranks:
            yield rank - apart
        apart *= 2


def in_step(now: Step) -> Iterator[Example]:
    """Yield what a step tells by itself."""
    for key, value in now.arguments.items():
        yield Example("arguments", key, value, now)
    for key, (dtype, _) in now.tensors.items():
        yield Example("types", key, dtype, now)
    for key, digest in now.digests.items():
        if key[1] == "optimizer" and key[5].startswith("input."):
            yield Example("same", key, tuple(now.sources.get(digest, ())), now)
    if now.whole:
        yield Example("calls", None, now.calls, now)


def between(before: Step, now: Step) -> Iterator[Example]:
    """Yield what a step and the one before it tell."""
    for key, digest in now.digests.items():
        if key in before.digests:
            outcome = KEPT if before.digests[key] == digest else CHANGED
            yield Example("bytes", key, outcome, now, before)
            if _is_parameter(key):
                yield Example("bytes", PARAMETERS, outcome, now, before, of=key)
    for key, (_, shape) in now.tensors.items():
        if key in before.tensors:
            yield Example("shapes", key, KEPT if before.tensors[key][1] == shape else CHANGED, now, before)


def beside_another(one: Step, now: Step) -> Iterator[Example]:
    """Yield what the same step of two ranks tells."""
    for key, (_, shape) in now.tensors.items():
        if key in one.tensors:
            yield Example("alike", key, one.tensors[key][1] == shape, now, other=one)
    for key, digest in now.digests.items():
        if key in one.digests:
            yield Example("equal", key, one.digests[key] == digest, now, other=one)
            if _is_parameter(key):
                yield Example("equal", PARAMETERS, one.digests[key] == digest, now, other=one, of=key)


def _is_parameter(key: Key) -> bool:
    return key[0] == "module" and key[1] == "forward" and key[4] == 0 and key[5].startswith("param.")


def expectable(query: str, key: Key | None, outcome: Any) -> Any:
    """Return what a relation may expect of an outcome that was seen; None where it is no relation."""
    if query == "bytes":
        return outcome if outcome == CHANGED or (key is not None and key[5].startswith("param.")) else None
    if query == "shapes":
        return KEPT if outcome == KEPT else None
    if query == "same":
        return outcome[0] if outcome else None
    return (outcome or None) if query in OF_RANKS else outcome


# ---------------------------------------------------------------- words
def named(key: Key) -> str:
    """Name a tensor or the arguments of a call."""
    _, phase, scope, op, ordinal, slot = key
    nth = f"#{ordinal}" if ordinal else ""
    return f"{slot} of {f'{scope}/' if scope else ''}{op}{nth} ({phase})"


def _bytes(relation: Relation, example: Example) -> str:
    assert relation.key is not None
    assert example.before is not None
    said = "is" if relation.expected == CHANGED else "is not"
    return f"{named(example.of or relation.key)} {said} what it was in step {example.before.number}"


def _shapes(relation: Relation, example: Example) -> str:
    assert relation.key is not None
    assert example.before is not None
    was, now = (list(one.tensors[relation.key][1]) for one in (example.before, example.now))
    return f"{named(relation.key)} has the shape {now}, in step {example.before.number} {was}"


def _alike(relation: Relation, example: Example) -> str:
    assert relation.key is not None
    assert example.other is not None
    there, here = (list(one.tensors[relation.key][1]) for one in (example.other, example.now))
    return f"{named(relation.key)} has the shape {here}, on rank {example.other.rank} {there}"


def _equal(relation: Relation, example: Example) -> str:
    assert relation.key is not None
    assert example.other is not None
    return f"{named(example.of or relation.key)} is not the same on ranks {example.other.rank} and {example.now.rank}"


def _calls(relation: Relation, example: Example) -> str:
    known, held = relation.expected, example.outcome
    place = first_other(known, held)
    return f"call {place + 1} of the step is {_call(held, place)}"


def first_other(known: Sequence[Any], held: Sequence[Any]) -> int:
    """Return the place of the first call that differs."""
    both = zip(known, held, strict=False)
    return next((n for n, (a, b) in enumerate(both) if a != b), min(len(known), len(held)))


def _call(calls: Sequence[Sequence[str]], place: int) -> str:
    if place >= len(calls):
        return "nothing"
    phase, scope, op = calls[place]
    return f"{f'{scope}/' if scope else ''}{op} ({phase})"


def _as(verb: str, relation: Relation, outcome: str) -> str:
    assert relation.key is not None
    return f"{named(relation.key)} {verb} {outcome}"


_SAID: Mapping[str, Any] = {
    "bytes": _bytes, "shapes": _shapes, "alike": _alike, "equal": _equal, "calls": _calls,
    "arguments": lambda relation, example: _as("are", relation, shorten(example.outcome, 80)),
    "types": lambda relation, example: _as("is", relation, example.outcome),
}  # fmt: skip


# ---------------------------------------------------------------- the file
def save(known: Invariants, file: Path) -> Path:
    """Write what was learned as JSON; raises TrueupError if it cannot."""
    held = [
        [one.query, one.key, one.expected, None if one.when is None else [one.when.features, sorted(one.when.values, key=repr)]]
        for one in known.relations
    ]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"schema": SCHEMA, "schema_version": VERSION, "relations": held})
    except OSError as error:
        raise TrueupError(f"{file} cannot be written: {error.strerror}\n  next:     name another file with -o") from None
    return file


def load(file: Path) -> Invariants:
    """Read what `save` wrote; raises TrueupError if it is none."""
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError("it is too large")
        held = json.loads(file.read_text(encoding="utf-8"))
        if held.get("schema") != SCHEMA or held.get("schema_version") != VERSION:
            raise ValueError(f"its schema is not {SCHEMA}, version {VERSION}")
        return Invariants(tuple(_relation(*one) for one in held["relations"]))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise TrueupError(
            f"{file} cannot be read.\n  expected: what `trueup invariants` wrote\n  got:      {why[:200]}\n  next:     learn again"
        ) from None


def _relation(query: str, key: Sequence[Any] | None, expected: Any, when: Sequence[Any] | None) -> Relation:
    if query not in QUERIES:
        raise ValueError(f"{query!r} is no relation")
    if query == "calls":
        expected = tuple((str(a), str(b), str(c)) for a, b, c in expected)
    elif query == "same":
        expected = _key(expected)
    elif query in OF_RANKS:
        expected = bool(expected)
    else:
        expected = str(expected)
    condition = None
    if when is not None:
        features, values = when
        for name in features:
            what, _, which = str(name).partition(":")
            if what not in FEATURES:
                raise ValueError(f"{name!r} is no feature")
            if (what == "period" and int(which) < 1) or (what in ("before", "calls") and which.count("\t") != 2):
                raise ValueError(f"{name!r} is no feature")
        condition = Condition(tuple(map(str, features)), frozenset(tuple(one) for one in values))
    return Relation(query, None if key is None else _key(key), expected, condition)


def _key(held: Sequence[Any]) -> Key:
    level, phase, scope, op, ordinal, slot = held
    return str(level), str(phase), str(scope), str(op), int(ordinal), str(slot)


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
