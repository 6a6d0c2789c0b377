"""Which calls are computed again: a share chosen by their key, the first of every kind, within the time a step may take longer."""

from __future__ import annotations

from time import perf_counter

import xxhash

from trueup.recording.execution.shadow_options import ShadowOptions

SHARE = "left out by the share of calls asked for"
TIME = "left out by the time a step may take longer"

LEAST_SHARE = 1 / 1024
"""Below it the share of a run with a time limit is not lowered."""


class Budget:
    """Decides call by call; of two runs with the same options and no time limit, the same calls.

    With a time limit the share of the next step follows from what this one spent, so that the calls are spread over the step
    instead of being those at its start; which they are then depends on the machine.
    """

    def __init__(self, options: ShadowOptions) -> None:
        self._options = options
        self.share = options.sample
        self._kinds: set[tuple[str, str, str]] = set()
        self.spent = 0.0
        """Seconds that the shadow took in this step."""
        self._began = perf_counter()
        self._limited = options.milliseconds is not None or options.ratio is not None

    def why_not(self, step: int, phase: str, scope: str, op: str, ordinal: int, dtype: str) -> str | None:
        """Say why a call is left out; None where it is to be computed again."""
        if self._limited and self.spent > self._limit():
            return TIME
        kind = phase, op, dtype
        if kind not in self._kinds:
            self._kinds.add(kind)
            return None
        if self.share >= 1:
            return None
        key = f"{self._options.seed}|{step}|{phase}|{scope}|{op}|{ordinal}"
        return None if xxhash.xxh3_64_intdigest(key.encode()) < self.share * 2.0**64 else SHARE

    def end_step(self) -> None:
        """Begin a new step."""
        if self._limited:
            limit = self._limit()
            change = min(2.0, max(0.1, 0.9 * limit / self.spent)) if self.spent > 0 else 2.0
            self.share = min(self._options.sample, max(LEAST_SHARE, self.share * change))
        self.spent, self._began = 0.0, perf_counter()

    def _limit(self) -> float:
        """Return the seconds that this step may take longer, as far as it has come."""
        options = self._options
        if options.milliseconds is not None:
            return options.milliseconds / 1000
        own = max(perf_counter() - self._began - self.spent, 0.0)
        return (options.ratio or 0.0) * own
