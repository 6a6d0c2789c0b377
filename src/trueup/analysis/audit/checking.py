"""`trueup.check`: casts, dtypes and, beside a second run, what differs in them and in the graph.

How alike the graphs of two runs are: which calls only one has, and how the calls are wired.

    the graphs are 97.4 % alike: the baseline makes 1,240 calls, the candidate lacks 4 and has 2 that the baseline has not:
    4 x aten::gelu in encoder.0 (forward) missing; 2 x aten::erf in encoder.0 (forward) extra

**Definition.** Calls are a multiset of (phase, scope, operator). The similarity of two multisets is 2 |A ∩ B| / (|A| + |B|), the
coefficient of Dice (1945, Measures of the Amount of Ecologic Association Between Species, Ecology 26) and Sørensen (1948): 1 for
the same calls, 0 for none in common. The similarity of the edges (which operator made what a slot of which operator reads) tells
whether the calls are wired alike. Counted at the finest common level, over the common ranks and steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from trueup.analysis.audit.casts import Casts, dangerous_casts
from trueup.analysis.audit.census import Census, Difference, census, difference
from trueup.analysis.audit.ranks import Ranks, ranks_of
from trueup.analysis.audit.reading import Places, Steps
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.declared import Overlap, framework_of, require_records
from trueup.foundation.words.reasons import in_words
from trueup.foundation.words.wording import clean, counted, one_line, short_source


@dataclass(frozen=True, slots=True)
class Check:
    """What `check` found."""

    path: str
    casts: Casts
    census: Census
    against: str | None = None
    dtypes: Difference | None = None  # with a second capture
    graph: Similarity | None = None  # with a second capture of the same framework
    notes: tuple[str, ...] = ()
    ranks: Ranks | None = None  # asked for, of a run of several ranks

    @property
    def exit_code(self) -> int:
        """1: a cast is dangerous, the runs differ in dtypes or calls, or ranks are odd; else 2: some of that could not be told;
        else 0."""
        odd = None if self.ranks is None else self.ranks.verdict
        differs = (self.dtypes is not None and self.dtypes.differs) or (self.graph is not None and not self.graph.same)
        if self.casts.dangerous or differs or odd == "deviates":
            return 1
        beside = self.against is not None and not (
            self.dtypes is not None and self.dtypes.told and self.graph is not None and self.graph.whole
        )
        return 2 if self.casts.unsure or beside or odd == "inconclusive" else 0

    @property
    def sentences(self) -> tuple[tuple[str, str], ...]:
        """Name and conclusion of each check."""
        found = [("casts", self.casts.sentence), ("precision", self.census.sentence)]
        if self.dtypes is not None:
            found.append(("dtypes", self.dtypes.sentence))
        if self.graph is not None:
            found.append(("graph", self.graph.sentence))
        if self.ranks is not None:
            found.append(("ranks", self.ranks.sentence))
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join(f"{name:9}  {sentence}" for name, sentence in self.sentences)


def check(
    capture: str | Path | Capture, *, against: str | Path | Capture | None = None, step: Steps = None, rank: Steps = None,
    replicas: bool = False,
) -> Check:  # fmt: skip
    """Check what a run did with dtypes, and beside a second run which operators it has more or fewer of.

        >>> print(trueup.check("runs/npu", against="runs/gpu"))        # doctest: +SKIP
        casts      no cast is dangerous: 214 looked at
        precision  mixed precision is on: 96 of 98 matrix products and convolutions run in bfloat16, 2 in float32: head aten::addmm
        dtypes     the two runs compute all matrix products and convolutions that both have in the same dtypes: ...
        graph      the graphs are alike: the same 1,240 calls in both

    Args:
        capture: of any framework, native or imported; casts take detail ``stats`` or ``tensor``.
        against: a second capture, the baseline.
        step: steps whose casts and dtypes are looked at; all by default. The graphs are those of all steps that both runs hold.
        rank: likewise.
        replicas: hold the ranks of the run against each other: what must be the same on all and is not, what must differ and
            does not.

    Raises:
        TrueupError: there is no such capture, step or rank.
    """
    given = open_capture(capture)
    require_records(given)
    ranks = ranks_of(given) if replicas else None
    casts, counted = dangerous_casts(given, step=step, rank=rank), census(given, step=step, rank=rank)
    if against is None:
        return Check(str(given.path), casts, counted, ranks=ranks)
    other = open_capture(against)
    require_records(other)
    notes: tuple[str, ...] = ()
    graph: Similarity | None = None
    try:
        graph = similarity(other, given)
        notes = graph.notes
    except TrueupError as error:
        notes = (f"the graphs were not compared: {str(error).splitlines()[0]}",)
    dtypes = difference(census(other, step=step, rank=rank), counted)
    return Check(str(given.path), casts, counted, str(other.path), dtypes, graph, notes, ranks)


T = TypeVar("T", bound=Hashable)
Kind = tuple[str, str, str]  # phase, scope, operator
LISTED = 200
NAMED = 2


@dataclass(frozen=True, slots=True)
class CallCount:
    """Calls of an operator in a scope and phase, on both sides."""

    phase: str
    scope: str
    op: str
    baseline: int
    candidate: int
    source: str | None  # ``file:line in function`` of the first, on the side that has more of them


@dataclass(frozen=True, slots=True)
class Similarity:
    """Two graphs side by side."""

    sentence: str
    level: str
    calls: float  # similarity of the calls, 0 to 1
    edges: float  # similarity of the wiring; NaN where a capture names no producers (an imported one)
    baseline: int
    candidate: int  # calls that were counted
    missing: tuple[CallCount, ...]  # the candidate has fewer of these, the most first
    extra: tuple[CallCount, ...]  # the candidate has more of these
    notes: tuple[str, ...]
    whole: bool = True  # all was counted: same ranks and steps, every part readable, calls on both sides

    @property
    def same(self) -> bool:
        """Whether both hold the same calls, wired in the same way."""
        return not self.missing and not self.extra and not self.edges < 1


def similarity(baseline: str | Path | Capture, candidate: str | Path | Capture, *, level: str | None = None) -> Similarity:
    """Compare the graphs of two captures of one framework, by default at the finest common level. Raises TrueupError if they are
    of different frameworks, or have no level, step or rank in common."""
    pair = open_capture(baseline), open_capture(candidate)
    overlap = Overlap(pair, level)
    if overlap.mixed:
        names = " and ".join(str(framework_of(one)) for one in pair)
        raise TrueupError(
            f"The graphs of {names} cannot be counted against each other, for they name their operators differently.\n"
            f"  expected: captures of one framework\n  got:      {pair[0].path}, {pair[1].path}\n"
            "  next:     trueup compare, which knows which layer is which"
        )
    finest = overlap.levels[-1]
    counts: tuple[Counter[Kind], Counter[Kind]] = Counter(), Counter()
    edges: tuple[Counter[tuple[str, ...]], Counter[tuple[str, ...]]] = Counter(), Counter()
    first: list[dict[Kind, tuple[int, int, int]]] = [{}, {}]
    for rank in overlap.ranks:
        for step in overlap.steps:
            for side, capture in enumerate(pair):
                table = capture.records(_COLUMNS, rank=rank, step=step, level=finest)
                for kind, n, seq in _kinds(table):
                    counts[side][kind] += n
                    first[side].setdefault(kind, (rank, step, seq))
                edges[side].update(dict(_edges(table)))
    places = [Places(capture) for capture in pair]
    lists: tuple[list[CallCount], list[CallCount]] = [], []
    order = sorted(counts[0].keys() | counts[1].keys(), key=lambda kind: min(f.get(kind, _NEVER) for f in first))
    for kind in order:
        there, here = counts[0][kind], counts[1][kind]
        if there != here:
            side = int(here > there)
            at = first[side][kind]
            known = len(lists[side]) < LISTED
            source = places[side].of(*at).source if known else None
            lists[side].append(CallCount(*kind, there, here, source))
    alike = dice(*counts)
    wired = dice(*edges) if all(edges) else float("nan")
    totals = counts[0].total(), counts[1].total()
    sentence = _sentence(alike, wired, totals, *lists)
    lost = [f"{one.path.name}: {text}" for one in pair for text in one.lost]
    whole = overlap.is_whole and not lost and min(totals) > 0
    notes = (*map(in_words, overlap.notes), *lost)
    return Similarity(sentence, finest, alike, wired, *totals, tuple(lists[0][:LISTED]), tuple(lists[1][:LISTED]), notes, whole)


_COLUMNS = ("seq", "phase", "scope", "op", "slot", "producer_seq")
_NEVER = (1 << 62, 0, 0)


def dice(first: Counter[T], second: Counter[T]) -> float:
    """Return 2 |A ∩ B| / (|A| + |B|) of two multisets; 1 where both are empty.

    >>> dice(Counter("abc"), Counter("abd"))
    0.6666666666666666
    """
    total = first.total() + second.total()
    return 2 * (first & second).total() / total if total else 1.0


def _kinds(table: pa.Table) -> Iterator[tuple[Kind, int, int]]:
    """Yield the number of calls of each kind, and the first of them."""
    calls = table.group_by(["seq", "phase", "scope", "op"]).aggregate([])
    found = calls.group_by(["phase", "scope", "op"]).aggregate([([], "count_all"), ("seq", "min")])
    for row in found.to_pylist():
        yield (row["phase"] or "", row["scope"] or "", row["op"] or ""), row["count_all"], row["seq_min"]


def _edges(table: pa.Table) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield how often a slot of one operator reads what another made: scopes, operators and slot, within the table."""
    read = table.filter(pc.and_(pc.is_valid(table["producer_seq"]), pc.starts_with(table["slot"].cast(pa.string()), "input")))
    names = ["scope", "op"]
    made = table.group_by(["seq", *names]).aggregate([]).rename_columns(["seq", "made_in", "made_by"])
    plain = _plain(read.select(["producer_seq", *names, "slot"]))
    joined = plain.join(_plain(made), "producer_seq", "seq", join_type="inner")
    keys = ["made_in", "made_by", *names, "slot"]
    for row in joined.group_by(keys).aggregate([([], "count_all")]).to_pylist():
        yield tuple(str(row[key] or "") for key in keys), row["count_all"]


def _plain(table: pa.Table) -> pa.Table:
    """Turn dictionaries into text, on which tables are joined."""
    text = [pa.field(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type) for f in table.schema]
    return table.cast(pa.schema(text))


def _sentence(alike: float, wired: float, totals: tuple[int, int], missing: list[CallCount], extra: list[CallCount]) -> str:
    if not missing and not extra:
        if wired < 1:
            same = f"both runs make the same {counted(totals[0], 'call')}"
            return f"{same}, but hand their results on differently: {_percent(wired)} of that is alike"
        return f"the graphs are alike: the same {counted(totals[0], 'call')} in both"
    lacks, has = sum(one.baseline - one.candidate for one in missing), sum(one.candidate - one.baseline for one in extra)
    what = " and ".join([*([f"lacks {lacks:,}"] if lacks else []), *([f"has {has:,} that the baseline has not"] if has else [])])
    named = [_named(one, "missing") for one in missing[:NAMED]] + [_named(one, "extra") for one in extra[:NAMED]]
    calls = f"the baseline makes {counted(totals[0], 'call')}, the candidate {what}"
    return clean(f"the graphs are {_percent(alike)} alike: {calls}: {'; '.join(named)}")


def _named(one: CallCount, word: str) -> str:
    code = f" [{short_source(one.source)}]" if one.source else ""
    where = f" in {one_line(one.scope)}" if one.scope else ""
    return f"{abs(one.baseline - one.candidate):,} x {one_line(one.op)}{where} ({one.phase}) {word}{code}"


def _percent(share: float) -> str:
    """Write a share in percent, 100 % only for 1."""
    return f"{min(100 * share, 99.99) if share < 1 else 100:.4g} %"
