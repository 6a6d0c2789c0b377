"""What casts and dtypes add to another verdict: sentences for the notes of a comparison and of an overflow report."""

from __future__ import annotations

from trueup.analysis.audit.casts import Cast, dangerous_casts
from trueup.analysis.audit.census import census, difference
from trueup.analysis.audit.operators import is_product
from trueup.analysis.audit.reading import dtypes
from trueup.foundation.model import Finding
from trueup.foundation.store import Capture


def cast_note(capture: Capture, steps: list[int], ranks: list[int]) -> list[str]:
    """Name the first dangerous cast of a run of which no Inf tells, for an overflow is found by what it makes."""
    found = [cast for cast in dangerous_casts(capture, step=steps, rank=ranks).dangerous if cast.kind != "overflow"]
    return [f"dangerous cast{_more(found)}: {found[0].sentence}"] if found else []


def notes_beside(captures: tuple[Capture, Capture], culprit: Finding) -> list[str]:
    """Say of a culprit's step which dangerous casts only the candidate has, and where the two runs compute in other dtypes."""
    baseline, candidate = captures
    rank, step = culprit.rank, culprit.step
    if not all(rank in capture.ranks and step in capture.steps for capture in captures):
        return []
    seen = {_key(cast) for cast in dangerous_casts(baseline, step=step, rank=rank).dangerous}
    found = [cast for cast in dangerous_casts(candidate, step=step, rank=rank).dangerous if _key(cast) not in seen]
    notes = [f"dangerous cast{_more(found)} in the candidate alone: {found[0].sentence}"] if found else []
    there, here = (dtypes(capture, rank, step, is_product) for capture in captures)
    if there == here and len(here) == 1:  # as a rule; to count the products takes time
        return notes
    other = difference(census(baseline, step=step, rank=rank), census(candidate, step=step, rank=rank))
    return [*notes, *([other.sentence] if other.differs else [])]


def _key(cast: Cast) -> tuple[str, str, str, int, str]:
    return cast.place.phase, cast.place.scope, cast.place.op, cast.place.ordinal, cast.kind


def _more(found: list[Cast]) -> str:
    return "" if len(found) == 1 else f"s ({len(found):,}; trueup check lists them), the first"
