"""Relations over the rows of a capture, after TrainCheck (OSDI 2025): learned where they hold in every step of every healthy run.

- **changes**: a tensor has other bytes in each step than in the step before; of a weight: the optimizer's step changes it.
- **stays**: a weight has the same bytes in each step: it is frozen.
- **equal**: a tensor has the same bytes on all ranks, in each step.
- **same**: the gradient that an optimizer is given is the one that a backward call made in that step.
- **arguments**: a call has the same arguments in each step, on all ranks.
- **types**: a tensor has the same dtype in each step; **shapes**: and the same shape, whichever that is in another run.
- **calls**: a step makes the same calls of modules and functions, in the same order.

The first step is left out of learning and checking where there are four or more: optimizers make their state in it. What a run
does not hold (a call, a second rank) is not judged, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError, VerdictWord
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.declared import require_records
from trueup.foundation.store.durable import write_json
from trueup.foundation.words.wording import counted, shorten

Key = tuple[str, str, str, str, int, str]  # level, phase, scope, op, ordinal, slot
Called = tuple[str, str, str]  # phase, scope, op
LEVELS = ("module", "api")
SCHEMA = "trueup-invariants"
LARGEST = 1 << 26  # bytes of a file of invariants
FEWEST = 3  # steps that a relation is learned from
LISTED = 20  # violations that are told
ARGUMENTS = "arguments"


@dataclass(frozen=True)
class Invariants:
    """What was learned."""

    changes: frozenset[Key]
    equal: frozenset[Key]
    arguments: Mapping[Key, str] = field(repr=False)
    calls: tuple[Called, ...] | None = field(repr=False)  # None: they were not the same in each step
    stays: frozenset[Key] = frozenset()
    types: Mapping[Key, str] = field(default_factory=dict, repr=False)
    shapes: frozenset[Key] = frozenset()
    same: Mapping[Key, Key] = field(default_factory=dict, repr=False)  # of an optimizer's gradient the slot that made it

    @property
    def count(self) -> int:
        """How many relations."""
        sets = (self.changes, self.stays, self.equal, self.arguments, self.types, self.shapes, self.same)
        return sum(map(len, sets)) + (self.calls is not None)


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


@dataclass(slots=True)
class _Step:
    digests: dict[Key, str]  # in order of execution
    arguments: dict[Key, str]
    calls: tuple[Called, ...]
    tensors: dict[Key, tuple[str, tuple[int, ...]]]  # dtype and shape


def learn(paths: Iterable[str | Path | Capture]) -> Invariants:
    """Learn from captures of healthy runs. Raises TrueupError where one has under three steps, or nothing holds."""
    found: Invariants | None = None
    for path in paths:
        held = _of_run(open_capture(path))
        found = held if found is None else Invariants(
            found.changes & held.changes, found.equal & held.equal,
            {key: value for key, value in found.arguments.items() if held.arguments.get(key) == value},
            found.calls if found.calls == held.calls else None, found.stays & held.stays,
            {key: value for key, value in found.types.items() if held.types.get(key) == value}, found.shapes & held.shapes,
            {key: made for key, made in found.same.items() if held.same.get(key) == made},
        )  # fmt: skip
    if found is None or not found.count:
        raise TrueupError(
            "Nothing was learned.\n  expected: relations that hold in each step of the runs\n  got:      none\n"
            "  next:     record more than three steps of one training at detail stats"
        )
    return found


def _steps(capture: Capture, fewest: int) -> dict[int, list[tuple[int, _Step]]]:
    require_records(capture)
    found: dict[int, list[tuple[int, _Step]]] = {}
    columns = ["seq", "phase", "level", "scope", "op", "ordinal", "slot", "digest", "value", "dtype", "shape"]
    wanted = capture.steps[1:] if len(capture.steps) > FEWEST else capture.steps
    for rank in sorted(capture.ranks):
        for step in wanted:
            rows = capture.records(columns, rank=rank, step=step, level=LEVELS).to_pydict()
            if rows["seq"]:
                found.setdefault(rank, []).append((step, _step(rows)))
    if min((len(steps) for steps in found.values()), default=0) < fewest:
        raise TrueupError(
            f"The capture has too few steps.\n  where:    {capture.path}\n"
            f"  expected: at least {fewest} steps of levels module and api\n"
            f"  got:      {counted(min((len(steps) for steps in found.values()), default=0), 'step')}\n"
            "  next:     record them: trueup capture --steps 0:5 --level module --level api"
        )
    return found


def _step(rows: Mapping[str, Sequence[Any]]) -> _Step:
    digests: dict[Key, str] = {}
    arguments: dict[Key, str] = {}
    calls: dict[int, Called] = {}
    tensors: dict[Key, tuple[str, tuple[int, ...]]] = {}
    columns = ("seq", "digest", "value", "dtype", "shape", "level", "phase", "scope", "op", "ordinal", "slot")
    for seq, digest, value, dtype, shape, *key in zip(*(rows[name] for name in columns), strict=True):
        level, phase, scope, op, _, slot = key
        known: Key = tuple(key)
        calls.setdefault(seq, (f"{level} {phase}", scope, op))
        if slot == ARGUMENTS and value is not None:
            arguments[known] = value
        elif digest is not None:
            digests[known] = digest
        if dtype is not None and shape is not None:
            tensors[known] = dtype, tuple(shape)
    return _Step(digests, arguments, tuple(calls[seq] for seq in sorted(calls)), tensors)


def _of_run(capture: Capture) -> Invariants:
    ranks = _steps(capture, FEWEST - 1)
    every = [step for steps in ranks.values() for _, step in steps]
    common = set.intersection(*(set(step.digests) for step in every))
    pairs = [(a, b) for steps in ranks.values() for (_, a), (_, b) in pairwise(steps)]
    changes = {key for key in common if all(a.digests[key] != b.digests[key] for a, b in pairs)}
    stays = {key for key in common if key[5].startswith("param.") and all(a.digests[key] == b.digests[key] for a, b in pairs)}
    equal: set[Key] = set()
    if len(ranks) > 1:
        beside = list(zip(*([step for _, step in steps] for steps in ranks.values()), strict=False))
        equal = {key for key in common if all(len({step.digests[key] for step in group}) == 1 for group in beside)}
    first = every[0]
    arguments = {key: value for key, value in first.arguments.items() if all(step.arguments.get(key) == value for step in every)}
    calls = first.calls if all(step.calls == first.calls for step in every) else None
    there = set.intersection(*(set(step.tensors) for step in every))
    types = {key: first.tensors[key][0] for key in there if len({step.tensors[key][0] for step in every}) == 1}
    shapes = {key for key in there if all(a.tensors[key][1] == b.tensors[key][1] for a, b in pairs)}
    made = [_made(step) for step in every]
    same = {key: source for key, source in made[0].items() if all(one.get(key) == source for one in made)}
    return Invariants(frozenset(changes), frozenset(equal), arguments, calls, frozenset(stays), types, frozenset(shapes), same)


def _made(step: _Step) -> dict[Key, Key]:
    """Return by the tensors that optimizers are given in a step the first gradient of a backward call that has those bytes."""
    sources: dict[str, Key] = {}
    for key, digest in step.digests.items():
        if key[1] == "backward" and key[5].startswith("grad_input"):
            sources.setdefault(digest, key)
    given = (key for key in step.digests if key[1] == "optimizer" and key[5].startswith("input."))
    return {key: sources[step.digests[key]] for key in given if step.digests[key] in sources}


def check(known: Invariants, path: str | Path | Capture) -> Checked:
    """Check a capture. Raises TrueupError where it has under two steps."""
    capture = open_capture(path)
    ranks = _steps(capture, 2)
    found: list[tuple[int, int, int, Violation]] = []
    seen: set[tuple[str, Key]] = set()
    for rank, steps in ranks.items():
        for place, (step, held) in enumerate(steps):
            order = {key: n for n, key in enumerate((*held.digests, *held.arguments))}
            before = steps[place - 1] if place else None
            for place_of, key, relation, words in _one_step(known, before, held, seen):
                found.append((step, place_of, order.get(key, 0), _violation(relation, step, rank, key, words)))
            for key in held.arguments.keys() & known.arguments.keys():
                seen.add(("arguments", key))
                if held.arguments[key] != known.arguments[key]:
                    was, now = (shorten(one, 80) for one in (known.arguments[key], held.arguments[key]))
                    words = f"{_named(key)} are {now}; in the healthy run {was}"
                    found.append((step, 2, order[key], _violation("arguments", step, rank, key, words)))
            if known.calls is not None and held.calls != known.calls:
                found.append((step, 3, 0, _other_call(known.calls, held.calls, step, rank)))
    found += _unequal(known, ranks, seen)
    found.sort(key=lambda one: one[:3])
    violations = tuple(one[3] for one in found)
    judged = len(seen) + (known.calls is not None)
    notes = [*capture.problems]
    lost = known.count - judged
    if lost:
        gone = counted(lost, "relation")
        notes.append(f"{gone} of the healthy run could not be looked at: the calls, or a second rank, are not here")
    unsure = not seen or bool(capture.lost)
    verdict: VerdictWord = "deviates" if violations else "inconclusive" if unsure else "aligned"
    return Checked(verdict, _sentence(verdict, violations, judged), violations, judged, tuple(notes))


def _one_step(
    known: Invariants, before: tuple[int, _Step] | None, held: _Step, seen: set[tuple[str, Key]]
) -> Iterator[tuple[int, Key, str, str]]:  # fmt: skip
    """Yield what a step breaks beside the one before it: how early in a step it is told, where, the relation, and words."""
    for key in held.tensors.keys() & known.types.keys():
        seen.add(("types", key))
        if held.tensors[key][0] != known.types[key]:
            yield 1, key, "types", f"{_named(key)} is {held.tensors[key][0]}; in the healthy run it is {known.types[key]}"
    for key, made in known.same.items():
        if key in held.digests and made in held.digests:
            seen.add(("same", key))
            if held.digests[key] != held.digests[made]:
                yield 1, key, "same", f"{_named(key)} is not {_named(made)}, as in the healthy run: it was changed or not cleared"
    if before is None:
        return
    number, last = before
    for key in held.digests.keys() & last.digests.keys():
        same = held.digests[key] == last.digests[key]
        if key in known.changes:
            seen.add(("changes", key))
            if same:
                yield 1, key, "changes", f"{_named(key)} is what it was in step {number}; in the healthy run each step changes it"
        elif key in known.stays:
            seen.add(("stays", key))
            if not same:
                yield 1, key, "stays", f"{_named(key)} is not what it was in step {number}; in the healthy run no step changes it"
    for key in held.tensors.keys() & last.tensors.keys() & known.shapes:
        seen.add(("shapes", key))
        was, now = (list(one.tensors[key][1]) for one in (last, held))
        if was != now:
            yield 1, key, "shapes", f"{_named(key)} has the shape {now}, in step {number} {was}; in the healthy run it keeps one"


def _unequal(
    known: Invariants, ranks: Mapping[int, Sequence[tuple[int, _Step]]], seen: set[tuple[str, Key]]
) -> list[tuple[int, int, int, Violation]]:  # fmt: skip
    found = []
    first, *others = ranks
    for rank in others:
        for (step, one), (_, other) in zip(ranks[first], ranks[rank], strict=False):
            order = {key: n for n, key in enumerate(other.digests)}
            for key in one.digests.keys() & other.digests.keys() & known.equal:
                seen.add(("equal", key))
                if one.digests[key] != other.digests[key]:
                    words = f"{_named(key)} is not the same on ranks {first} and {rank}; in the healthy run it is"
                    found.append((step, 0, order[key], _violation("equal", step, rank, key, words)))
    return found


def _named(key: Key) -> str:
    _, phase, scope, op, ordinal, slot = key
    nth = f"#{ordinal}" if ordinal else ""
    return f"{slot} of {f'{scope}/' if scope else ''}{op}{nth} ({phase})"


def _violation(relation: str, step: int, rank: int, key: Key, words: str) -> Violation:
    return Violation(relation, step, rank, key[2], key[3], key[5], f"step {step}, rank {rank}: {words}")


def _other_call(known: Sequence[Called], held: Sequence[Called], step: int, rank: int) -> Violation:
    place = next((n for n, (a, b) in enumerate(zip(known, held, strict=False)) if a != b), min(len(known), len(held)))

    def spoken(calls: Sequence[Called]) -> str:
        if place >= len(calls):
            return "nothing"
        phase, scope, op = calls[place]
        return f"{f'{scope}/' if scope else ''}{op} ({phase})"

    words = f"call {place + 1} of the step is {spoken(held)}; in the healthy run {spoken(known)}"
    scope, op = (held[place][1:] if place < len(held) else known[place][1:]) if known else ("", "")
    return Violation("calls", step, rank, scope, op, "", f"step {step}, rank {rank}: {words}")


def _sentence(verdict: VerdictWord, violations: Sequence[Violation], judged: int) -> str:
    if violations:
        return f"BROKEN  {violations[0].said}\n        {counted(len(violations), 'violation')} of {counted(judged, 'relation')}"
    if verdict == "aligned":
        return f"HOLDS  {counted(judged, 'relation')} of the healthy run hold in each step"
    return "COULD NOT TELL  no relation of the healthy run is about what this one holds, or records are lost"


def save(known: Invariants, file: Path) -> Path:
    """Write what was learned as JSON; raises TrueupError if it cannot."""
    content = {
        "schema": SCHEMA, "schema_version": 1, "changes": sorted(map(list, known.changes)), "equal": sorted(map(list, known.equal)),
        "arguments": [[*key, value] for key, value in known.arguments.items()],
        "calls": None if known.calls is None else [list(one) for one in known.calls], "stays": sorted(map(list, known.stays)),
        "types": [[*key, value] for key, value in known.types.items()], "shapes": sorted(map(list, known.shapes)),
        "same": [[*key, *made] for key, made in known.same.items()],
    }  # fmt: skip
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, content)
    except OSError as error:
        raise TrueupError(f"{file} cannot be written: {error.strerror}\n  next:     name another file with -o") from None
    return file


def load(file: Path) -> Invariants:
    """Read what `save` wrote; raises TrueupError if it is none."""
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError("it is too large")
        held = json.loads(file.read_text(encoding="utf-8"))
        if held.get("schema") != SCHEMA or held.get("schema_version") != 1:
            raise ValueError(f"its schema is not {SCHEMA}, version 1")
        keys = [frozenset(_key(one) for one in held[name]) for name in ("changes", "equal")]
        arguments = {_key(one[:6]): str(one[6]) for one in held["arguments"]}
        calls = None if held["calls"] is None else tuple((str(a), str(b), str(c)) for a, b, c in held["calls"])
        stays, shapes = (frozenset(_key(one) for one in held.get(name, ())) for name in ("stays", "shapes"))
        types = {_key(one[:6]): str(one[6]) for one in held.get("types", ())}
        same = {_key(one[:6]): _key(one[6:]) for one in held.get("same", ())}
        return Invariants(keys[0], keys[1], arguments, calls, stays, types, shapes, same)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise TrueupError(
            f"{file} cannot be read.\n  expected: what `trueup invariants` wrote\n  got:      {why[:200]}\n  next:     learn again"
        ) from None


def _key(held: Sequence[Any]) -> Key:
    level, phase, scope, op, ordinal, slot = held
    return str(level), str(phase), str(scope), str(op), int(ordinal), str(slot)
