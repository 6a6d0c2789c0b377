"""A comparison of many ranks, spread over workers: each compares some ranks, and what they found becomes one result.

    map      a worker gets some ranks of both captures (`_share_of`), reads them itself, and hands back a `Share`: facts, no streams
    reduce   shares are joined in the order of their ranks (`_take`); the exchange between ranks is answered once all are there,
             so that a difference that came through a collective is followed to the rank that put it in, whoever compared that

What the parts of a comparison gathered is joined by what it is (`merged`): counts add up, tables follow each other, and of what is
said once the lowest rank's is kept. A rank that no worker could compare is told as one that cannot be read.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trueup.comparison.result.gradients import norms_of
from trueup.comparison.verdict.compare import Comparison
from trueup.comparison.verdict.exchange import Exchange
from trueup.comparison.verdict.judged import Suspect
from trueup.comparison.verdict.origins import Origins
from trueup.foundation.engines import Engine, Failed
from trueup.foundation.model import Finding
from trueup.foundation.progress import advance
from trueup.foundation.store import Capture
from trueup.foundation.store.columns import Overview, Vocabulary

SHARES = 4
"""Shares of each worker, so that none waits long for the last one."""
LARGEST = 64
"""Ranks of a share."""
WORTHWHILE = 64
"""Ranks from which on workers are started unasked: each takes a second to begin."""

COUNTED = (
    "asked", "judged", "cleared", "_lone_gradients", "_stepped", "uncompared", "covered", "uncovered", "incomparable", "outputs",
    "notes", "unexplained", "twice", "holes", "unmatched", "dead_ends", "suspects",
)  # fmt: skip
"""What a `Comparison` counts and keeps of the parts that it has seen."""

GATHERED = ("remarks", "uncompared", "beginnings", "unmade", "alone", "lacking", "shown", "tables", "one_sided", "norms")
"""What is gathered beside it for a `Result`, by the names of `comparing.Assembly`."""


class Kept(Exchange):
    """What some ranks sent each other and the others; the answers come when the others are there, too."""

    def close(self, step: int) -> None:
        """Keep all steps."""

    def finish(self) -> None:
        """Answer nothing yet."""


@dataclass(slots=True)
class Share:
    """What a worker found of some ranks."""

    ranks: Sequence[int]
    counted: dict[str, Any]
    gathered: dict[str, Any]
    findings: list[tuple[Suspect, Finding]]
    exchange: Exchange
    origins: dict[int, Origins]
    overviews: list[tuple[int, dict[int, list[float]], set[int]]]
    passes: dict[int, Any]
    problems: list[tuple[list[str], list[str]]]  # that reading found, of each capture: all, and those that lost something


def can_be_spread(comparison: Comparison) -> bool:
    """Tell whether ranks can be compared apart: runs in other terms are translated or joined as a whole."""
    return all(type(capture) is Capture for capture in comparison.runs) and len(comparison.ranks) > 1


def spread(assembly: Any, engine: Engine) -> None:
    """Have all ranks of a comparison compared, and take what was found into it and its ``assembly`` (`comparing.Assembly`)."""
    comparison: Comparison = assembly.comparison
    ranks = list(comparison.ranks)
    size = min(max(-(-len(ranks) // (SHARES * engine.workers)), 1), LARGEST)
    runs = [ranks[n : n + size] for n in range(0, len(ranks), size)]
    found, lost, done = dict[int, Share](), dict[int, Failed](), 0
    for place, share in _mapped(engine, comparison, type(assembly), runs):
        done += len(runs[place])
        advance("comparing", "ranks", done, len(ranks))
        if isinstance(share, Share):
            found[share.ranks[0]] = share
        elif len(runs[place]) == 1:
            lost[runs[place][0]] = share
    again = [rank for n, its in enumerate(runs) if its[0] not in found and its[0] not in lost for rank in runs[n]]
    for place, share in _mapped(engine, comparison, type(assembly), [[rank] for rank in again]):
        if isinstance(share, Share):
            found[again[place]] = share
        else:
            lost[again[place]] = share
    for rank in sorted(found):
        _take(assembly, found[rank])
    for rank, failed in sorted(lost.items()):
        comparison.captures[1].lost.append(f"rank {rank} could not be compared, because {failed.why}")
    for tables in (assembly.tables, assembly.one_sided):
        tables.sort(key=lambda table: table["step"][0].as_py() if len(table) else 0)
    for norms in assembly.norms:
        norms.sort(key=lambda norm: norm.step)
    _close(comparison, ranks)


def _mapped(
    engine: Engine, comparison: Comparison, kind: Callable[[Comparison], Any], runs: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Share | Failed]]:
    shares = [_share_of(comparison, ranks) for ranks in runs]
    return engine.map(_compared, [(kind, share) for share in shares])


def _share_of(comparison: Comparison, ranks: Sequence[int]) -> Comparison:
    """Return the comparison of some ranks, with nothing found yet."""
    found = copy.copy(comparison)
    found.runs = [capture.narrowed(ranks) for capture in comparison.runs]
    found.captures = found.runs[0], found.runs[1]
    found.overlap = comparison.overlap.of(found.captures)
    found.overviews = [Overview(capture) for capture in found.runs[: len(comparison.overviews)]]
    found.ranks, found.names = list(ranks), Vocabulary()
    found.origins = {rank: comparison.origins[rank] for rank in ranks}
    found.recorded = [{rank: held[rank] for rank in ranks} for held in comparison.recorded]
    found.exchange = Kept(comparison.exchange.ranks, comparison.exchange.limited)
    found.passes = {}
    for name in COUNTED:
        value = getattr(comparison, name)
        if name != "uncompared":
            setattr(found, name, [] if isinstance(value, list) else type(value)())
    return found


def _compared(given: tuple[Callable[[Comparison], Any], Comparison]) -> Share:
    """Compare a share; runs in a worker."""
    comparison = given[1]
    before = [(len(capture.problems), len(capture.lost)) for capture in comparison.runs]
    assembly = given[0](comparison)
    comparison.run(assembly.add, beside=norms_of)
    findings = [(suspect, assembly.findings[id(suspect)]) for suspect in comparison.suspects]
    light = {
        rank: Origins(seen=of.seen, imported=of.imported, gradients=of.gradients, step=of.step)
        for rank, of in comparison.origins.items()
    }
    comparison.exchange.unknown.clear()  # `Comparison.run` has said it
    return Share(
        comparison.ranks, {name: getattr(comparison, name) for name in COUNTED},
        {name: getattr(assembly, name) for name in GATHERED}, findings, comparison.exchange, light,
        [one.told() for one in comparison.overviews], comparison.passes,
        [(run.problems[a:], run.lost[b:]) for run, (a, b) in zip(comparison.runs, before, strict=True)],
    )  # fmt: skip


def _take(assembly: Any, share: Share) -> None:
    """Take in what a worker found; shares come in the order of their ranks."""
    comparison: Comparison = assembly.comparison
    for name, value in share.counted.items():
        setattr(comparison, name, merged(getattr(comparison, name), value))
    for name, value in share.gathered.items():
        setattr(assembly, name, merged(getattr(assembly, name), value))
    assembly.findings |= {id(suspect): finding for suspect, finding in share.findings}
    for step, given in share.exchange._given.items():
        for key, by_rank in given.items():
            comparison.exchange._given[step].setdefault(key, {}).update(by_rank)
    for step, asked in share.exchange._open.items():
        comparison.exchange._open[step] += asked
    comparison.origins |= share.origins
    comparison.passes |= share.passes
    for overview, told in zip(comparison.overviews, share.overviews, strict=True):
        overview.count_in(*told)
    for capture, (problems, lost) in zip(comparison.runs, share.problems, strict=True):
        capture.problems += problems
        capture.lost += lost


def _close(comparison: Comparison, ranks: list[int]) -> None:
    """Answer what ranks ask of each other, which takes all of them, and put what was found into the order of steps."""
    for found in (comparison.suspects, comparison.unmatched):
        found.sort(key=lambda one: one.step if isinstance(one, Suspect) else one[1].step)
    del comparison.unmatched[200:]
    for capture, overview in zip(comparison.runs, comparison.overviews, strict=False):
        overview.add_the_rest({place for place in capture.sizes if place[0] in comparison.exchange.ranks})
    overviews, comparison.overviews, comparison.ranks = comparison.overviews, [], []
    comparison.run()
    comparison.overviews, comparison.ranks = overviews, ranks


def merged(mine: Any, theirs: Any) -> Any:
    """Return what two workers gathered as one of them would have: counts and tables of both, and of what is said once mine."""
    if isinstance(mine, bool):
        return mine or theirs
    if isinstance(mine, (int, Counter)):
        return mine + theirs
    if isinstance(mine, dict):
        both = {key: merged(mine[key], value) for key, value in theirs.items() if key in mine and isinstance(value, (list, set))}
        return {**theirs, **mine, **both} if both else {**mine, **{key: value for key, value in theirs.items() if key not in mine}}
    if isinstance(mine, set):
        return mine | theirs
    if isinstance(mine, list):
        words = all(isinstance(one, str) for one in (*mine, *theirs))
        return list(dict.fromkeys([*mine, *theirs])) if words else mine + theirs
    if type(mine) is tuple:
        return tuple(merged(a, b) for a, b in zip(mine, theirs, strict=True))
    if mine is None or isinstance(mine, str):
        return mine or theirs
    if hasattr(mine, "__dict__"):
        for name, value in vars(theirs).items():
            setattr(mine, name, merged(getattr(mine, name), value))
    return mine
