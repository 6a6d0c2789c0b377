"""Timing steps on a machine that is not ours alone: in chunks, of which the disturbed ones do not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from machine import Foreign

CHUNK_SECONDS = 0.25
"""A chunk is as many steps as take this long: the kernel counts CPU time in ticks of 10 ms."""

LONGEST = 2.5
"""Times the asked duration that is spent, where disturbances ask for more steps."""

DISTURBED = 0.4
"""Share of disturbed chunks from which on a measurement is made again, while there is patience."""

ENOUGH = 10.0
"""Seconds after which fewer than three chunks must do: oversubscribed cores make a step take seconds."""


@dataclass
class Chunk:
    """Some steps in a row: seconds of the wall clock, all and each; CPU of this thread, of others; a meter's reading."""

    each: list[float]
    wall: float
    cpu: float
    foreign: float
    metered: float

    @property
    def steps(self) -> int:
        return len(self.each)

    @property
    def disturbed(self) -> bool:
        return self.foreign > 0.02 + 0.05 * self.wall


def run(step: Callable[[], object], seconds: float, guess: float = 0.0, meter: Callable[[], float] = lambda: 0.0) -> list[Chunk]:
    """Run steps until undisturbed ones of ``seconds`` together are there, at least three chunks, within limits.

    Args:
        guess: seconds that a step takes, to size the chunks.
        meter: a count that goes up, read before and after each chunk.
    """
    chunks: list[Chunk] = []
    per_chunk = max(1, round(CHUNK_SECONDS / guess)) if guess else 1
    spent = kept = 0.0
    while (len(chunks) < 3 and spent < ENOUGH) or (kept < seconds and spent < LONGEST * seconds):
        foreign = Foreign()
        metered, cpu, clock = meter(), time.thread_time(), [time.perf_counter()]
        for _ in range(per_chunk):
            step()
            clock.append(time.perf_counter())
        each = [after - before for before, after in pairwise(clock)]
        chunk = Chunk(each, clock[-1] - clock[0], time.thread_time() - cpu, foreign.seconds(), meter() - metered)
        chunks.append(chunk)
        spent += chunk.wall
        kept += 0.0 if chunk.disturbed else chunk.wall
    return chunks


def mean(chunks: Sequence[Chunk], what: str = "wall") -> float:
    """Seconds a step, or what the meter counts. Disturbed chunks are left out; where most are, the least disturbed half counts.

    What was paid: a writer in the background makes a few steps slow, and they are part of the cost.
    """
    kept = undisturbed(chunks)
    return sum(getattr(c, what) for c in kept) / sum(c.steps for c in kept)


def median(chunks: Sequence[Chunk]) -> float:
    """Seconds of the step in the middle, of the steps that `mean` counts."""
    return statistics.median(seconds for c in undisturbed(chunks) for seconds in c.each)


def undisturbed(chunks: Sequence[Chunk]) -> list[Chunk]:
    kept = [c for c in chunks if not c.disturbed]
    if 2 * len(kept) >= len(chunks):
        return kept
    return sorted(chunks, key=lambda c: c.foreign / c.wall)[: (len(chunks) + 1) // 2]


def count(chunks: Sequence[Chunk]) -> int:
    return sum(c.steps for c in chunks)


def disturbed_share(chunks: Sequence[Chunk]) -> float:
    return sum(c.disturbed for c in chunks) / len(chunks)
