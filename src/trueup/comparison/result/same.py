"""Two runs that are the same to the last bit: seen to be so before anything is judged, and said as the comparison would say it.

    manifests          alike, but for what is each process's own, and nothing is missing from a capture
    the last digests   alike: asked first, for a training that went another way does not come back
    the records        alike, place by place, and each tensor has a digest

Of such runs one is looked at for both: every call is equal, and nothing needs a reason. Whatever leaves a doubt (a hole, a tensor
without a digest, records that cannot be read, other settings) is the comparison's: `same_runs` then returns None, and a test wants
the same of both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.comparison.graph.streams import Array, Stream
from trueup.comparison.holes import Recorded
from trueup.comparison.result.gradients import Norm, norms_of, with_norms
from trueup.comparison.result.summary import count, equal_table, finish_table, no_optimizer, summarise, used_rules
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.criteria import load as load_criterion
from trueup.foundation.facts.slots import is_output
from trueup.foundation.model import Result
from trueup.foundation.store import Capture
from trueup.foundation.store.call_columns import NEEDED, SHARED, twice
from trueup.foundation.store.columns import Overview, Vocabulary, alike_in
from trueup.foundation.store.declared import Overlap, keeps_all, lender_of
from trueup.foundation.store.read_ahead import Ahead, Place, Records, places
from trueup.foundation.words.reasons import in_words
from trueup.foundation.words.sentence import verdict_lines

OWN = frozenset({"created", "command", "trueup_version", "pid", "argv", "writer", "written"})
"""What a manifest says of a process that no other process has, and that changes no number."""

APART = frozenset({"site", "payload_segment"})  # where a call stands in the code, and in which file its tensors lie

Captures = tuple[Capture, Capture]


def same_runs(baseline: Capture, candidate: Capture, level: str | Sequence[str] | None, criterion: str | Path) -> Result | None:
    """Return the result for two runs that are the same to the last bit; None where that cannot be said at a glance. Raises
    TrueupError as `Overlap` does."""
    judging = load_criterion(criterion)
    if judging.limits or not _are_alike(baseline, candidate):
        return None
    # What cannot be read is found again by the comparison, and said in its place.
    captures = baseline.narrowed(baseline.ranks), candidate.narrowed(candidate.ranks)
    overlap = Overlap(captures, level)
    if overlap.chosen is not None:
        return None
    found = places(captures, overlap.ranks, overlap.steps)
    if not _end_alike(captures, found[-1]):
        return None
    same = Same(captures, judging)
    with Ahead(captures, None, found, NEEDED, SHARED, sketches=False) as ahead:
        for at, place in enumerate(found):
            if not same.add(place, ahead.reads(at), is_first=place.steps[0] == overlap.steps[0]):
                return None
    return same.result(overlap) if same.outputs and not any(capture.problems for capture in captures) else None


def _are_alike(baseline: Capture, candidate: Capture) -> bool:
    """Tell whether two whole captures say the same of their runs."""
    for capture in (baseline, candidate):
        if capture.problems or capture.imported or not capture.rows or lender_of(capture) is not None:
            return False
    if baseline.sizes != candidate.sizes or _common(baseline.root) != _common(candidate.root):
        return False
    first, second = ({rank: _common(held) for rank, held in capture.ranks.items()} for capture in (baseline, candidate))
    return first == second


def _common(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: held for name, held in manifest.items() if name not in OWN}


def _end_alike(captures: Captures, place: Place) -> bool:
    first, second = (capture.records(["digest"], rank=place.rank, step=place.steps[-1]) for capture in captures)
    return bool(first.equals(second))


@dataclass
class Same:
    """Two runs that were the same so far; what there is to say of the candidate is gathered part by part."""

    captures: Captures
    criterion: Criterion
    outputs: int = 0  # results that were compared
    names: Vocabulary = field(default_factory=Vocabulary)
    recorded: dict[int, Recorded] = field(default_factory=dict)
    phases: set[str] = field(default_factory=set)
    gradients: bool = False  # whether a backward was recorded at a level that has the gradients of weights
    overflow: str | None = None  # the first NaN or Inf that both runs kept
    tables: list[pa.Table] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.overviews = [Overview(capture) for capture in self.captures]

    def add(self, place: Place, reads: Sequence[Records], *, is_first: bool) -> bool:
        """Look at a place; return whether both runs are the same there, and nothing is to be said of it."""
        if not _hold_alike(*(records(NEEDED) for records in reads)):
            return False
        if is_first and not _hold_alike(*(records(("invocation",)) for records in reads)):  # a generator may stand elsewhere
            return False
        candidate = self.captures[1]
        stream = Stream(reads[1], self.names, Vocabulary())
        whole = Recorded(keeps_all(candidate.root.get("config")), from_first=True)
        outputs = self.names.table(is_output)[stream.slot]
        if (~stream.has_digest & (stream.reads | outputs)).any() or not stream.is_ordered:
            return False
        if self.recorded.setdefault(place.rank, whole).hole(stream) is not None or twice(candidate, stream) is not None:
            return False
        for overview, records in zip(self.overviews, reads, strict=True):
            overview.add(records(Overview.COLUMNS))
        self._look(stream, outputs)
        self.tables.append(equal_table(stream, self.criterion, candidate.sites(place.rank)))
        self.norms += norms_of(stream)
        return True

    def _look(self, stream: Stream, outputs: Array) -> None:
        self.outputs += int(np.count_nonzero(outputs))
        self.phases |= {self.names.names[number] for number in np.unique(stream.phase).tolist()}
        self.gradients |= bool((stream.during("backward") & ~stream.of_level("module")).any())
        if self.overflow is None and (stream.not_finite & outputs & stream.keeps[stream.call]).any():
            from trueup.comparison.result.remarks import Overflowed  # with all of the comparison

            slots, found = np.arange(len(outputs)), Overflowed()
            found.look((stream, stream), (slots, slots), outputs, str(self.captures[1].path))
            self.overflow = found.note

    def result(self, overlap: Overlap) -> Result:
        """Return what is said of all."""
        table = finish_table(self.tables, set(), None)
        counts = count(table, [], 0, len(overlap.steps))
        runs = [summarise(c, o, overlap.ranks) for c, o in zip(self.captures, self.overviews, strict=True)]
        runs = with_norms(runs, [len(capture.ranks) for capture in self.captures], (self.norms, self.norms))
        always = [] if self.overflow is None else [self.overflow]
        notes = [*always, *overlap.notes, *no_optimizer(self.phases, gradients=self.gradients)]
        lines = verdict_lines("aligned", [], [], [], notes, counts, always=always)
        return Result(
            "aligned", "\n".join(lines), [], [], [], list(map(in_words, notes)), self.criterion.name, runs[0], runs[1], counts,
            table, used_rules(table, self.criterion), [],
        )  # fmt: skip


def _hold_alike(first: pa.Table, second: pa.Table) -> bool:
    return all(alike_in(name, first, second) for name in first.column_names if name not in APART)
