"""The relations, after TrainCheck (OSDI 2025), as queries over the steps of a capture; and the file that holds what was learned.

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
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from trueup.analysis.invariants.conditions import FEATURES, PARAMETERS, Condition, Example, Key, Ranks, Step
from trueup.foundation.model import TrueupError
from trueup.foundation.store.durable import write_json
from trueup.foundation.words.wording import shorten

SCHEMA, VERSION = "trueup-invariants", 2
LARGEST = 1 << 26  # bytes of a file of invariants
CHANGED, KEPT = "changes", "stays"
OF_RANKS = ("equal", "alike")  # queries of a tensor beside that of another rank: of either nothing but "it is" is expected
QUERIES = ("bytes", "equal", "same", "arguments", "types", "shapes", "alike", "calls")


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
