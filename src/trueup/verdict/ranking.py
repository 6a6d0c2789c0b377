"""Which suspects are culprits: of all ranks and steps, those that no earlier one explains, in order of execution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trueup.verdict.locate import Suspect
from trueup.verdict.names import normalised

CLEAN_UNITS = 512
"""Inputs within this many units of roundoff are clean: what a few rounded operators leave behind."""

CONDITIONED = 16
"""How many units of its dtype a rounding may be for this: where a norm cancels it is more, and no sign of clean inputs."""


def rank_culprits(suspects: Iterable[Suspect], tainted: Mapping[int, tuple[int, int]] | None = None) -> list[Suspect]:
    """Put the culprits first, in order of execution, and leave out what an earlier one explains.

    Certain ones go before those that could be rounding. Within a step, what happens on a rank after another one's difference has
    reached it comes last; the execution numbers of ranks are of one order only where they run the same program.

    Args:
        suspects: of all ranks and steps.
        tainted: by rank, the step and place from which on it computes with what another rank got wrong.
    """
    reached = tainted or {}
    culprits: list[Suspect] = []

    def order(s: Suspect) -> tuple[int, bool, int, int]:
        return s.step, s.rank in reached and (s.step, s.place) > reached[s.rank], s.place, s.rank

    ordered = _first_of_a_kind(sorted(suspects, key=order))
    for suspect in sorted(ordered, key=lambda s: not s.certain):
        if not suspect.certain and culprits:
            continue
        together = suspect.phase == "collective" and any(c.rank != suspect.rank for c in culprits)  # it shows on all ranks
        if not culprits or (_is_clean(suspect) and not together and not _is_told(suspect, culprits)):
            culprits.append(suspect)
    return culprits


def _is_told(suspect: Suspect, culprits: list[Suspect]) -> bool:
    """Tell whether a culprit says it already: one other learning rate is passed to the update of every parameter."""
    if suspect.kind not in ("argument", "random"):
        return False
    op = normalised(suspect.judged.call.candidate.op)
    return any(
        (c.kind, c.phase, normalised(c.judged.call.candidate.op)) == (suspect.kind, suspect.phase, op) for c in culprits
    )


def _is_clean(suspect: Suspect) -> bool:
    judged = suspect.judged
    unit = min(judged.own / max(judged.row.ulps, 1.0), CONDITIONED * suspect.unit)
    return judged.error_in <= CLEAN_UNITS * max(unit, 2.0**-24)


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


def _kind(suspect: Suspect) -> tuple[str, str, str]:
    call = suspect.judged.call.candidate
    return call.level, call.phase, call.op
