"""What there is to say of matched calls beside the verdict: other names, other arguments, dtypes, overflows, the truer side."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.comparison.graph.streams import Row
from trueup.comparison.result.dtypes import Dtypes
from trueup.comparison.result.findings import Frames, suspect_finding
from trueup.comparison.result.overflowed import Overflowed
from trueup.comparison.verdict import few
from trueup.comparison.verdict.judged import Part, Suspect
from trueup.foundation.model import Finding
from trueup.foundation.words.sentence import harmless_argument, hidden_note

RENAMES = 3
"""Scopes of another name that are shown."""


class Remarks:
    """Gathers them, part by part.

    Args:
        path: of the candidate.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._dtypes, self._overflowed = Dtypes(), Overflowed()
        self._renames: dict[str, str] = {}
        self._ignored = self._sketched = 0
        self._behind = 0
        self._first_behind: Row | None = None
        """How many calls there are of which the baseline is further from the truth than the candidate, and the first."""
        self._harmless: list[Finding] = []
        self._n_harmless = 0
        """Calls that were given other arguments and whose results agree within rounding: the first ones, and how many."""

    def add(self, part: Part, sites: tuple[Frames, Frames]) -> None:
        """Look at a part."""
        errors = part.verdicts.errors
        self._dtypes.add(errors)
        self._overflowed.add(errors, self._path)
        self._renames |= part.alignment.scopes
        self._ignored += part.alignment.ignored
        self._sketched += 0 if errors.all_same else few.hidden(errors)
        self._behind += len(part.behind)
        if self._first_behind is None and len(part.behind):
            self._first_behind = part.streams[1].row(int(part.alignment.candidate[part.behind[0]]))
        self._harmless += [suspect_finding(Suspect(j, "argument", False), *part.streams, sites) for j in part.harmless[:1]]
        self._n_harmless += len(part.harmless)

    def always(self) -> list[str]:
        """Return what is said in every verdict."""
        return [*self._dtypes.notes(), *([] if self._overflowed.note is None else [self._overflowed.note])]

    def notes(self) -> list[str]:
        """Return what a report says at its end."""
        found = []
        if self._renames:
            some = ", ".join(f"{c or 'no module'} is {b or 'no module'}" for c, b in list(self._renames.items())[:RENAMES])
            more = f" and {len(self._renames) - RENAMES} more" if len(self._renames) > RENAMES else ""
            found.append(f"scopes have other names in the candidate and were paired by what they execute: {some}{more}")
        if self._ignored:
            found.append(f"{self._ignored:,} calls were not compared, as the map file says")
        if self._harmless:
            found.append(harmless_argument(self._harmless[0], self._n_harmless - 1))
        if (first := self._first_behind) is not None:
            found.append(
                f"in {self._behind:,} calls the baseline is further from the float64 run than the candidate, first in "
                f"{first.op} ({first.key}): it is the less precise of the two there"
            )
        return found

    def blind(self) -> Sequence[str]:
        """Return what statistics may have hidden, where nothing deviates."""
        return hidden_note(self._sketched)
