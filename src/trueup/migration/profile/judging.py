"""Where a step's time goes: each moment of it has one class, so that the shares add up to the step.

On a device a moment is computing, a copy that nothing else overlaps, communication that nothing else overlaps, or idle; what the
host does while the device is idle says which class it is idle for. Without a device the host's own operators compute. These are
the definitions of HolisticTraceAnalysis (busy, idle, computation, communication and its overlap), over its window as well: from
the first kernel to the end of the last; the shares are of the steps that the profiler marks, where it marks any.

One step as lanes, for a picture: what the device does and what the host does, from left to right.

Sets of intervals of time: float64 arrays of shape (n, 2), starts and ends in microseconds, sorted and apart.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trueup.foundation.words.wording import clean, shorten
from trueup.migration.profile.reading import (
    CLASSES,
    COMMUNICATION,
    COMPILE,
    COPY,
    FRAMEWORK,
    HOST,
    OPERATOR,
    Trace,
    is_made_for,
    is_sync,
    named_class,
    remedy,
    sign,
)  # fmt: skip

Intervals = np.ndarray[Any, np.dtype[np.float64]]
NONE: Intervals = np.zeros((0, 2))


def union(given: Intervals) -> Intervals:
    """Return the times that any of some intervals, in any order, covers."""
    if not len(given):
        return NONE
    given = given[np.argsort(given[:, 0], kind="stable")]
    ends = np.maximum.accumulate(given[:, 1])
    first = np.flatnonzero(np.append(True, given[1:, 0] > ends[:-1]))
    return np.stack([given[first, 0], ends[np.append(first[1:] - 1, len(given) - 1)]], 1)


def without(some: Intervals, others: Intervals) -> Intervals:
    """Return the times of a set that are not in another one."""
    if not len(some) or not len(others):
        return some
    edges = np.concatenate([[[-np.inf, others[0, 0]]], np.stack([others[:-1, 1], others[1:, 0]], 1), [[others[-1, 1], np.inf]]])
    return both(some, edges)


def both(some: Intervals, others: Intervals) -> Intervals:
    """Return the times that two sets have in common."""
    if not len(some) or not len(others):
        return NONE
    first = np.searchsorted(others[:, 1], some[:, 0], "right")
    last = np.searchsorted(others[:, 0], some[:, 1], "left")
    count = np.maximum(last - first, 0)
    of = np.repeat(np.arange(len(some)), count)
    with_ = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    starts = np.maximum(some[of, 0], others[with_, 0])
    ends = np.minimum(some[of, 1], others[with_, 1])
    found: Intervals = np.stack([starts, ends], 1)[ends > starts]
    return found


def total(some: Intervals) -> float:
    """Return how long a set is, in microseconds."""
    return float((some[:, 1] - some[:, 0]).sum())


GAP = 200.0  # microseconds between two operators that are still Python calling PyTorch; a longer one is other work
WAITING = "(Python between operators)"
WORKING = "(Python alone)"
NARROW = 1 / 800  # of a step: what is closer together and of one class is one bar


@dataclass(frozen=True, slots=True)
class Bar:
    """Something of one class: where it begins and how long it is, as shares of the step; the longest name in it, how many there
    are, and microseconds."""

    start: float
    length: float
    kind: str
    name: str
    calls: int
    time: float


@dataclass(frozen=True, slots=True)
class Lane:
    """What one side did in a step."""

    name: str
    bars: tuple[Bar, ...]


Units = tuple[Intervals, list[str], list[str]]


def lanes(trace: Trace, window: Intervals, host: Units) -> tuple[Lane, ...]:
    """Return the lanes of the middle one of the steps by length; ``host``: the host's units, their classes and names."""
    steps = trace.steps.intervals() if len(trace.steps) else window
    start, end = steps[np.argsort(steps[:, 1] - steps[:, 0])[len(steps) // 2]].tolist()
    names = [trace.names[name] for name in trace.device.name]
    device = trace.device.intervals(), [named_class(name) for name in names], names
    host = host if names else _with_gaps(host, start, end)  # beside a device, Python's time costs only where the device is idle
    sides: list[tuple[str, Units]] = [("device", device), ("host", host)] if names else [("host", host)]
    return tuple(Lane(name, _bars(*side, start, end)) for name, side in sides if end > start)


def _with_gaps(host: Units, start: float, end: float) -> Units:
    """Return the host's units with the times between them, in which Python runs: a class of its own from `GAP` on."""
    spans, kinds, names = host
    edges = np.concatenate([[[start, start]], spans[(spans[:, 1] > start) & (spans[:, 0] < end)], [[end, end]]])
    gaps = np.stack([edges[:-1, 1], edges[1:, 0]], 1)
    gaps = gaps[gaps[:, 1] > gaps[:, 0]]
    long = (gaps[:, 1] - gaps[:, 0] >= GAP).tolist()
    return (
        np.concatenate([spans, gaps]),
        [*kinds, *(HOST if one else FRAMEWORK for one in long)],
        [*names, *(WORKING if one else WAITING for one in long)],
    )


def _bars(spans: Intervals, kinds: Sequence[str], names: Sequence[str], start: float, end: float) -> tuple[Bar, ...]:
    inside = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < end))
    width, found, longest = end - start, list[Bar](), 0.0
    for at in inside[np.argsort(spans[inside, 0], kind="stable")].tolist():
        begins, ends = max(float(spans[at, 0]), start), min(float(spans[at, 1]), end)
        left, right = (begins - start) / width, (ends - start) / width
        last = found[-1] if found else None
        if last is not None and last.kind == kinds[at] and left - last.start - last.length < NARROW:
            name = names[at] if ends - begins > longest else last.name
            longest = max(longest, ends - begins)
            reach = max(last.start + last.length, right)
            found[-1] = Bar(last.start, reach - last.start, last.kind, name, last.calls + 1, last.time + ends - begins)
        else:
            found.append(Bar(left, right - left, kinds[at], names[at], 1, ends - begins))
            longest = ends - begins
    return tuple(found)


TINY = 20.0  # microseconds: of an operator that takes less, launch and Python (5 to 10) are a large part
RARE = 0.05  # share of like calls from which a long one is no accident of the system
LONG = 1000.0  # microseconds of one operator on the host while the device waits that are no usual launch
MATTERS = 0.2  # share of a step from which a class that is waste is a finding
HEAVY = 0.5  # share from which one operator is one
SLOWER = 0.05  # share of a step by which something is slower that is said to be
LISTED = 100  # parts of a class in a document
HIDDEN = "graphs hide which operator launched a kernel, so that what the device waits for is unknown"
FREE = "(the device is free)"
UNSEEN = "Nothing of the host is in this file, so framework stands for host, too: what the device waits for is in trace_view.json."
CUT = "The trace has more than five million events: the rest is left out."
BETWEEN = {FRAMEWORK: WAITING, HOST: WORKING}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the time of one class: name, microseconds in all, calls, the user's lines."""

    kind: str
    name: str
    time: float
    calls: int
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """Where the time of a trace goes. Times are in microseconds over all steps; ``steps`` is 0 where none are marked, ``window``
    the time that shares are of, ``device`` the times of a device by HolisticTraceAnalysis' definitions."""

    where: str
    window: float
    steps: int
    parts: tuple[Part, ...]
    device: dict[str, float] = field(default_factory=dict)
    unreliable: str = ""
    remarks: tuple[str, ...] = ()
    lanes: tuple[Lane, ...] = ()
    """One step as a picture; empty where a table says no times of single calls."""
    compiled: tuple[str, ...] = ()
    """What was compiled again in the steps, how often and why, as far as the training was run here."""

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of each class, the largest first."""
        times = {kind: sum(part.time for part in self.parts if part.kind == kind) / (self.window or 1.0) for kind in CLASSES}
        return dict(sorted(times.items(), key=lambda one: -one[1]))

    @property
    def kind(self) -> str:
        """Return the class that takes most."""
        return next(iter(self.shares))

    @property
    def finding(self) -> Part | None:
        """Return the largest part of what slows the steps down, None where they only compute."""
        kind = next((kind for kind, share in self.shares.items() if kind != OPERATOR and share >= MATTERS), None)
        heavy = next((one for one in self.of(OPERATOR) if one.time >= HEAVY * self.window and not _usual(one.name)), None)
        waste = self.of(kind)[0] if kind else None
        if heavy is not None and (kind is None or heavy.time > self.shares[kind] * self.window):
            return heavy
        return waste

    @property
    def doubtful(self) -> bool:
        """Tell whether the conclusion rests on launches that graphs hide."""
        return bool(self.unreliable) and self.kind in (FRAMEWORK, HOST)

    def of(self, kind: str) -> list[Part]:
        """Return the parts of a class, the largest first."""
        return sorted((part for part in self.parts if part.kind == kind), key=lambda part: -part.time)

    def share(self, part: Part) -> float:
        """Return a part's share of a step."""
        return part.time / (self.window or 1.0)

    def variant(self, kind: str) -> str:
        """Return which kind of the host's or the framework's time a class is: the key of its words (`classes.toml`), empty for the
        usual one."""
        first = next(iter(self.of(kind)), None)
        if first is not None and first.name == FREE:
            return "free"
        if kind == HOST and (first is None or first.name in BETWEEN.values()):
            return "host"
        named = kind == FRAMEWORK and first is not None and first.name not in BETWEEN.values()
        return "launch" if named and first is not None and first.time >= LONG * max(first.calls, 1) else ""

    @property
    def sentence(self) -> str:
        """Return what slows a step down."""
        if not self.window:
            return "No time is in this trace."
        found = self.finding
        if self.doubtful:
            return f"Could not tell: {self.unreliable}."
        if found is None:
            first = self.of(self.kind)[0]
            return f"Nothing stands out: {_percent(self.shares[self.kind])} of a step is {self.kind}, most in {_named(first)}."
        if found.kind == OPERATOR:
            return f"One operator takes {_percent(self.share(found))} of a step: {_named(found)}."
        said = _percent(self.shares[found.kind])
        if found.name == FREE:
            return f"{said} of a step {sign(found.kind, self.variant(found.kind))}."
        return f"{said} of a step is {found.kind}: {sign(found.kind, self.variant(found.kind))}; most in {_named(found)}."

    @property
    def exit_code(self) -> int:
        """Return 0 where nothing stands out, 1 where something slows a step down, 2 where that cannot be known."""
        return 2 if self.doubtful or not self.window else 1 if self.finding is not None else 0

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        kinds = [
            {
                "class": kind, "share": round(share, 6), "sign": sign(kind, self.variant(kind)),
                "remedy": remedy(kind, self.variant(kind)),
                "parts": [
                    {"name": part.name, "us": part.time, "calls": part.calls, "lines": list(part.lines)}
                    for part in self.of(kind)[:LISTED]
                ],
            }
            for kind, share in self.shares.items()
        ]  # fmt: skip
        return {
            "schema": "trueup-profile", "schema_version": 1, "sentence": self.sentence, "trace": self.where, "steps": self.steps,
            "us": self.window, "classes": kinds, "device": self.device, "unreliable": self.unreliable,
            "remarks": list(self.remarks), "compiled": list(self.compiled),
        }  # fmt: skip


def _usual(name: str) -> bool:
    """Tell whether much time in an operator is no fault: a device is made for it, or the name stands for all of them."""
    return is_made_for(name) or name.startswith("(")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _named(part: Part) -> str:
    return shorten(clean(part.name), 70) + (f" ({clean(part.lines[0])})" if part.lines else "")


def judge(trace: Trace, lines: Mapping[str, Sequence[str]] | None = None) -> Profile:
    """Return where the time of a trace goes; ``lines`` are the user's by names of operators, else those of the trace's stacks."""
    window = _window(trace)
    of_names = lines_of(trace) if lines is None else lines
    device = both(union(trace.device.intervals()), window) if len(trace.device) else NONE
    idle = without(window, device)
    parts = _device_parts(trace, window) if len(trace.device) else []
    units = _units(trace)
    remarks = [CUT] if trace.cut else []
    if len(trace.host):
        parts += _host_parts(units, idle, alone=not len(trace.device))
    elif len(idle):
        parts.append(Part(FRAMEWORK, FREE, total(idle), len(idle)))
        remarks.append(UNSEEN)
    return Profile(
        trace.where, total(window), len(trace.steps), tuple(_with_lines(parts, of_names)), _device_times(trace),
        HIDDEN if trace.graphs else "", tuple(remarks), lanes(trace, window, units),
    )  # fmt: skip


def _window(trace: Trace) -> Intervals:
    """Return the time that shares are of: the marked steps, else from first to last kernel or operator."""
    if len(trace.steps):
        return union(trace.steps.intervals())
    some = (trace.device if len(trace.device) else trace.host).intervals()
    return np.array([[some[:, 0].min(), some[:, 1].max()]])


def _device_times(trace: Trace) -> dict[str, float]:
    """Return busy, idle, computing, other and communication of a device in microseconds, and the share of communication that
    computing overlaps."""
    if not len(trace.device):
        return {}
    every = trace.device.intervals()
    kinds = np.array([named_class(trace.names[name]) for name in trace.device.name])
    moves = np.array([trace.names[name].lower().startswith(("memcpy", "memset")) for name in trace.device.name])
    busy, communication = union(every), union(every[kinds == COMMUNICATION])
    computing = union(every[(kinds != COMMUNICATION) & ~moves])
    span = float(every[:, 1].max() - every[:, 0].min())
    overlapped = total(both(communication, computing))
    return {
        "us": span, "busy": total(busy), "idle": span - total(busy), "computing": total(computing),
        "not computing": total(busy) - total(computing), "communication": total(communication),
        "communication overlapped": overlapped / total(communication) if len(communication) else 0.0,
    }  # fmt: skip


def _device_parts(trace: Trace, window: Intervals) -> list[Part]:
    """Return what a device does, each moment once: computing first, then copies and communication that nothing overlaps."""
    by_name: dict[int, list[int]] = defaultdict(list)
    for at, name in enumerate(trace.device.name):
        by_name[name].append(at)
    every = trace.device.intervals()
    done, parts = NONE, []
    for kind in (OPERATOR, COPY, COMMUNICATION):
        of_kind = NONE
        for name, places in by_name.items():
            found = named_class(trace.names[name])
            if found != kind and not (kind == OPERATOR and found not in (COPY, COMMUNICATION)):
                continue
            own = both(union(every[places]), window)
            free = without(without(own, done), of_kind)
            of_kind = union(np.concatenate([of_kind, own]))
            if len(own):
                parts.append(Part(kind, trace.names[name], total(free), len(places)))
        done = union(np.concatenate([done, of_kind]))
    return parts


class _Time:
    """Times and calls of one class's names as they add up."""

    def __init__(self) -> None:
        self.times: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, name: str, time: float, calls: int = 1) -> None:
        """Add to a name of a class."""
        if time > 0:
            self.times[kind, name] += time
            self.calls[kind, name] += calls


def _host_parts(units: Units, idle: Intervals, *, alone: bool) -> list[Part]:
    """Return what the host does in the times given: those of the steps, or those in which the device is idle."""
    spans, kinds, names = units
    rest = np.append(np.maximum(spans[1:, 0] - spans[:-1, 1], 0.0), np.inf) if len(spans) else np.zeros(0)
    long = _long(rest, names, GAP)
    got = _Time()
    last = -1
    at = np.searchsorted(spans[:, 1], idle[:, 0], "right") if len(spans) else np.zeros(len(idle), int)
    for (start, end), first in zip(idle.tolist(), at.tolist(), strict=True):
        behind = None if alone else _waited(units, start, first)
        moment, place = start, first
        while place < len(spans) and spans[place, 0] < end:
            begins, ends = max(float(spans[place, 0]), start), min(float(spans[place, 1]), end)
            _gap(got, begins - moment, behind, long=place == 0 or long[place - 1])
            if behind is not None and kinds[place] in (FRAMEWORK, OPERATOR, COPY):
                got.add(COPY, behind, ends - begins, 0)
            else:
                kind = kinds[place] if alone or kinds[place] not in (OPERATOR, COMMUNICATION) else FRAMEWORK
                got.add(kind, names[place], ends - begins, int(place != last))
            moment, last, place = ends, place, place + 1
        _gap(got, end - moment, behind, long=place == 0 or long[place - 1])
    return [Part(kind, name, time, got.calls[kind, name]) for (kind, name), time in got.times.items()]


def _waited(units: Units, start: float, first: int) -> str | None:
    """Return what the host waited in when the device ran dry: the launches that follow came late for that."""
    spans, _, names = units
    inside = first < len(spans) and spans[first, 0] <= start
    return names[first] if inside and is_sync(names[first]) else None


def _gap(got: _Time, time: float, behind: str | None, *, long: bool) -> None:
    short = time < GAP or not long
    if behind is not None and short:
        got.add(COPY, behind, time, 0)
    else:
        got.add(FRAMEWORK if short else HOST, WAITING if short else WORKING, time)


def _units(trace: Trace) -> Units:
    """Return the host's outermost operators in order and apart, their classes, their names. A large copy inside an operator is a
    unit of its own."""
    every = trace.host.intervals()
    order = np.lexsort((-every[:, 1], every[:, 0])) if len(every) else np.zeros(0, int)
    spans: list[tuple[float, float]] = []
    kinds: list[str] = []
    names: list[str] = []
    end = copied = float(-np.inf)
    for place in order.tolist():
        name = trace.names[trace.host.name[place]]
        start, stop = every[place].tolist()
        if stop <= end:
            large = stop - start >= TINY and start >= copied and kinds[-1] == OPERATOR
            if large and named_class(name) in (COPY, COMPILE):
                outer = spans[-1]
                spans[-1:] = [(outer[0], start), (start, stop), (stop, outer[1])]
                kinds += [named_class(name), kinds[-1]]
                names += [name, names[-1]]
                copied = stop
            continue
        spans.append((max(start, end), stop))
        kinds.append(named_class(name))
        names.append(name)
        end, copied = stop, spans[-1][0]
    found = np.array(spans) if spans else NONE
    long = _long(found[:, 1] - found[:, 0], names, TINY)
    for place, name in enumerate(names):
        if kinds[place] in (OPERATOR, COPY) and not long[place] and not is_sync(name):
            kinds[place] = FRAMEWORK
    return found, kinds, names


def _long(times: np.ndarray[Any, Any], names: Sequence[str], limit: float) -> list[bool]:
    """Tell of each of some times in order whether it is ``limit`` or more, and no accident: of those that follow the same name and
    have the same one, `RARE` or more are. An operator that the system interrupted once is judged by its like."""
    keys = list(zip(["", *names], names, strict=False))
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    long = (times >= limit).tolist()
    for key, one in zip(keys, long, strict=True):
        counts[key][0] += one
        counts[key][1] += 1
    return [one and counts[key][0] >= RARE * counts[key][1] for key, one in zip(keys, long, strict=True)]


def lines_of(trace: Trace) -> dict[str, tuple[str, ...]]:
    """Return the user's lines of each name on the host, those that take most first: the innermost frame of Python that is neither
    PyTorch's nor Python's own. Empty where the trace has no stacks."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    frames: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    own: dict[int, str] = {number: line for number, name in enumerate(trace.names) if (line := _own(name))}
    every = trace.frames.intervals()
    for position in np.argsort(every[:, 0], kind="stable").tolist():
        its = own.get(trace.frames.name[position])
        if its is not None:
            frames[trace.frames.thread[position]].append((every[position, 0], every[position, 1], its))
    of_threads: dict[int, list[int]] = defaultdict(list)
    host = trace.host.intervals()
    for place in np.argsort(host[:, 0], kind="stable").tolist():
        of_threads[trace.host.thread[place]].append(place)
    for thread, places in of_threads.items():
        above, stack, at = frames.get(thread, []), [], 0
        for place in places:
            start, end = host[place]
            while at < len(above) and above[at][0] <= start:
                stack.append(above[at])
                at += 1
            while stack and stack[-1][1] < end:
                stack.pop()
            if stack:
                found[trace.names[trace.host.name[place]]][stack[-1][2]] += end - start
    return {name: tuple(sorted(lines, key=lines.__getitem__, reverse=True)[:3]) for name, lines in found.items()}


_INSTALLED = ("torch/", "torch_npu/", "<", "nn.Module", "runpy", "numpy/")


def _own(name: str) -> str:
    """Return ``train.py:12`` of a frame's name, ``/home/me/train.py(12): step``, if it is the user's own."""
    path, _, rest = name.partition("(")
    number, mark, _ = rest.partition("): ")
    if not mark or not number.isdigit() or path.startswith(_INSTALLED) or "-packages/" in path or "/lib/python3" in path:
        return ""
    first = path.partition("/")[0].removesuffix(".py")
    return "" if first in sys.stdlib_module_names else f"{path}:{number}"


def _with_lines(parts: Sequence[Part], of_names: Mapping[str, Sequence[str]]) -> list[Part]:
    return [Part(one.kind, one.name, one.time, one.calls, tuple(of_names.get(one.name, ()))) for one in parts if one.time > 0]


@dataclass(frozen=True)
class Compared:
    """Two traces of the same training: what takes longer in the second, in microseconds a step."""

    baseline: Profile
    candidate: Profile

    @property
    def changes(self) -> list[tuple[str, str, float, float]]:
        """Return class, name and microseconds a step in both, what became slower most first."""
        times: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for side, one in enumerate((self.baseline, self.candidate)):
            for part in one.parts:
                times[part.kind, part.name][side] += part.time / max(one.steps, 1)
        changed = [(kind, name, before, after) for (kind, name), (before, after) in times.items()]
        return sorted(changed, key=lambda one: one[2] - one[3])

    @property
    def before(self) -> float:
        """Return microseconds of a baseline's step."""
        return self.baseline.window / max(self.baseline.steps, 1)

    @property
    def after(self) -> float:
        """Return microseconds of a candidate's step."""
        return self.candidate.window / max(self.candidate.steps, 1)

    @property
    def comparable(self) -> bool:
        """Tell whether both are marked steps, or both are whole traces."""
        return bool(self.before and self.after) and bool(self.baseline.steps) == bool(self.candidate.steps)

    @property
    def sentence(self) -> str:
        """Return how much slower a step is, and what became slower most."""
        if not self.comparable:
            return "Could not tell: one trace marks steps and the other one does not."
        ratio, unit = self.after / self.before, "step" if self.baseline.steps else "trace"
        kind, name, before, after = self.changes[0]
        if ratio <= 1 + SLOWER:
            return f"The second trace is not slower: a {unit} takes {ratio:.2f} times as long."
        most = f"{kind}, most {shorten(clean(name), 70)}, {before / 1e3:.2f} ms before and {after / 1e3:.2f} ms now"
        return f"A {unit} takes {ratio:.2f} times as long; slower is {most}."

    @property
    def exit_code(self) -> int:
        """Return 0 where it is not slower, 1 where it is, 2 where that cannot be known."""
        return 2 if not self.comparable else int(self.after > self.before * (1 + SLOWER))

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        rows = [{"class": kind, "name": name, "us": [before, after]} for kind, name, before, after in self.changes[:200]]
        sides = {"baseline": self.baseline.document(), "candidate": self.candidate.document()}
        return {"schema": "trueup-profile-compare", "schema_version": 1, "sentence": self.sentence, "changes": rows, **sides}


def compare(baseline: Profile, candidate: Profile) -> Compared:
    """Return what became slower from one profile to another."""
    return Compared(baseline, candidate)


__all__ = ["COMPILE", "Compared", "Part", "Profile", "compare", "judge", "lines_of"]
