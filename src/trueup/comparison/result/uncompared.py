"""What was not compared, or not call by call, counted part by part; and why no verdict could be reached.

What there is to say when two captures are of different frameworks, or lay tensors out in other ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from trueup.comparison.graph.streams import Row, distinct
from trueup.comparison.measures.measure import STATISTICS, Errors
from trueup.comparison.normalise.translated import Translated
from trueup.comparison.verdict.compare import Comparison, Said
from trueup.comparison.verdict.evidence import known_differences
from trueup.comparison.verdict.judged import Part, Side
from trueup.comparison.verdict.origins import Origins
from trueup.comparison.verdict.overlap import Mixed
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.store import Capture
from trueup.foundation.store.declared import framework_of


class Uncompared:
    """Counts it."""

    def __init__(self) -> None:
        self._compared = self._by_statistics = self._untold = self._rewritten = 0
        """Matched calls, those compared by another tool's statistics alone, those of which its dump lacks gradients that nobody
        reads, and calls that are written another way on the other side."""
        self._dead_ends: list[tuple[Side, Row]] = []
        self._not_compared: Counter[Reason] = Counter()
        self._left_open: dict[Reason, Row] = {}  # why calls were not compared, and the first of them
        self.of_parts: list[Reason] = []  # what there is to know of single parts, whatever the verdict

    def add(self, part: Part) -> None:
        """Look at a part."""
        errors, verdicts = part.verdicts.errors, part.verdicts
        self._compared += len(verdicts)
        self._by_statistics += len(distinct(errors.pair[errors.method == STATISTICS]))
        self._untold += verdicts.untold
        self._rewritten += max(part.rewritten)
        self._dead_ends += part.dead_ends
        self._not_compared.update(verdicts.incomparable.values())
        for pair, why in verdicts.incomparable.items():
            if why not in self._left_open:
                self._left_open[why] = errors.streams[1].row(int(errors.calls[1][pair]))
        if part.elsewhere is not None:
            self.of_parts.append(part.elsewhere)
        if part.replaced is not None:
            self.of_parts.append(Why.REPLACED(errors.distance(part.replaced).slot, part.reader(part.replaced).key))

    def reasons(self, found: Comparison) -> list[Said]:
        """Return what keeps two runs from being called aligned, and why most calls that were not compared were not."""
        why_not = self._not_compared.most_common(1)
        first = [] if found.outputs else self._without_outputs(found)
        return [*first, *found.keeping, *(Why.NOT_COMPARED(calls, why, self._left_open[why].key) for why, calls in why_not)]

    def _without_outputs(self, found: Comparison) -> list[Reason]:
        if found.overlap.levels == ["module"] and (found.covered or found.uncovered):
            return [Why.NO_MODULE(Why.SHOWS_OPTIMIZER(found.overlap.finer()))]
        return [Why.NO_OUTPUT()] if self._compared else []

    def dead_ends(self) -> list[Reason]:
        """Return how many calls compute what nobody reads."""
        return [Why.DEAD_ENDS(len(self._dead_ends), self._dead_ends[0][0], self._dead_ends[0][1].key)] if self._dead_ends else []

    def roughly(self, *, mixed: bool) -> list[Said]:
        """Return what another tool's dump did not tell; between frameworks its statistics are said elsewhere."""
        found = [Why.STATISTICS(self._by_statistics, self._compared)] if self._by_statistics and not mixed else []
        return [*found, *([Why.INNER(self._untold)] if self._untold else [])]

    def rewritten(self) -> list[Reason]:
        """Return how many calls are written another way on the other side."""
        return [Why.REWRITTEN(self._rewritten)] if self._rewritten else []


def unseen(ranks: Iterable[Origins]) -> list[Reason]:
    """Return what was not seen of a training's weights, if there is anything."""
    held = list(ranks)
    seen = [set().union(*(origins.seen[side] for origins in held)) for side in (0, 1)]
    gradients = any(origins.gradients for origins in held)
    trains, optimizer = ("backward" in seen[0] | seen[1]), ("optimizer" in seen[0] | seen[1])
    if optimizer and any(origins.lacks_optimizer(side) for origins in held for side in (0, 1)):
        return [Why.NO_OPTIMIZER_DUMPED()] if trains else []
    return [Why.NO_OPTIMIZER(gradients)] if trains and not optimizer else []


class Frameworks:
    """Gathers what was compared in other ways than within one framework."""

    def __init__(self, captures: Sequence[Capture]) -> None:
        self._captures = captures
        self._is_translated = any(isinstance(capture, Translated) for capture in captures)
        self._first_shapes: Reason | None = None
        self._lone = self._bounded = self._known = 0

    def add(self, errors: Errors) -> None:
        """Count in one part of a comparison."""
        if not self._is_translated:
            return
        self._lone += errors.lone_weights
        self._bounded += int(np.count_nonzero(errors.method == STATISTICS))
        shapes = [n for n, reason in errors.reasons.items() if reason.why is Why.SHAPES and errors.outputs[n]]
        if shapes and self._first_shapes is None:
            n = min(shapes)
            call = errors.streams[1].row(int(errors.calls[1][errors.pair[n]]))
            self._first_shapes = Why.FIRST_SHAPE(call.key, errors.reasons[n])
        known = known_differences(errors)
        self._known += int(np.count_nonzero((known > 0) & (errors.absolute > 0)))

    def notes(self, mixed: Mixed) -> list[Reason]:
        """Return each thing to know; ``mixed`` is what was not compared."""
        if not self._is_translated:
            return []
        first, second = (framework_of(capture) for capture in self._captures)
        unread = min(mixed.unread, default=None)
        found = (
            self._first_shapes,
            None if unread is None else Why.WRITTEN_UNREAD(unread[1], unread[0]),
            Why.PACKED_GRADIENTS(mixed.packed) if mixed.packed else None,
            Why.FRAMEWORKS(first, second) if first != second else None,
            Why.ORDERLESS(self._bounded) if self._bounded else None,
            Why.VARIANCES(self._known) if self._known else None,
            Why.PACKED(self._lone) if self._lone else None,
        )
        return [reason for reason in found if reason is not None]
