"""What is not compared of captures of two frameworks, for one packs or keeps to itself what the other hands out."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.comparison.measures.measure import Errors
from trueup.comparison.normalise.translated import Translated
from trueup.comparison.normalise.updates import STEP
from trueup.foundation.store import Capture


class Mixed:
    """What tells whether something was not compared of captures of two frameworks."""

    def __init__(self, captures: Sequence[Capture]) -> None:
        self._translated = [capture for capture in captures if isinstance(capture, Translated)]
        self._stepped = False  # whether what optimizers made of weights was compared
        self._lone_gradients = 0

    def add(self, errors: Errors) -> None:
        """Count in one part of a comparison."""
        stream = errors.streams[1]
        self._lone_gradients += errors.lone_gradients
        self._stepped |= bool((stream.op[errors.calls[1]] == stream.names.number(STEP)).any())

    @property
    def unread(self) -> set[tuple[int, int]]:
        """Ranks and steps whose optimizer wrote what no recorded forward reads."""
        return set().union(*(capture.updates.unseen for capture in self._translated))

    @property
    def packed(self) -> int:
        """How many gradients were not compared, for a framework packs their weights, nor what an optimizer made of them."""
        return 0 if self._stepped else self._lone_gradients
