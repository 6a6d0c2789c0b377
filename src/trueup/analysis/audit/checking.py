"""`trueup.check`: casts, dtypes and, beside a second run, what differs in them and in the graph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trueup.analysis.audit.casts import Casts, dangerous_casts
from trueup.analysis.audit.census import Census, Difference, census, difference
from trueup.analysis.audit.reading import Steps
from trueup.analysis.audit.similarity import Similarity, similarity
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.declared import require_records


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

    @property
    def exit_code(self) -> int:
        """1: a cast is dangerous, or the runs differ in dtypes or calls; else 2: some of that could not be told; else 0."""
        differs = (self.dtypes is not None and self.dtypes.differs) or (self.graph is not None and not self.graph.same)
        if self.casts.dangerous or differs:
            return 1
        beside = self.against is not None and not (
            self.dtypes is not None and self.dtypes.told and self.graph is not None and self.graph.whole
        )
        return 2 if self.casts.unsure or beside else 0

    @property
    def sentences(self) -> tuple[tuple[str, str], ...]:
        """Name and conclusion of each check."""
        found = [("casts", self.casts.sentence), ("precision", self.census.sentence)]
        if self.dtypes is not None:
            found.append(("dtypes", self.dtypes.sentence))
        if self.graph is not None:
            found.append(("graph", self.graph.sentence))
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join(f"{name:9}  {sentence}" for name, sentence in self.sentences)


def check(
    capture: str | Path | Capture, *, against: str | Path | Capture | None = None, step: Steps = None, rank: Steps = None
) -> Check:
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

    Raises:
        TrueupError: there is no such capture, step or rank.
    """
    given = open_capture(capture)
    require_records(given)
    casts, counted = dangerous_casts(given, step=step, rank=rank), census(given, step=step, rank=rank)
    if against is None:
        return Check(str(given.path), casts, counted)
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
    return Check(str(given.path), casts, counted, str(other.path), dtypes, graph, notes)
