"""`trueup.check`: casts, dtypes, ranks and, beside a second run, what differs in them and in the graph.

Ranks of one run are held against each other, without a baseline: what must be the same and is not, what must differ and does not.

    ranks      rank 1 is odd, the other 3 agree in layers.2.after (torch.nn.functional.rms_norm, forward), step 4: the same bytes
               went in, and other bytes came out; and 2 more; rank 1 computed otherwise more than once: suspect its hardware

- weights, buffers, what an optimizer reads, on ranks that differ in their data alone: they drifted, or were not reduced
- weights that all ranks had alike in the first step, and no longer have
- a forward call that is given the same bytes on all ranks and makes others on one: the odd rank by majority; twice, it is suspect,
  and once, if its recorded call gives the others' bits when it is executed again
- dropout that drew the same mask on other data; ranks that are given the same data, and cut no weight

Pieces of which nothing says how they lie are not judged, and counted.

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
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from trueup.analysis.audit.casts import Casts, dangerous_casts
from trueup.analysis.audit.reading import Census, Difference, Places, Steps, census, difference
from trueup.comparison.layout.calls import LEVELS, Call, Calls, Key, calls_of
from trueup.comparison.layout.geometry import geometry_of
from trueup.comparison.layout.joined import Joined
from trueup.comparison.layout.standing import Standing, in_one_pass, renamed, standing_of, tied_of, updates_of
from trueup.comparison.result.layouts import SURE, finding_of
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.slots import is_weight
from trueup.foundation.model import TrueupError, VerdictWord
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.declared import Overlap, framework_of, require_records
from trueup.foundation.words.reasons import in_words
from trueup.foundation.words.setup_sentence import ranks_text
from trueup.foundation.words.wording import clean, counted, one_line, short_source

STEPS = 8
"""Steps that are looked at."""


OTHERWISE = "the same bytes went in, and other bytes came out"


@dataclass(frozen=True, slots=True)
class Odd:
    """Ranks that do not hold what they should."""

    step: int
    seq: int
    ranks: tuple[int, ...]
    said: str


@dataclass(frozen=True, slots=True)
class Ranks:
    """What `ranks_of` found, the earliest first."""

    verdict: VerdictWord
    sentence: str
    found: tuple[Odd, ...]
    unknown: int  # slots of which nothing says how their pieces lie


def ranks_of(capture: Capture) -> Ranks | None:
    """Hold the ranks of a run against each other; None of one rank."""
    if len(capture.ranks) < 2 or not capture.steps:
        return None
    geometry = geometry_of(capture)
    if geometry.problem:
        return Ranks("inconclusive", f"ranks were not held against each other: {geometry.problem}", (), 0)
    standing = in_one_pass(standing_of(capture, geometry))
    run = Joined(capture, standing, partial=standing.partial, updates=updates_of([standing], [capture]), tied=tied_of([capture]))
    steps = capture.steps[:STEPS]
    for step in steps:
        run.step(step)
    apart = list(_of_apart(run))
    known = {(one.step, one.seq) for one in apart}
    read = _read(capture, standing, steps[0])
    found = [*apart, *(one for one in _of_calls(capture, standing, steps, read) if (one.step, one.seq) not in known)]
    found += _same_data(steps[0], read)
    found.sort(key=lambda one: (one.step, one.seq))
    unknown = sum(one.kind not in SURE for one in run.apart)
    return Ranks(*_concluded(found, unknown, capture, len(steps)), tuple(found), unknown)


def _of_apart(run: Joined) -> Iterator[Odd]:
    calls: dict[tuple[int, int, str], list[Any]] = {}
    for one in run.apart:
        if one.kind in SURE:
            calls.setdefault((one.step, one.seq, one.kind), []).append(one)
    for (step, seq, _), some in calls.items():
        finding = finding_of(some, run)
        yield Odd(step, seq, some[0].ranks, f"{finding.cause or finding.sentence}, in {finding.name}")


def _of_calls(capture: Capture, standing: Standing, steps: list[int], read: dict[int, Calls]) -> Iterator[Odd]:
    """Yield calls that make other bytes of the same bytes, and weights that were the same on all ranks once; ``read``: the first
    step."""
    alike: dict[tuple[Key, str], int] = {}
    for step in steps:
        read = read if step == steps[0] else _read(capture, standing, step)
        first = read[min(read)]
        for key, call in first.kept.items():
            if any(key not in its.kept for its in read.values()):
                continue
            digests = {rank: _digests(its, its.kept[key]) for rank, its in read.items()}
            yield from _other_bytes(step, call, key, digests)
            for name, held in digests[min(read)].items():
                if not is_weight(name) or held is None:
                    continue
                same = {told.get(name) for told in digests.values()} == {held}
                if same:
                    alike.setdefault((key, name), step)
                elif alike.get((key, name), step) < step:
                    odd = _odd({rank: told.get(name) for rank, told in digests.items()})
                    said = (
                        f"{one_line(name)} of {one_line(key[2])} was alike on all ranks in step {alike[key, name]}, and is not in "
                        f"step {step}: {_who(odd, len(read))}; replicas drifted apart, or a gradient was not reduced"
                    )
                    yield Odd(step, call.seq, odd, said)
                    alike.pop((key, name))


def _read(capture: Capture, standing: Standing, step: int) -> dict[int, Calls]:
    found = {}
    for rank in standing.ranks.coordinates:
        name = partial(renamed, renames=standing.renames.get(rank, ()))
        found[rank] = calls_of(capture.records(rank=rank, step=step, level=LEVELS), None, name, standing.partial)
    return found


def _digests(calls: Calls, call: Call) -> dict[str, str | None]:
    return {name: calls.rows[at]["value"] if name == "arguments" else calls.rows[at]["digest"] for name, at in call.rows.items()}


def _other_bytes(step: int, call: Call, key: Key, digests: Mapping[int, Mapping[str, str | None]]) -> Iterator[Odd]:
    """Yield a call of a framework's function that is given the same on all ranks, and makes something else on some."""
    if (
        key[1] != "api"
        or not key[3].startswith("torch.")
        or key[0] != "forward"
        or any(has(key[3], fact) for fact in ("may-draw", "allocates", "unordered"))
    ):
        return
    told = list(digests.values())
    given = [name for name in told[0] if not name.startswith(("output.", "grad_input."))]
    made = [name for name in told[0] if name not in given]
    tensors = [name for name in given if name != "arguments"]
    if not tensors or any(told[0][name] is None for name in tensors):
        return
    if any(one.keys() != told[0].keys() or any(one[name] != told[0][name] for name in given) for one in told[1:]):
        return
    outs = {rank: tuple(one[name] for name in made) for rank, one in digests.items()}
    if len(set(outs.values())) > 1 and all(None not in out for out in outs.values()):
        odd = _odd(outs)
        where = f"{one_line(key[2])} ({key[3]}, {key[0]})" if key[2] else f"{key[3]} ({key[0]})"
        yield Odd(step, call.seq, odd, f"{_who(odd, len(outs))} in {where}, step {step}: {OTHERWISE}")


def _odd(held: Mapping[int, Any]) -> tuple[int, ...]:
    """Return the ranks that are odd where a majority agrees, else all."""
    usual, often = Counter(held.values()).most_common(1)[0]
    return tuple(rank for rank, one in held.items() if one != usual) if 2 * often > len(held) else tuple(held)


def _who(odd: tuple[int, ...], world: int) -> str:
    if len(odd) == world:
        return f"{ranks_text(odd)} differ, and no majority says which is wrong"
    return f"{ranks_text(odd)} {'is' if len(odd) == 1 else 'are'} odd, the other {world - len(odd)} agree"


def _same_data(step: int, read: Mapping[int, Calls]) -> Iterator[Odd]:
    """Yield the ranks that read the same weights and are given the same data, and compute the same until they draw: no axis cuts
    what they do, neither the weights nor, inside the model, the sequence."""
    alike: dict[frozenset[tuple[str, str | None]], list[int]] = {}
    for rank, its in read.items():
        held = frozenset(
            (f"{key[2]}.{name}", its.rows[at]["digest"])
            for key, call in its.kept.items() if key[0] == "forward" for name, at in call.rows.items() if is_weight(name)
        )  # fmt: skip
        given = next((some for key, call in its.kept.items() if key[1] == "module" and (some := _inputs(its, call))), None)
        if given and held and None not in given.values() and all(digest is not None for _, digest in held):
            alike.setdefault(held.union(given.items()), []).append(rank)
    for group in alike.values():
        ranks = tuple(rank for rank in group if rank == group[0] or _same_until_drawn(read[group[0]], read[rank]))
        if len(ranks) > 1:
            who, many = f"all {len(ranks)} ranks" if len(ranks) == len(read) else ranks_text(ranks), len(ranks)
            said = f"{who} hold the same weights and are given the same data: they learn the same {many} times"
            yield Odd(step, 0, ranks, said)


def _inputs(calls: Calls, call: Call) -> dict[str, str | None]:
    return {name: digest for name, digest in _digests(calls, call).items() if name.startswith("input.")}


def _same_until_drawn(mine: Calls, its: Calls) -> bool:
    """Tell whether two ranks make the same calls forward, and the first whose tensors differ, of those that no other call is in,
    draws numbers: what is cut inside the model differs without."""
    forward = [key for key in mine.kept if key[0] == "forward"]
    if forward != [key for key in its.kept if key[0] == "forward"]:
        return False
    around = {mine.around(mine.kept[key].parent) for key in forward}
    for key in forward:
        call = mine.kept[key]
        if call.seq not in around and (one := _digests(mine, call)) != (other := _digests(its, its.kept[key])):
            made = {name for name in one if one[name] != other.get(name)}
            return has(key[3], "may-draw") and all(name.startswith("output.") for name in made)
    return True


def _gives_the_others_bits(capture: Capture, odd: Odd) -> bool:
    """Tell whether the recorded call of an odd rank gives the bits of the others when it is executed again, here."""
    if capture.root.get("detail") != "tensor" or OTHERWISE not in odd.said or len(odd.ranks) != 1:
        return False
    from trueup.analysis.rerun.replay import again

    try:
        outcomes = [one for one in again(capture, odd.seq) if (one.step, one.seq) == (odd.step, odd.seq)]
    except TrueupError:  # the device, or the framework, is not here
        return False
    words = {one.rank: one.verdict for one in outcomes}
    others = {word for rank, word in words.items() if rank not in odd.ranks}
    return words.get(odd.ranks[0]) == "wrong" and others == {"accurate"}


def _concluded(found: list[Odd], unknown: int, capture: Capture, steps: int) -> tuple[VerdictWord, str]:
    world = len(capture.ranks)
    if not found:
        open_ = f"; of {counted(unknown, 'slot')} nothing says how the ranks' pieces lie" if unknown else ""
        word: VerdictWord = "inconclusive" if unknown else "aligned"
        return (
            word,
            f"nothing that must be the same on {world} ranks differs, nor the other way round, in {counted(steps, 'step')}{open_}",
        )
    first = found[0]
    often = Counter(one.ranks[0] for one in found if len(one.ranks) == 1 and OTHERWISE in one.said)
    suspect = [rank for rank, times in often.items() if times > 1]
    more = f"; and {len(found) - 1:,} more" if len(found) > 1 else ""
    hint = (
        f"; rank {suspect[0]} computed otherwise more than once: suspect its hardware (trueup verify-capture runs its calls again)"
        if suspect else ""
    )  # fmt: skip
    odd = next((one for one in found if OTHERWISE in one.said), first)
    if not suspect and _gives_the_others_bits(capture, odd):
        hint = f"; executed again, its call gives the others' bits: suspect the hardware of rank {odd.ranks[0]}"
    return "deviates", f"{first.said}{more}{hint}"


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
