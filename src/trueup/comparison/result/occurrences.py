"""Where the difference first appears on each rank, and which rank it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from trueup.comparison.verdict.criteria import Criterion
from trueup.comparison.verdict.exchange import Received
from trueup.comparison.verdict.judged import Suspect
from trueup.foundation.model import Occurrence
from trueup.foundation.words.sentence import occurrence_text


def occurrences(
    ranks: Sequence[int], certain: Iterable[Suspect], received: Iterable[Received], criterion: Criterion
) -> list[Occurrence]:
    """Return the first certain difference of each rank, in order of the ranks; a rank without one is left out.

    Args:
        ranks: that were compared.
        certain: suspects that are no rounding, culprits or what they explain.
        received: differences that came from other ranks.
        criterion: what is certain.
    """
    firsts: dict[int, tuple[tuple[int, int], Suspect, int | None]] = {}
    known = [(s, None) for s in certain] + [(r.suspect, r.sender) for r in received if r.suspect.judged.is_certain(criterion)]
    for suspect, sender in known:
        place = suspect.step, suspect.place
        if suspect.rank not in firsts or place < firsts[suspect.rank][0]:
            firsts[suspect.rank] = place, suspect, sender
    senders = {rank: sender for rank, (_, _, sender) in firsts.items()}
    return [_occurrence(*firsts[rank][1:], _cause(rank, senders)) for rank in ranks if rank in firsts]


def _cause(rank: int, senders: dict[int, int | None]) -> int | None:
    """Follow the senders to the rank where the difference arose; None where they lead nowhere, or in a circle."""
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        sender = senders.get(rank, -1)
        if sender is None:
            return rank
        rank = sender
    return None


def _occurrence(suspect: Suspect, sender: int | None, cause: int | None) -> Occurrence:
    call, judged = suspect.judged.call.candidate, suspect.judged
    error = max(judged.error_in, judged.error_out) if suspect.kind in ("input", "overwritten") else judged.error_out
    seq = (judged.call.baseline.seq if suspect.sides[0] else -1, call.seq if suspect.sides[1] else -1)
    made = Occurrence(
        call.rank, call.step, call.phase, call.level, call.scope, call.op, call.ordinal, seq, error, sender, cause, ""
    )
    return dataclasses.replace(made, sentence=occurrence_text(made))
