"""Which calls ran inside which, on both sides of one rank and step, and which of them were compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from trueup.verdict.judge import Judged
from trueup.verdict.streams import Row, Stream, is_output

SPREAD = 1000.0
"""A call's error may be this many times the largest error inside it: gradients of several uses add up, and may cancel."""


class Tree:
    """The calls of both sides by their ``parent``.

    Args:
        judged: the matched calls.
        only_baseline: calls without counterpart.
        only_candidate: likewise.
        baseline: the stream of the former.
        candidate: the stream of the latter.
    """

    def __init__(
        self,
        judged: Iterable[Judged],
        only_baseline: Iterable[Row],
        only_candidate: Iterable[Row],
        baseline: Stream,
        candidate: Stream,
    ) -> None:
        self.streams = baseline, candidate
        self.judged: tuple[dict[int, Judged], dict[int, Judged]] = {}, {}
        for call in judged:
            self.judged[0][call.call.baseline.seq] = call
            self.judged[1][call.call.candidate.seq] = call
        self.unmatched = {c.seq for c in only_baseline}, {c.seq for c in only_candidate}
        self.children: tuple[defaultdict[int, list[Row]], ...] = defaultdict(list), defaultdict(list)
        for stream, children in zip(self.streams, self.children, strict=True):
            for row in stream.calls:
                if row.parent is not None:
                    children[row.parent].append(row)

    def ancestors(self, seq: int, side: int = 1) -> list[int]:
        """Return the calls around a call, innermost first."""
        found: list[int] = []
        row = self.streams[side].by_seq.get(seq)
        while row is not None and row.parent is not None and row.parent not in found:
            found.append(row.parent)
            row = self.streams[side].by_seq.get(row.parent)
        return found

    def inside(self, seq: int, side: int = 1) -> Iterator[Row]:
        """Yield the calls inside a call, at any depth."""
        pending, seen = [seq], {seq}
        while pending:
            for child in self.children[side].get(pending.pop(), ()):
                if child.seq not in seen:
                    seen.add(child.seq)
                    pending.append(child.seq)
                    yield child

    def is_leaf(self, judged: Judged) -> bool:
        """Tell whether no finer call was recorded inside, on either side."""
        call = judged.call
        return not (self.children[0].get(call.baseline.seq) or self.children[1].get(call.candidate.seq))

    def resolved(self, judged: Judged) -> bool:
        """Tell whether the calls inside a call speak for it.

        They do when each of them was matched and compared, and one of them has an error that the call's own may come from.
        """
        call = judged.call
        children = self.children[1].get(call.candidate.seq, [])
        missing = any(c.seq in self.unmatched[0] for c in self.children[0].get(call.baseline.seq, ()))
        if not children or missing or any(c.seq in self.unmatched[1] for c in children):
            return False
        inner = [self.judged[1][c.seq] for c in self.inside(call.candidate.seq) if c.seq in self.judged[1]]
        if any(j.incomparable or j.unsized for j in inner):
            return False
        return max((j.error_out for j in inner), default=0.0) * SPREAD >= judged.error_out

    def covers(self, seq: int, side: int) -> bool:
        """Tell whether a call around this one was compared as a whole."""
        return any(
            judged is not None and any(is_output(s) for s in judged.call.slots)
            for judged in (self.judged[side].get(a) for a in self.ancestors(seq, side))
        )

    def operators(self, seq: int) -> tuple[str, ...]:
        """Return the dispatcher operators inside a call, each once: those that the baseline lacks first."""
        names: dict[str, bool] = {}
        for row in self.inside(seq):
            if row.level == "aten":
                names[row.op] = names.get(row.op, False) or row.seq in self.unmatched[1]
        return tuple(sorted(names, key=lambda op: (not names[op], not op.rpartition("::")[2].startswith("_"))))
