"""Ranks of one run held against each other, without a baseline: what must be the same and is not, what must differ and does not.

    ranks      rank 1 is odd, the other 3 agree in layers.2.after (torch.nn.functional.rms_norm, forward), step 4: the same bytes
               went in, and other bytes came out; and 2 more; rank 1 computed otherwise more than once: suspect its hardware

- weights, buffers, what an optimizer reads, on ranks that differ in their data alone: they drifted, or were not reduced
- weights that all ranks had alike in the first step, and no longer have
- a forward call that is given the same bytes on all ranks and makes others on one: the odd rank by majority; twice, it is suspect,
  and once, if its recorded call gives the others' bits when it is executed again
- dropout that drew the same mask on other data; ranks that are all given the same data, and cut no weight

Pieces of which nothing says how they lie are not judged, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trueup.comparison.layout.calls import LEVELS, Call, Calls, Key, calls_of
from trueup.comparison.layout.geometry import geometry_of
from trueup.comparison.layout.joined import Joined
from trueup.comparison.layout.standing import Standing, in_one_pass, renamed, standing_of, tied_of, updates_of
from trueup.comparison.result.layouts import SURE, finding_of
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.slots import is_weight
from trueup.foundation.model import TrueupError, VerdictWord
from trueup.foundation.store import Capture
from trueup.foundation.words.layout_sentence import ranks_text
from trueup.foundation.words.wording import counted, one_line

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
    found += _same_data(steps[0], standing, read)
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


def _same_data(step: int, standing: Standing, read: dict[int, Calls]) -> Iterator[Odd]:
    """Yield that all ranks are given the same data, where nothing is cut: neither weights nor layers."""
    if standing.data or standing.stages or standing.ranks.axes != ("ranks",):
        return
    weights = [
        {
            f"{key[2]}.{name}": its.rows[at]["digest"]
            for key, call in its.kept.items() for name, at in call.rows.items() if is_weight(name)
        }
        for its in read.values()
    ]  # fmt: skip
    if weights[0] and all(one == weights[0] for one in weights[1:]) and not any(one is None for one in weights[0].values()):
        ranks = tuple(read)
        many = len(ranks)
        said = f"all {many} ranks hold the same weights and are given the same data: they learn the same {many} times"
        yield Odd(step, 0, ranks, said)


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
