"""What there is to say when the two captures are of different frameworks, or lay tensors out in other ways."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trueup.comparison.measures.measure import STATISTICS, Errors
from trueup.comparison.measures.why import Why
from trueup.comparison.normalise.dialects import framework_of
from trueup.comparison.normalise.translated import Translated
from trueup.comparison.normalise.updates import STEP
from trueup.comparison.verdict.quirks import known_differences
from trueup.report.reasons import in_words
from trueup.store import Capture


class Mixed:
    """Gathers what was compared in other ways than within one framework.

    Args:
        captures: baseline and candidate.
    """

    def __init__(self, captures: Sequence[Capture]) -> None:
        self._captures = captures
        self._translated = [capture for capture in captures if isinstance(capture, Translated)]
        self._first_shapes: str | None = None
        self._stepped = False
        """Whether what optimizers made of weights was compared."""
        self._lone_gradients = self._lone = self._bounded = self._known = 0

    def add(self, errors: Errors) -> None:
        """Count in one part of a comparison."""
        if not self._translated:
            return
        self._lone += errors.lone_weights
        self._lone_gradients += errors.lone_gradients
        stream = errors.streams[1]
        self._stepped |= bool((stream.op[errors.calls[1]] == stream.names.number(STEP)).any())
        self._bounded += int(np.count_nonzero(errors.method == STATISTICS))
        shapes = [n for n, reason in errors.reasons.items() if reason.why is Why.SHAPES and errors.outputs[n]]
        if shapes and self._first_shapes is None:
            n = min(shapes)
            call = errors.streams[1].row(int(errors.calls[1][errors.pair[n]]))
            why = in_words(errors.reasons[n])
            self._first_shapes = f"{call.scope or call.op}, {call.phase}, step {call.step} ({call.op}): {why}"
        known = known_differences(errors)
        self._known += int(np.count_nonzero((known > 0) & (errors.absolute > 0)))

    @property
    def is_blind(self) -> bool:
        """Whether something that both runs did was not compared."""
        return any(capture.updates.unseen for capture in self._translated) or self._are_gradients_blind

    @property
    def _are_gradients_blind(self) -> bool:
        return self._lone_gradients > 0 and not self._stepped

    def notes(self) -> list[str]:
        """Return a sentence for each thing to know."""
        if not self._translated:
            return []
        names = [framework_of(capture) for capture in self._captures]
        found = []
        if self._first_shapes is not None:
            found.append(f"the first result that has another shape is that of {self._first_shapes}")
        if unseen := sorted(set().union(*(capture.updates.unseen for capture in self._translated))):
            rank, step = unseen[0]
            found.append(
                f"what the optimizer wrote in step {step} of rank {rank} was not compared, for no later forward was recorded that "
                "reads it: record one forward more"
            )
        if self._are_gradients_blind:
            found.append(
                f"the gradients of {self._lone_gradients:,} weights were not compared, for one framework packs these with others: "
                "record an optimizer step and a forward after it, which show them"
            )
        if names[0] != names[1]:
            found.append(
                f"{names[0]} against {names[1]}: layers and functions that both have were compared, by the tables of "
                "trueup.frameworks; of optimizers the weights that they made"
            )
        if self._bounded:
            found.append(
                f"{self._bounded:,} tensors lie in another order on the two sides and were compared by what no order changes (min, "
                "max, mean, norm); capture with --detail tensor to compare their elements"
            )
        if self._known:
            found.append(
                "running variances differ as the frameworks define them (torch: of the unbiased variance of a batch, others: of "
                f"the biased one); {self._known:,} were allowed that much"
            )
        if self._lone:
            found.append(
                f"{self._lone:,} weights are packed with others in one framework: they were compared by what their layers made of "
                "them"
            )
        return found
