"""Which suspects are culprits: of all ranks and steps, those that no earlier one explains, in order of execution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trueup.comparison.graph.names import normalised
from trueup.comparison.graph.streams import NONE
from trueup.comparison.verdict.locate import Suspect

GONE = 1.0
"""Relative error of inputs from which on nothing of the baseline's is left in them: what they explain, formulas of first order, is
not known. Of 125,000 healthy calls behind single faults (six models of tests/zoo) whose inputs were closer, none was certain but
what ran around a faulty call or read what it saved; of 7,724 beyond it 28 were."""


def rank_culprits(suspects: Iterable[Suspect], tainted: Mapping[int, tuple[int, int]] | None = None) -> list[Suspect]:
    """Put the culprits first, in the order in which their results were there, and leave out what an earlier one explains.

    A later one is a culprit of its own where its error stays when those of its inputs are accounted for; a backward call may also
    read what its forward call saved, and an input that no recorded call made may have come from an earlier difference unseen.
    Certain ones go before those that could be rounding. Within a step, what happens on a rank after another one's difference has
    reached it comes last; the execution numbers of ranks are of one order only where they run the same program.

    Args:
        suspects: of all ranks and steps.
        tainted: by rank, the step and place from which on it computes with what another rank got wrong.
    """
    reached = tainted or {}
    culprits: list[Suspect] = []

    def order(s: Suspect) -> tuple[int, bool, int, int, int]:
        return s.step, s.rank in reached and (s.step, s.place) > reached[s.rank], s.ready, s.place, s.rank

    ordered = _first_of_a_kind(_innermost(sorted(suspects, key=order)))
    known: set[tuple[int, int, int | None]] = set()
    for suspect in sorted(ordered, key=lambda s: not s.certain):
        if not suspect.certain and culprits:
            continue
        together = suspect.phase == "collective" and any(c.rank != suspect.rank for c in culprits)  # it shows on all ranks
        saved = (suspect.rank, suspect.step, suspect.judged.call.candidate.forward_seq) in known
        carried = suspect.kind == "input" or suspect.judged.error_in >= GONE  # an input no call made may hold it unseen
        if not culprits or not (saved or ((together or carried) and not suspect.independent)):
            culprits.append(suspect)
            known.add((suspect.rank, suspect.step, suspect.place))
    return culprits


def of_a_kind(culprits: Iterable[Suspect]) -> list[list[Suspect]]:
    """Put culprits together that are one finding: an operator that is broken wherever it runs, an option that all calls are given.

    All that draws random numbers is one: it draws them from one generator.
    """
    found: dict[tuple[str, ...], list[Suspect]] = {}
    for culprit in culprits:
        found.setdefault(_kind(culprit), []).append(culprit)
    return list(found.values())


def _innermost(ordered: Iterable[Suspect]) -> list[Suspect]:
    """Leave out calls that began before another suspect and had their results after it: they may have computed with its results.

    So a backward that recomputes its forward is not blamed for what the recomputation got wrong. A communication goes on beside
    what runs meanwhile, and computes with none of it.
    """
    latest: dict[tuple[int, int], int] = {}
    found = []
    for suspect in ordered:
        at = suspect.step, suspect.rank
        if suspect.phase == "collective" or suspect.began >= latest.get(at, NONE):
            found.append(suspect)
        latest[at] = max(latest.get(at, NONE), suspect.began)
    return found


def _first_of_a_kind(ordered: list[Suspect]) -> list[Suspect]:
    """Make certain the earliest suspect of the operator that is the first certain one.

    A broken operator shows wherever it runs; where its error is small it could be rounding, were it not for the others.
    """
    certain = next((s for s in ordered if s.certain), None)
    if certain is None or certain.kind != "operator":
        return ordered
    wanted = _kind(certain)
    first = next(s for s in ordered if s.kind == "operator" and _kind(s) == wanted)
    first.certain = True
    return ordered


def _kind(suspect: Suspect) -> tuple[str, ...]:
    call = suspect.judged.call.candidate
    return (suspect.kind,) if suspect.kind == "random" else (suspect.kind, call.level, call.phase, normalised(call.op))
