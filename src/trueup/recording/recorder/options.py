"""The options of a capture and of a watch: from Python, from the command line or from the environment of an armed process.

Which calls are meant is said by patterns (globs such as ``neck.*`` or ``*softmax*``, and regular expressions between slashes). At
the end of a run `unused` says which option selected nothing, and what it could have selected.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trueup.foundation.model import DETAILS, LEVELS, PHASES, UsageError


class Patterns:
    """A set of patterns matched against the scope, the operator, and ``scope/op`` of a call."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._compiled = [_compile(p) for p in patterns]

    def __bool__(self) -> bool:
        return bool(self._compiled)

    def match(self, scope: str, op: str) -> bool:
        """Tell whether any pattern matches the call."""
        names = (scope, op, f"{scope}/{op}")
        return any(pattern.search(name) for pattern in self._compiled for name in names)

    def match_name(self, name: str) -> bool:
        """Tell whether any pattern matches a name alone."""
        return any(pattern.search(name) for pattern in self._compiled)


def _compile(pattern: str) -> re.Pattern[str]:
    is_regex = len(pattern) > 1 and pattern.startswith("/") and pattern.endswith("/")
    try:
        return re.compile(pattern[1:-1] if is_regex else rf"\A{fnmatch.translate(pattern)}")
    except re.error as error:
        raise UsageError(f"pattern {pattern} is not a regular expression: {error}") from None


Ranges = tuple[tuple[int, int | None], ...]
"""Half-open ranges of integers; an end of None is open."""

NumberSet = str | int | range | Iterable[int] | None


def parse_numbers(value: NumberSet, what: str) -> Ranges | None:
    """Read a set of step or rank numbers: ``range(0, 3)``, ``[0, 2]``, ``7``, ``"0:3"``, ``"0,2,5:"``; None means all. Raises
    UsageError where the value is none of these, or selects nothing."""
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
            raise UsageError(f"{what} {value!r} are no whole numbers: give e.g. 0:3 (0, 1 and 2), 0,2,5 or 10: (from 10 on)")
        ranges = tuple((n, n + 1) for n in numbers)
    if not any(stop is None or stop > start for start, stop in ranges):
        raise UsageError(f"{what} {value!r} selects nothing: give e.g. 0:3 (0, 1 and 2), 0,2,5 or 10: (from 10 on)")
    return ranges


def _parse_range(part: str, whole: str, what: str) -> tuple[int, int | None]:
    start, colon, stop = part.partition(":")
    try:
        first = int(start or 0)
        return first, (int(stop) if stop else None) if colon else first + 1
    except ValueError:
        raise UsageError(f"{what} {whole!r} is not a set of numbers: expected e.g. 0:3, 0,2,5 or 10:, got {part!r}") from None


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
    """Fields of `ShadowOptions`: operators are computed again, and judged, instead of recorded."""
    inputs_from: str | None = None
    """A capture of detail ``tensor`` whose inputs the modules, or calls, get instead of their own."""
    force: str | None = None
    """Level of the calls that get them."""
    stop: bool = False
    """End the run when the last of ``steps`` was recorded."""

    @classmethod
    def of(
        cls, *, level: str | Sequence[str] = LEVELS, detail: str = "stats", steps: NumberSet = None, ranks: NumberSet = None,
        include: str | Sequence[str] | None = None, exclude: str | Sequence[str] | None = None,
        phase: str | Sequence[str] | None = None, on_error: str = "continue", compile: str = "off",
        shadow: dict[str, Any] | None = None, inputs_from: str | None = None, force: str | None = None, stop: bool = False,
    ) -> CaptureOptions:  # fmt: skip
        """Check the options of `trueup.capture`; raise `UsageError` where a value is unknown, or a selection selects nothing."""
        levels = _words("level", LEVELS if level == "all" else level, LEVELS) if shadow is None else ("aten",)
        if shadow is not None and compile == "through":
            raise UsageError("a shadow run computes operators again, and compiled code has none: leave out --compile=through")
        phases = _words("phase", PHASES if phase is None else phase, PHASES)
        if not isinstance(detail, str):
            raise UsageError(f"detail is {detail!r}: expected one of {', '.join(DETAILS)}")
        (detail,) = _words("detail", detail, DETAILS)
        if on_error not in ("continue", "stop"):
            raise UsageError(f"on_error {on_error!r} is unknown: expected continue or stop")
        if compile not in ("off", "through"):
            raise UsageError(f"compile {compile!r} is unknown: expected off or through")
        chosen = parse_numbers(steps, "steps")
        if stop and (chosen is None or any(end is None for _, end in chosen)):
            raise UsageError("a run is stopped after the last step that is recorded: give steps with an end, e.g. --steps 0:3")
        includes, excludes = _patterns(include), _patterns(exclude)
        if force is not None and inputs_from is None:
            raise UsageError("force says which calls get a baseline's inputs: name the baseline with inputs_from")
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

    @property
    def planned(self) -> int | None:
        """How many steps are wanted, if they have an end."""
        ends = [(start, end) for start, end in self.steps or () if end is not None]
        return sum(end - start for start, end in ends) if self.steps and len(ends) == len(self.steps) else None

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
    from trueup.recording.execution.recorded import BaselineInputs

    if force is not None:
        _words("force", force, LEVELS)
    found = BaselineInputs(baseline, force)
    below = LEVELS[LEVELS.index(found.levels[0]) :]
    kept = tuple(level for level in levels if level in below)
    if not kept:
        rest = f"levels above show the run's own: record {' or '.join(below)}"
        raise UsageError(f"inputs are forced at level {found.level}, and {rest}")
    return found.level, kept


def _patterns(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _words(what: str, value: str | Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(value, str | Iterable):
        raise UsageError(f"{what} is {value!r}: expected one or more of {', '.join(known)}")
    words = (value,) if isinstance(value, str) else tuple(value)
    for word in words:
        if word not in known:
            raise UsageError(f"{what} {word!r} is unknown: expected {', '.join(known)}")
    if not words:
        raise UsageError(f"no {what} selected: expected one or more of {', '.join(known)}")
    return tuple(word for word in known if word in words)


# ---------------------------------------------------------------- of a watch
FRAMES = 64
BUDGET = 1 << 30
"""Bytes that a rank may write, all hits together."""
STOPPED = 3
"""Exit code of a run that was stopped."""


class WatchStopped(SystemExit):
    """A watched run was stopped after as many hits as were asked for; its code is 3. It is no ``Exception``, so a training loop
    that survives exceptions does not survive it."""


SHADOW_DTYPES = ("float64", "float32")
LARGEST_MB = 1024.0
"""Tensors of more megabytes are not shadowed unless asked: the reference holds them widened, on another device perhaps."""

_SHADOW_TIME = re.compile(r"([0-9.]+)\s*(ms|s|x)")


@dataclass(frozen=True, slots=True)
class ShadowOptions:
    """Build it with `ShadowOptions.of`, which checks every value."""

    reference: str = "cpu"
    """Device that computes each call again."""
    dtype: str = "float64"
    sample: float = 1.0
    """Share of the calls that is computed again, chosen by seed and the call's key; the first of each kind always is."""
    seed: int = 0
    milliseconds: float | None = None
    """Most that a step may take longer; None: no limit."""
    ratio: float | None = None
    """The same as a multiple of the step's own time."""
    largest_mb: float = LARGEST_MB
    """Megabytes of the largest tensor of a call that is computed again."""

    @classmethod
    def of(
        cls, target: str = "cpu:float64", *, sample: float = 1.0, seed: int = 0, time: str | float | None = None,
        largest_mb: float = LARGEST_MB,
    ) -> ShadowOptions:  # fmt: skip
        """Check the options of a shadow run: ``target`` is device and dtype of the reference (``cpu:float64``,
        ``cuda:0:float32``, ``cpu``), ``time`` the most that a step may take longer (``200ms``, ``2s``, ``0.5x`` of its own time,
        or milliseconds). Raises UsageError where a value is none of these."""
        device, _, dtype = target.rpartition(":") if target.rpartition(":")[2] in SHADOW_DTYPES else (target, ":", "float64")
        if not device or not re.fullmatch(r"[a-z]+(:[0-9]+)?", device):
            raise UsageError(
                f"shadow {target!r} is no reference: expected DEVICE or DEVICE:DTYPE with a dtype of {' or '.join(SHADOW_DTYPES)}, "
                "for example cpu:float64"
            )
        if not 0 < sample <= 1:
            raise UsageError(f"shadow sample {sample!r} is no share of the calls: expected a number above 0 and up to 1")
        if not largest_mb > 0:
            raise UsageError(f"shadow largest {largest_mb!r} is no size: expected megabytes above 0")
        milliseconds, ratio = _time_limit(time)
        return cls(device, dtype, float(sample), int(seed), milliseconds, ratio, float(largest_mb))

    @property
    def target(self) -> str:
        """``cpu float64``, as messages say it."""
        return f"{self.reference} {self.dtype}"


def _time_limit(time: str | float | None) -> tuple[float | None, float | None]:
    if time is None:
        return None, None
    if isinstance(time, (int, float)) and time > 0:
        return float(time), None
    match = _SHADOW_TIME.fullmatch(str(time))
    try:
        amount = float(match[1]) if match else 0.0
    except ValueError:
        amount = 0.0
    if match is None or amount <= 0:
        raise UsageError(f"shadow time {time!r} is no limit: expected e.g. 200ms, 2s or 0.5x (half of the step's own time)")
    if match[2] == "x":
        return None, amount
    return amount * (1000.0 if match[2] == "s" else 1.0), None


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """When to stop, and how much to save."""

    stop_after: int | None = None  # hits after which the run is stopped; None: never
    frames: int = FRAMES  # calls saved before the bad one, and after it
    budget: int = BUDGET

    @classmethod
    def of(cls, stop_after: int | str | None = None, frames: int = FRAMES, budget: int | str = BUDGET) -> WatchOptions:
        """Check the options; raise `UsageError` where a value means nothing."""
        text = str(stop_after)
        if text not in ("None", "never") and not (text.isdigit() and int(text) > 0):
            raise UsageError(f"stop_after {stop_after!r} is unknown: expected a number of hits from 1 on, or never")
        if frames < 0:
            raise UsageError(f"frames {frames} is too small: expected 0 or more calls before the bad one")
        return cls(int(text) if text.isdigit() else None, frames, _bytes(budget))

    def to_json(self) -> str:
        """Encode for the environment of a child process."""
        return json.dumps(dataclasses.asdict(self))


def _bytes(value: int | str) -> int:
    text = str(value).strip().upper().removesuffix("B")
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1)
    try:
        size = int(float(number) * unit)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"budget {value!r} cannot be read: expected a size such as 500MB or 2GB")
    return size


def capture_options(
    level: str | Sequence[str] | None, phase: str | Sequence[str] | None, include: Any = None, exclude: Any = None,
    steps: NumberSet = None, ranks: NumberSet = None, compile: str = "off",
) -> CaptureOptions:  # fmt: skip
    """Return what is seen: functions and modules' functions, forward and backward; the optimizer's only where it is asked for."""
    phases = [name for name in PHASES if name != "optimizer"] if phase is None else phase
    return CaptureOptions.of(
        level="api" if level is None else level, phase=phases, include=include, exclude=exclude, steps=steps, ranks=ranks,
        compile=compile,
    )  # fmt: skip


# ---------------------------------------------------------------- which options selected nothing
NAMED = 8
"""How many scopes or operators are named before they are counted."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was executed while the capture was on; ``keys`` are (level, phase, scope, op)."""

    calls: int
    steps: int
    keys: tuple[tuple[str, str, str, str], ...]


def unused(options: CaptureOptions, seen: Seen) -> dict[str, str]:
    """Return the options that selected nothing, each with the reason and with what there was to select. Steps hide all else:
    where none of those selected was executed, nothing was seen."""
    said = {f"steps {_text(r)}": _steps_that_ran(seen.steps) for r in options.steps or () if r[0] >= max(seen.steps, 1)}
    if not seen.keys:
        return said
    for what, chosen, known, column in (("level", options.levels, LEVELS, 0), ("phase", options.phases, PHASES, 1)):
        present = {key[column] for key in seen.keys}
        if len(chosen) < len(known):
            were = ", ".join(name for name in known if name in present)
            reason = f"matched none of {seen.calls:,} calls; {what}s seen: {were}"
            said |= {f"{what} {name}": reason for name in chosen if name not in present}
    names = {(key[2], key[3]) for key in seen.keys}
    for what, patterns in (("include", options.include), ("exclude", options.exclude)):
        for pattern in patterns:
            if not any(Patterns([pattern]).match(scope, op) for scope, op in names):
                said[f"{what} {pattern!r}"] = f"matched none of {seen.calls:,} calls; {_names(names)}"
    return said


def sentence(option: str, reason: str) -> str:
    """Say one item of `unused`."""
    return f"{option} {reason}" if reason.startswith("matched") else f"{option} selected nothing: {reason}"


def _steps_that_ran(steps: int) -> str:
    if not steps:
        return "the run ended no step (no optimizer made one), so all it did was step 0"
    return f"the run had {steps} step{'s, 0 to ' + str(steps - 1) if steps > 1 else ', step 0'}"


def _names(names: Iterable[tuple[str, str]]) -> str:
    scopes = sorted({scope.split(".")[0] for scope, _ in names} - {""})
    if scopes:
        return f"scopes seen: {_some(scopes)}"
    return f"no scopes seen (no module ran); operators seen: {_some(sorted({op for _, op in names}))}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _text(bounds: tuple[int, int | None]) -> str:
    start, stop = bounds
    return str(start) if stop == start + 1 else f"{start}:" if stop is None else f"{start}:{stop}"


def ranges_text(ranges: Ranges) -> str:
    """Write ranges as they are given on the command line."""
    return ",".join(map(_text, ranges))
