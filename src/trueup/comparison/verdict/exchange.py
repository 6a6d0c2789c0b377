"""What ranks send each other: whether a difference that comes out of a collective was put in by another rank.

Each rank is compared by itself. Where the result of a receive, a broadcast or an all-reduce differs, and its own inputs do not,
it is held against what the contributing ranks gave. The same communication is found on another rank by

    its content     of a receive: the send of that rank to this one whose bytes (digest, else sketch) are what arrived, in this step
                    or one beside it, for a receive before the first module of a step belongs to the step before;
    its number      of all others: the n-th of that operator among these ranks in the step, where all of them made as many.

Where what they gave differs enough, the difference came from the rank whose input differs most; else the communication itself is
at fault. Of what one rank hands out to all (DDP's first weights), a difference starts at what the root gives; what another rank had
is replaced, and no reason for anything (`use_of`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Stream, distinct
from trueup.comparison.verdict.judged import Part, Suspect, Verdicts
from trueup.foundation.facts.arguments import ranks_of
from trueup.foundation.facts.operators import has, having
from trueup.foundation.facts.slots import is_input, is_output
from trueup.foundation.facts.why import Reason, Why

HELD = 1
"""Steps before and after that are held, for receives that belong to the step before their send."""

Use = Literal["handed out", "moved", "read"]
"""What becomes of a tensor: this rank gives it to all; a call shows or copies it, and nobody reads that; it is computed with."""

Key = tuple[str, ...]  # kind of communication: level, operator, group and its ranks; of two ranks level, sender, receiver and tag
Received = tuple[Suspect, int]  # a difference that came from another rank, and which
Told = tuple[list[tuple[int, Reason]], list[tuple[int, float]]]  # ranks of which it is not known what they gave; errors of others


@dataclass(frozen=True, slots=True)
class Given:
    """What one rank put into a communication: its relative error, NaN where it is not known; and its content, of a send."""

    error: float
    content: int = 0


@dataclass(slots=True)
class Spoken:
    """A communication as one rank saw it."""

    key: Key
    number: int  # among those of its key in the rank and step
    arguments: dict[str, Any]
    op: str
    content: int  # of what a receive got


@dataclass(slots=True)
class Exchange:
    """The communications of a comparison, a few steps at a time; ``limited``: by limits, an input that fails explains all."""

    ranks: Collection[int]
    limited: bool = False
    received: list[Received] = field(default_factory=list)
    guilty: dict[int, float] = field(default_factory=dict)  # by ``id`` of suspects at fault themselves: the largest given error
    unknown: list[tuple[Suspect, Reason]] = field(default_factory=list)  # those that another rank may explain, and why it is open
    _given: dict[int, dict[Key, dict[int, list[Given]]]] = field(default_factory=lambda: defaultdict(dict))  # by step, key, rank
    _open: dict[int, list[tuple[Suspect, Spoken]]] = field(default_factory=lambda: defaultdict(list))

    def keep(self, part: Part) -> None:
        """Remember what a rank gave in a step, and which of its results ask for what the others gave."""
        asked = {s.place: s for s in part.suspects if s.phase == "collective" and s.kind == "operator"}
        for step, seq, spoken, given in _spoken(part.verdicts, part.rank, limited=self.limited):
            self._given[step].setdefault(spoken.key, defaultdict(list))[part.rank].append(given)
            if seq in asked:
                self._open[step].append((asked.pop(seq), spoken))
        self.unknown += [(suspect, Why.NO_ARGUMENTS()) for suspect in asked.values()]

    def close(self, step: int) -> None:
        """Answer for what can be answered where all steps before this one are kept, and forget what nobody needs any more."""
        for before in [s for s in self._open if s < step - HELD]:
            self._settle(before)
        for before in [s for s in self._given if s < step - 2 * HELD]:
            del self._given[before]

    def finish(self) -> None:
        """Answer for all that is left."""
        for step in list(self._open):
            self._settle(step)

    @property
    def answered(self) -> set[int]:
        """``id`` of the suspects that are no culprits: explained by another rank, or not known to be."""
        return {id(suspect) for suspect, _ in self.received} | {id(suspect) for suspect, _ in self.unknown}

    def _settle(self, step: int) -> None:
        told: dict[Any, Told] = {}  # thousands of ranks ask the same
        for suspect, spoken in self._open.pop(step):
            found = self._worst(step, suspect.rank, spoken, told)
            judged = suspect.judged
            if isinstance(found, Reason):
                self.unknown.append((suspect, found))
            elif judged.error_out <= judged.own + judged.row.factor * found[1]:
                self.received.append((suspect, found[0]))
            else:
                self.guilty[id(suspect)] = max(found[1], judged.error_in)

    def _worst(self, step: int, rank: int, spoken: Spoken, told: dict[Any, Told]) -> tuple[int, float] | Reason:
        """Return the other rank whose input differs most, and by how much, or why it is not known."""
        if spoken.key[1] == "recv":
            return self._of_sender(step, rank, spoken)
        by_rank = self._given[step].get(spoken.key, {})
        asked = spoken.key, spoken.number, len(by_rank[rank]), str(spoken.arguments.get("root"))
        if asked not in told:
            told[asked] = self._contributions(spoken, by_rank, asked[2])
        unknown = [why for member, why in told[asked][0] if member != rank]
        errors = [one for one in told[asked][1] if one[0] != rank]
        return unknown[0] if unknown else errors[0] if errors else (rank, 0.0)

    def _contributions(self, spoken: Spoken, by_rank: dict[int, list[Given]], here: int) -> Told:
        """Return the first two members of whom it is not known what they gave, and the two whose input differs most."""
        unknown, errors = list[tuple[int, Reason]](), list[tuple[int, float]]()
        root, ranks = (spoken.arguments.get(name) for name in ("root", "ranks"))
        members = [root] if isinstance(root, int) and has(spoken.op, "from-root") else ranks_of(ranks)  # whose inputs are in it
        if members is None:
            unknown = [(NONE, Why.NO_RANKS())]
        for member in members or ():
            given = by_rank.get(member, [])
            if member not in self.ranks or len(given) != here:
                alone = member not in self.ranks
                unknown.append((member, Why.NOT_IN_BOTH(member) if alone else Why.OTHER_NUMBER(member, len(given), here)))
            elif np.isnan(error := given[spoken.number].error):
                unknown.append((member, Why.GIVEN_UNCOMPARED(member)))
            else:
                errors.append((member, error))
        return unknown[:2], sorted(errors, key=lambda one: -one[1])[:2]

    def _of_sender(self, step: int, rank: int, spoken: Spoken) -> tuple[int, float] | Reason:
        source = spoken.arguments.get("src")
        senders = [source] if isinstance(source, int) else [r for r in self.ranks if r != rank]
        for near in sorted(range(step - HELD, step + HELD + 1), key=lambda s: abs(s - step)):
            for sender in senders:
                for given in self._sent(near, sender, rank, spoken):
                    if given.content == spoken.content:
                        return Why.SENT_UNCOMPARED(sender) if np.isnan(given.error) else (sender, given.error)
        if not isinstance(source, int) or source not in self.ranks:
            return Why.SENDER_NOT_IN_BOTH(source) if isinstance(source, int) else Why.SENDER_UNKNOWN()
        sent, here = self._sent(step, source, rank, spoken), len(self._given[step].get(spoken.key, {}).get(rank, []))
        if len(sent) != here or np.isnan(sent[spoken.number].error):
            return Why.SENT_NOT_FOUND(source)
        return source, sent[spoken.number].error  # it was changed on its way

    def _sent(self, step: int, sender: int, receiver: int, spoken: Spoken) -> list[Given]:
        made = self._given.get(step, {})
        return made.get(_between(spoken.key[0], "send", sender, receiver, spoken.arguments), {}).get(sender, [])


def _spoken(verdicts: Verdicts, rank: int, *, limited: bool) -> Iterator[tuple[int, int, Spoken, Given]]:
    """Yield the communications of the candidate on one rank, in order: step, ``seq``, what it is, what the rank gave."""
    errors, stream = verdicts.errors, verdicts.errors.streams[1]
    calls = np.flatnonzero(stream.during("collective")).tolist()
    pairs = dict(zip(errors.calls[1].tolist(), range(len(verdicts)), strict=True)) if calls else {}
    numbers: defaultdict[tuple[int, Key], int] = defaultdict(int)
    for call in calls:
        arguments = stream.given(call)
        level, op = (stream.names.name(int(code[call])) or "" for code in (stream.level, stream.op))
        sends, receives = "dst" in arguments, "src" in arguments or "recv" in op
        if sends or receives:
            sender, receiver = (rank, arguments.get("dst")) if sends else (arguments.get("src"), rank)
            key = _between(level, "send" if sends else "recv", sender, receiver, arguments)
        else:
            key = (level, op, str(arguments.get("group")), str(arguments.get("ranks")))
        content = _content(stream, call, sends=sends) if sends or receives else 0
        step = int(stream.step[call])
        spoken = Spoken(key, numbers[step, key], arguments, op, content)
        numbers[step, key] += 1
        yield step, int(stream.seq[call]), spoken, Given(_error_given(verdicts, pairs.get(call), limited=limited), content)


def _error_given(verdicts: Verdicts, pair: int | None, *, limited: bool) -> float:
    if pair is None:
        return float("nan")
    inputs = [n for n in verdicts.errors.entries(pair) if verdicts.errors.inputs[n]]
    relative = verdicts.errors.relative[inputs]
    if limited:
        return float("inf") if (relative > verdicts.tolerated[inputs]).any() else 0.0
    return float(relative.max(initial=0.0))


def _content(stream: Stream, call: int, *, sends: bool) -> int:
    """Return a number for the bytes that a call sent or received: the digest, else a hash of the sketch."""
    for number, k in stream.slots(call).items():
        if (is_input if sends else is_output)(stream.names.names[number]):
            return int(stream.digest[k]) if stream.has_digest[k] else hash(stream.sketch[k].tobytes())
    return 0


def _between(level: str, what: str, sender: Any, receiver: Any, arguments: dict[str, Any]) -> Key:
    return level, what, str(sender), str(receiver), str(arguments.get("tag", 0))


def from_root(stream: Stream) -> Array:
    """Tell which calls hand something out from one rank to all."""
    return np.asarray(stream.during("collective") & stream.names.table(having("from-root"))[stream.op])


def receives(stream: Stream) -> bool:
    """Tell whether this rank gets something that another one hands out."""
    return any(_root(stream, int(call)) not in (None, stream.rank) for call in np.flatnonzero(from_root(stream)))


def use_of(stream: Stream, call: int) -> Use:
    """Tell what a call does with a tensor that no recorded call made."""
    if _hands_out(stream, [call]):
        return "handed out"
    if not _moves(stream, call):
        return "read"
    at = np.flatnonzero((stream.producer == stream.seq[call]) & (stream.call != call))
    readers = list(distinct(stream.call[at[stream.names.table(is_input)[stream.slot[at]]]]).tolist())
    return "handed out" if _hands_out(stream, readers) else "read" if readers else "moved"


def _hands_out(stream: Stream, calls: list[int]) -> bool:
    handing = from_root(stream)
    return any(handing[call] and _root(stream, call) == stream.rank for call in calls)


def _root(stream: Stream, call: int) -> int | None:
    root = stream.given(call).get("root")
    return root if isinstance(root, int) else None


def _moves(stream: Stream, call: int) -> bool:
    """Tell whether a call returns the elements that it got and no others: a view, a concatenation."""
    read, made = (stream.slots_of(call, kind) for kind in (is_input, is_output))
    if not len(made) or stream.numel[read].sum() != stream.numel[made].sum():
        return False
    return math.isclose((stream.l2[read] ** 2).sum(), (stream.l2[made] ** 2).sum())  # added in another order
