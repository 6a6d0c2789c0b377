"""What leaves its own past while a training runs: spikes, drift, dead and frozen layers, NaN, replicas that part.

A series is judged against a robust baseline of its last `WINDOW` values, on a log scale where it is positive: a line through the
medians of its two halves, and the MAD around that. No rule looks before a window is full, but the one for NaN and Inf.

- **spike**: over ``z`` deviations above the line. ``z`` is the normal quantile at which one of all series would do so in
  `HORIZON` steps (Bonferroni over series and steps), widened by the tail that the window shows: its largest deviation beside the
  one that normal noise has.
- **drift**: a two-sided CUSUM of clipped deviations from the median (Page 1954; k = 1), in units of their long-run deviation
  under the lag-1 correlation and the tail of the window; its limit gives one alarm of all series in `HORIZON` steps for normal
  noise (Siegmund 1985). Only a move by the factor of the kind counts (`moved`): what is significant and small is no alert.
- **frozen**: the update ratio is exactly 0 three times, while the gradient is not; skipped steps are left out.
  **vanishing**: a layer's gradient is below 1e-7 of the whole three times, and was above 1e-6. **dead**: outputs are zeros or
  saturated (99.9 %) three times, and were not.
- **desync**: a parameter's digest differs from the neighbour rank's, where it was equal before.

Alerts of one step are one: the earliest in forward order is named, the others are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.monitor.kinds import kind_of, spoken
from trueup.foundation.store import durable, layout
from trueup.foundation.words.wording import counted, number
from trueup.recording.engine.monitoring import Block, Names

Floats = NDArray[np.float64]
WINDOW = 128
AGAIN = 16  # values after which a baseline is taken anew
HORIZON = 100_000  # steps in which healthy normal noise gives one alert of a rule, over all series
FLOOR = 0.02  # least deviation that counts, on the log scale or of a linear series' size: 2 % of noise is no event
NORMAL, NORMAL_LARGEST = 1.4826, 2.9  # of a MAD; the largest deviation that 128 normal values have in the middle
TAIL = 2.0  # power of the tail beside that: thresholds of Laplace noise come out three times as far
KEEPS = 0.995  # of a tail, by each new baseline: a rare outlier is remembered for thousands of steps
REFERENCE, CLIP = 1.0, 4.0  # CUSUM's k, and what a single value may add
TIMES = 3  # in a row, for what is exactly zero
MUTED = 128  # values after an alert for which that series gives none
VANISHED, HEALTHY = 1e-7, 1e-6
DEAD, ALIVE = 0.999, 0.9
RULES = ("not finite", "desync", "frozen", "dead", "vanishing", "spike", "drift")


@dataclass(frozen=True, slots=True)
class Alert:
    """What left its past in a step."""

    step: int
    rank: int
    rule: str
    series: str
    value: float | str
    said: str
    others: tuple[str, ...] = ()  # series with an alert in the same step, in forward order


class Alerts:
    """Judges the steps of a rank, as they come."""

    def __init__(self, directory: Path | None, rank: int, world: int) -> None:
        self._directory, self._rank, self._world = directory, rank, world
        self._blocks: dict[int, _Past] = {}
        self._order: dict[str, int] = {}  # scopes in forward order
        self._judged = 0  # series
        self._gradients: dict[str, float] = {}  # of layers in the present step
        self._replicas = _Replicas(directory, rank, world)

    def take(self, step: int, blocks: Sequence[Block]) -> list[Alert]:
        """Take a step's numbers and return the alert that they give, if any."""
        found: list[tuple[int, int, str, float, str]] = []  # rule, place, series, value, words
        skipped = any(names[0] == "skipped" and bool(values[0]) for names, values in blocks)
        for names, values in blocks:
            past = self._blocks.get(id(names))
            if past is None or past.names is not names:
                past = self._blocks[id(names)] = self._new(names)
            if names[0].startswith("digest/"):
                for name in self._replicas.take(step, names, values):
                    said = f"the parameter {name[7:]} is no longer the same on ranks {self._rank - 1} and {self._rank}"
                    found.append((RULES.index("desync"), self._place(name), name, math.nan, said))
            elif past.judged and not (skipped and past.of_updates):
                for rule, place, value, words in past.take(values, self._judged):
                    name = names[place]
                    found.append((RULES.index(rule), self._place(name), name, value, words))
        if not found:
            return []
        found.sort(key=lambda one: (one[0] > 1, one[1], one[0]))  # NaN and ranks that part first, then forward order
        first, _, series, value, words = found[0]
        others = tuple(dict.fromkeys(name for _, _, name, _, _ in found if name != series))
        more = f"; so did {counted(len(others), 'series', 'series')} after it" if others else ""
        said = f"step {step}, rank {self._rank}: {words}{more}"
        held = value if math.isfinite(value) else str(value)
        return [Alert(step, self._rank, RULES[first], series, held, said, others[:16])]

    def _new(self, names: Names) -> _Past:
        if len(self._blocks) > 4096:
            self._blocks.clear()
            self._judged = 0
        for name in names:
            self._order.setdefault(name.partition("/")[2], len(self._order))
        past = _Past(names, self._gradients)
        self._judged += past.judged
        return past

    def _place(self, name: str) -> int:
        scope = name.partition("/")[2]
        return self._order.get(scope, 0) if scope else 1 << 30  # loss and whole norms are what all layers make


class _Past:
    """The last values of the series of a block."""

    def __init__(self, names: Names, gradients: dict[str, float]) -> None:
        self.names, self._gradients = names, gradients
        rules = [kind_of(name).alerts for name in names]
        self._at = np.array([k for k, held in enumerate(rules) if held and "desync" not in held], np.intp)
        self.judged = len(self._at)
        own = [names[k] for k in self._at]
        self._scopes = [name.partition("/")[2] for name in own]
        self._log = np.array([kind_of(name).scale == "log" for name in own], bool)
        self._moved = np.log([kind_of(name).moved for name in own]) if own else np.zeros(0)
        self._spikes, self._up, self._down, self._frozen, self._vanishing, self._dead = (
            np.array([bool(wanted & set(kind_of(name).alerts)) and (rule != "vanishing" or "/" in name) for name in own], bool)
            for rule, wanted in (
                ("spike", {"spike"}), ("up", {"drift", "drift_up"}), ("down", {"drift"}), ("frozen", {"frozen"}),
                ("vanishing", {"vanishing"}), ("dead", {"dead"}),
            )
        )  # fmt: skip
        k = self.judged
        self.of_updates = bool(self._frozen.any())
        self._has_exact = bool((self._frozen | self._vanishing | self._dead).any())
        self._ring, self._count = np.zeros((WINDOW, k)), 0
        self._middle, self._slope, self._scale = np.zeros(k), np.zeros(k), np.ones(k)
        self._tail, self._long = np.ones(k), np.ones(k)
        self._sums, self._since = np.zeros((2, k)), np.zeros(k)
        self._muted, self._streak, self._was_bad = np.zeros(k, np.int64), np.zeros(k, np.int64), np.zeros(k, bool)
        self._alive = np.zeros(k, bool)
        self._limits = (0, 0.0, 0.0)
        self._is_total = names == ("gradient_norm",)
        self._is_gradients = names[0].startswith("gradient_norm/")

    @np.errstate(divide="ignore", invalid="ignore", over="ignore")
    def take(self, values: Floats, series: int) -> Iterable[tuple[str, int, float, str]]:
        """Yield rule, place in the block, value and words of what leaves its past."""
        x = np.asarray(values, np.float64)[self._at]
        if self._is_total:
            self._gradients[""] = float(x[0])
        if self._is_gradients:
            self._gradients.update(zip(self._scopes, x.tolist(), strict=True))
        bad = ~np.isfinite(x)
        found: list[tuple[str, int, str]] = []
        for place in (bad & ~self._was_bad).nonzero()[0]:
            found.append(("not finite", int(place), f"{spoken(self.names[self._at[place]])} is NaN or Inf"))
        self._was_bad = bad
        y = np.where(self._log, np.log(np.maximum(x, 1e-300)), x)
        ready = self._count >= WINDOW
        known = self._middle if ready else x
        if ready:
            y = np.where(bad, known, y)
            found += self._judge(x, y, bad, series)
        else:
            y = np.where(bad, 0.0, y)
        if self._has_exact:
            found += self._exact(x)
        most = 20 * self._scale  # one value must not be the tail for ever
        self._ring[self._count % WINDOW] = _within(y, self._middle - most, self._middle + most) if ready else y
        self._count += 1
        if self._count >= WINDOW and self._count % AGAIN == 0:
            self._learn()
        self._muted = np.maximum(self._muted - 1, 0)
        for rule, k, words in found:
            if not self._muted[k] or rule == "not finite":
                self._muted[k] = MUTED
                self._sums[:, k] = 0
                yield rule, int(self._at[k]), float(x[k]), words

    def _learn(self) -> None:
        """Take the baseline anew."""
        ring = np.roll(self._ring, -(self._count % WINDOW), axis=0)  # the oldest first
        half = WINDOW // 2
        first, second = np.median(ring[:half], axis=0), np.median(ring[half:], axis=0)
        self._slope = (second - first) / half
        self._middle = (first + second) / 2
        rest = ring - (self._middle + self._slope * (np.arange(WINDOW)[:, None] - (WINDOW - 1) / 2))
        floor = np.where(self._log, FLOOR, FLOOR * np.maximum(np.abs(self._middle), 1e-12))
        own = NORMAL * np.median(np.abs(rest), axis=0)
        self._scale = np.maximum(own, floor)
        tail = np.abs(rest).max(axis=0) / np.maximum(own, floor) / NORMAL_LARGEST
        self._tail = np.maximum(1.0, np.maximum(np.minimum(tail, 10.0), KEEPS * self._tail))
        cut = np.clip(rest, -3 * self._scale, 3 * self._scale)
        correlation = (cut[1:] * cut[:-1]).sum(axis=0) / np.maximum((cut * cut).sum(axis=0), 1e-300)
        correlation = np.clip(correlation + 0.1, 0.0, 0.95)  # short windows tell too little of it
        self._long = np.sqrt((1 + correlation) / (1 - correlation))

    def _judge(self, x: Floats, y: Floats, bad: NDArray[np.bool_], series: int) -> list[tuple[str, int, str]]:
        spike_limit, sum_limit = self._limit(max(series, 1))
        ahead = (WINDOW - 1) / 2 + 1 + self._count % AGAIN
        z = (y - self._middle - self._slope * ahead) / self._scale
        # A level that the line through two halves overshoots is no spike: it must be above the middle, too.
        over = np.minimum(z, (y - self._middle) / self._scale)
        spikes = self._spikes & ~bad & (over > spike_limit * self._tail**TAIL)
        found = []
        for k in spikes.nonzero()[0]:
            was = math.exp(self._middle[k]) if self._log[k] else self._middle[k]
            found.append(("spike", int(k), (
                f"{spoken(self.names[self._at[k]])} spikes to {number(float(x[k]), 3)}, {over[k]:.0f} robust deviations above "
                f"{number(float(was), 3)}, the median of its last {WINDOW} values"
            )))  # fmt: skip
        step = _within((y - self._middle) / self._scale, -CLIP, CLIP) / (self._long * np.sqrt(self._tail))
        up, down = self._sums
        self._since = np.where((up <= 0) & (down <= 0), self._middle, self._since)
        up[:] = np.where(bad, up, np.maximum(0, up + step - REFERENCE))
        down[:] = np.where(bad, down, np.maximum(0, down - step - REFERENCE))
        drifts = ((up > sum_limit) & self._up) | ((down > sum_limit) & self._down)
        if not drifts.any():
            return found
        moved = np.where(self._log, np.abs(y - self._since) > self._moved, np.abs(y - self._since) > 0.5 * np.abs(self._since))
        for k in (drifts & moved & ~spikes).nonzero()[0]:
            was = math.exp(self._since[k]) if self._log[k] else self._since[k]
            way = "up" if y[k] > self._since[k] else "down"
            found.append(("drift", int(k), (
                f"{spoken(self.names[self._at[k]])} drifts {way}, from {number(float(was), 3)} to {number(float(x[k]), 3)}"
            )))  # fmt: skip
        return found

    def _limit(self, series: int) -> tuple[float, float]:
        if self._limits[0] != series:
            rate = 1 / (HORIZON * series)
            z = NormalDist().inv_cdf(1 - rate) / 0.88  # a MAD of 128 values is off by 8 %, and a sixth of it is too small by 12 %
            h = math.log(2 * REFERENCE**2 / rate + 1) / (2 * REFERENCE) - 1.166
            self._limits = series, z, h / 0.88
        return self._limits[1:]

    def _exact(self, x: Floats) -> list[tuple[str, int, str]]:
        """Look for what is exactly nothing, three times in a row."""
        total = self._gradients.get("", math.nan)
        gradients = np.array([self._gradients.get(scope, math.nan) for scope in self._scopes]) if self._frozen.any() else x
        share = x / total if self._vanishing.any() else x
        frozen = self._frozen & (x == 0) & (gradients > 0) & np.isfinite(gradients)  # loss scaling skips what is not
        off = frozen | (self._vanishing & (share < VANISHED)) | (self._dead & (x > DEAD))
        self._streak = np.where(off, self._streak + 1, 0)
        self._alive |= (self._frozen & (x > 0)) | (self._vanishing & (share > HEALTHY)) | (self._dead & (x < ALIVE))
        found = []
        for k in ((self._streak == TIMES) & (self._alive | self._frozen)).nonzero()[0]:
            name = self.names[self._at[k]]
            scope = self._scopes[k]
            if self._frozen[k]:
                who = scope or "the model"
                found.append(("frozen", int(k), f"{who} is frozen: it has a gradient and its weights do not change"))
            elif self._vanishing[k]:
                small = number(float(x[k]), 3)
                found.append(("vanishing", int(k), f"the gradient of {scope} vanishes: {small} of {number(total, 3)}"))
            else:
                what = "zeros" if name.startswith("activation_zeros") else "saturated"
                found.append(("dead", int(k), f"{scope} is dead: {100 * x[k]:.4g} % of its outputs are {what}"))
            self._alive[k] = False
        return found


def _within(y: Floats, least: Floats | float, most: Floats | float) -> Floats:
    held: Floats = np.minimum(np.maximum(y, least), most)  # np.clip of so few numbers takes three times as long
    return held


class _Replicas:
    """Digests beside those of the rank before, one time later: by then both have written theirs. Two files take turns, and nothing
    is waited for."""

    def __init__(self, directory: Path | None, rank: int, world: int) -> None:
        self._directory, self._rank, self._world = directory, rank, world
        self._equal: set[str] | None = None
        self._before: tuple[int, int, Names, Floats] | None = None
        self._turn = 0

    def take(self, step: int, names: Names, values: Floats) -> list[str]:
        """Write these digests and return the parameters that part from the neighbour's of the time before."""
        if self._directory is None or self._world < 2:
            return []
        self._turn += 1
        mine = self._file(self._rank, self._turn)
        content = np.concatenate([[step, len(values)], values]).astype("<f8")
        with suppress(OSError):
            durable.write_file(mine, [content.tobytes()], sync=False)
        found = [] if self._before is None or self._rank == 0 else self._apart(*self._before)
        self._before = step, self._turn, names, np.array(values)
        return found

    def _apart(self, step: int, turn: int, names: Names, values: Floats) -> list[str]:
        try:
            held = np.frombuffer(self._file(self._rank - 1, turn).read_bytes(), "<f8")
        except (OSError, ValueError):
            return []
        if len(held) != len(values) + 2 or held[0] != step:
            return []
        same = held[2:] == values
        equal = {name for name, one in zip(names, same, strict=True) if one}
        if self._equal is None:
            self._equal = equal
            return []
        parted = [name for name in names if name in self._equal and name not in equal]
        self._equal &= equal
        return parted

    def _file(self, rank: int, turn: int) -> Path:
        assert self._directory is not None
        return self._directory / layout.rank_name(rank) / f"digests-{turn % 2}"


