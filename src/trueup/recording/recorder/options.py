"""The options of a capture, from Python, from the command line or from the environment of an armed process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trueup.foundation.model import DETAILS, LEVELS, PHASES, TrueupError
from trueup.recording.recorder.filters import Patterns

Ranges = tuple[tuple[int, int | None], ...]
"""Half-open ranges of integers; an end of None is open."""

NumberSet = str | int | range | Iterable[int] | None


def parse_numbers(value: NumberSet, what: str) -> Ranges | None:
    """Read a set of step or rank numbers: ``range(0, 3)``, ``[0, 2]``, ``7``, ``"0:3"``, ``"0,2,5:"``; None means all.

    Raises:
        TrueupError: the value is none of these, or selects nothing.
    """
    if value is None:
        return None
    if isinstance(value, str):
        ranges = tuple(_parse_range(part.strip(), value, what) for part in value.split(","))
    elif isinstance(value, int):
        ranges = ((value, value + 1),)
    elif isinstance(value, range) and value.step == 1:
        ranges = ((value.start, value.stop),)
    else:
        numbers = list(value) if isinstance(value, Iterable) else [value]
        if not all(isinstance(n, int) for n in numbers):
            raise TrueupError(f"{what} {value!r} are no whole numbers: give e.g. 0:3 (0, 1 and 2), 0,2,5 or 10: (from 10 on)")
        ranges = tuple((n, n + 1) for n in numbers)
    if not any(stop is None or stop > start for start, stop in ranges):
        raise TrueupError(f"{what} {value!r} selects nothing: give e.g. 0:3 (0, 1 and 2), 0,2,5 or 10: (from 10 on)")
    return ranges


def _parse_range(part: str, whole: str, what: str) -> tuple[int, int | None]:
    start, colon, stop = part.partition(":")
    try:
        first = int(start or 0)
        return first, (int(stop) if stop else None) if colon else first + 1
    except ValueError:
        raise TrueupError(f"{what} {whole!r} is not a set of numbers: expected e.g. 0:3, 0,2,5 or 10:, got {part!r}") from None


def in_ranges(number: int, ranges: Ranges | None) -> bool:
    """Tell whether ``number`` is selected."""
    return ranges is None or any(start <= number and (stop is None or number < stop) for start, stop in ranges)


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What to capture. Build it with `CaptureOptions.of`, which checks every value."""

    levels: tuple[str, ...] = LEVELS
    detail: str = "stats"
    steps: Ranges | None = None
    ranks: Ranges | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    phases: tuple[str, ...] = PHASES
    on_error: Literal["continue", "stop"] = "continue"
    compile: Literal["off", "through"] = "off"
    shadow: dict[str, Any] | None = None
    """Fields of `execution.shadow_options.ShadowOptions`: operators are computed again, and judged, instead of recorded."""
    inputs_from: str | None = None
    """A capture of detail ``tensor`` whose inputs the modules, or calls, get instead of their own."""
    force: str | None = None
    """Level of the calls that get them."""
    stop: bool = False
    """End the run when the last of ``steps`` was recorded."""

    @classmethod
    def of(
        cls,
        *,
        level: str | Sequence[str] = LEVELS,
        detail: str = "stats",
        steps: NumberSet = None,
        ranks: NumberSet = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        phase: str | Sequence[str] | None = None,
        on_error: str = "continue",
        compile: str = "off",
        shadow: dict[str, Any] | None = None,
        inputs_from: str | None = None,
        force: str | None = None,
        stop: bool = False,
    ) -> CaptureOptions:
        """Check the options of `trueup.capture`.

        Raises:
            TrueupError: a value is unknown, or a selection selects nothing.
        """
        levels = _words("level", LEVELS if level == "all" else level, LEVELS) if shadow is None else ("aten",)
        if shadow is not None and compile == "through":
            raise TrueupError("a shadow run computes operators again, and compiled code has none: leave out --compile=through")
        phases = _words("phase", PHASES if phase is None else phase, PHASES)
        if not isinstance(detail, str):
            raise TrueupError(f"detail is {detail!r}: expected one of {', '.join(DETAILS)}")
        (detail,) = _words("detail", detail, DETAILS)
        if on_error not in ("continue", "stop"):
            raise TrueupError(f"on_error {on_error!r} is unknown: expected continue or stop")
        if compile not in ("off", "through"):
            raise TrueupError(f"compile {compile!r} is unknown: expected off or through")
        chosen = parse_numbers(steps, "steps")
        if stop and (chosen is None or any(end is None for _, end in chosen)):
            raise TrueupError("a run is stopped after the last step that is recorded: give steps with an end, e.g. --steps 0:3")
        includes, excludes = _patterns(include), _patterns(exclude)
        if force is not None and inputs_from is None:
            raise TrueupError("force says which calls get a baseline's inputs: name the baseline with inputs_from")
        if inputs_from is not None:
            force, levels = _forced(inputs_from, force, levels)
        Patterns(includes), Patterns(excludes)  # an unreadable pattern is reported now, not in the training run
        return cls(
            levels, detail, chosen, parse_numbers(ranks, "ranks"), includes, excludes, phases,
            "stop" if on_error == "stop" else "continue", "off" if compile == "off" else "through", shadow, inputs_from, force,
            stop,
        )  # fmt: skip

    def is_over(self, step: int) -> bool:
        """Tell whether the run is to end, as ``step`` begins and nothing that is wanted can follow."""
        return self.stop and self.has_all(step)

    def has_all(self, step: int) -> bool:
        """Tell whether no step from ``step`` on is wanted."""
        return self.steps is not None and all(end is not None and step >= end for _, end in self.steps)

    def to_json(self) -> str:
        """Encode for the environment of a child process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CaptureOptions:
        """Decode what `to_json` encoded."""
        values: dict[str, Any] = json.loads(text)
        for name in ("steps", "ranks"):
            if values[name] is not None:
                values[name] = tuple(tuple(r) for r in values[name])
        for name in ("levels", "include", "exclude", "phases"):
            values[name] = tuple(values[name])
        return cls(**values)


def _forced(baseline: str, force: str | None, levels: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the level whose calls are given a baseline's inputs, and those to record: what is above it shows the run's own."""
    from trueup.recording.execution.golden_inputs import GoldenInputs

    if force is not None:
        _words("force", force, LEVELS)
    found = GoldenInputs(baseline, force)
    below = LEVELS[LEVELS.index(found.levels[0]) :]
    kept = tuple(level for level in levels if level in below)
    if not kept:
        rest = f"levels above show the run's own: record {' or '.join(below)}"
        raise TrueupError(f"inputs are forced at level {found.level}, and {rest}")
    return found.level, kept


def _patterns(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _words(what: str, value: str | Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(value, str | Iterable):
        raise TrueupError(f"{what} is {value!r}: expected one or more of {', '.join(known)}")
    words = (value,) if isinstance(value, str) else tuple(value)
    for word in words:
        if word not in known:
            raise TrueupError(f"{what} {word!r} is unknown: expected {', '.join(known)}")
    if not words:
        raise TrueupError(f"no {what} selected: expected one or more of {', '.join(known)}")
    return tuple(word for word in known if word in words)
