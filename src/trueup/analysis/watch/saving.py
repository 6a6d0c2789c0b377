"""What is saved and said of a hit: the calls around it with statistics, the calls of interest with tensors. An adapter (`Again`)
executes those again; their tensors are kept where they have the numbers of the first execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trueup.foundation.facts.operators import has
from trueup.foundation.model import LANES, NUMBERS
from trueup.foundation.store import claim
from trueup.recording.recorder import Call, CaptureOptions, Slot, Statistics
from trueup.recording.recorder.recorder import write_rows
from trueup.recording.recorder.rows import FIELDS, Rows
from trueup.recording.recorder.sites import Sites

COUNTS = slice(NUMBERS.index("n_nan"), len(NUMBERS))


@dataclass(frozen=True, slots=True)
class Reproduced:
    """How the tensors of a second execution compare with the first one's statistics."""

    same: int = 0
    differing: tuple[str, ...] = ()  # slots, each ``scope/op slot``
    missing: tuple[str, ...] = ()


def around(rows: Rows, calls: Sequence[Call], frames: int) -> Rows:
    """Return the rows of calls, of as many calls before the first and after the last, and of those that they refer to."""
    order = {seq: k for k, seq in enumerate(sorted({call.seq for call in rows[1::FIELDS]}))}
    places = [order[call.seq] for call in calls if call.seq in order]
    wanted = {call.seq for call in calls} | {call.forward_seq for call in calls} | {call.parent for call in calls}
    first, last = (min(places) - frames, max(places) + frames) if places else (0, 0)
    named = {call.seq for call in calls}
    for _, call, _, _, producer, _ in each(rows):
        if producer is not None and call.seq in named:
            wanted.add(producer[0])
    kept: Rows = []
    for row in each(rows):
        if row[1].seq in wanted or first <= order[row[1].seq] <= last or has(row[1].op, "loss"):
            kept += row
    return kept


def each(rows: Rows) -> Iterator[tuple[int, Call, Slot, str | None, tuple[int, str] | None, Statistics | None]]:
    """Yield rows one by one."""
    for k in range(0, len(rows), FIELDS):
        yield tuple(rows[k : k + FIELDS])


def attach(rows: Rows, again: Rows, calls: Sequence[Call]) -> Reproduced:
    """Give the rows of the ``calls`` of interest the bytes of a second execution that gave the same numbers."""
    named = {call.seq for call in calls}
    found = {_name(call, slot): stats for _, call, slot, _, _, stats in each(again)}
    copies = {stats.digest: stats.data for stats in found.values() if stats is not None and stats.data is not None}
    same, differing, missing = 0, [], []
    for _, call, slot, value, _, stats in each(rows):
        if call.seq not in named or value is not None or stats is None:
            continue
        other, said = found.get(_name(call, slot)), f"{call.scope or call.op} {slot.name}"
        if other is None:
            missing.append(said)
        elif not is_same(stats, other):
            differing.append(said)
        else:
            same += 1
            stats.digest, stats.data = other.digest, copies.get(other.digest)
    return Reproduced(same, tuple(differing), tuple(missing))


def _name(call: Call, slot: Slot) -> tuple[str, str, str, str, int, str]:
    return call.level, call.phase, call.scope, call.op, call.ordinal, slot.name


def is_same(one: Statistics, other: Statistics) -> bool:
    """Tell whether two buffers held the same: by digests, else by all counts and, within rounding, all numbers."""
    if one.digest is not None and other.digest is not None:
        return one.digest == other.digest
    a, b = (np.frombuffer(bytes(stats.values)) for stats in (one, other))
    scale = 1e-9 * float(a[NUMBERS.index("l2")]) if np.isfinite(a[NUMBERS.index("l2")]) else 0.0
    close = np.allclose(a, b, rtol=1e-9, atol=scale, equal_nan=True)
    return bool(np.array_equal(a[COUNTS], b[COUNTS]) and close and len(a) == len(NUMBERS) + LANES)


def free_directory(parent: Path, step: int, rank: int) -> Path:
    """Return the capture for a hit of a step: that of the other ranks, unless this rank has one there."""
    for k in range(1, 1000):
        found = parent / f"step-{step:06d}{'' if k == 1 else f'.{k}'}"
        if not (found / f"rank-{rank:05d}").exists():
            return found
    raise OSError(f"{parent} has too many hits of step {step}")


def save(
    directory: Path, options: CaptureOptions, describe: Callable[[], tuple[int | None, dict[str, Any], dict[str, Any]]],
    rows: Rows, sites: Sites, notes: Sequence[str],
) -> None:  # fmt: skip
    """Write rows as a capture; raises OSError or TrueupError if it cannot be written."""

    def identify() -> tuple[int, dict[str, Any], dict[str, Any]]:
        rank, root, manifest = describe()
        number = claim(directory, rank, root.get("run"))
        return number, root, manifest | {"rank": number}

    directory.parent.mkdir(parents=True, exist_ok=True)
    write_rows(directory, options, identify, rows, sites, notes)


@dataclass(frozen=True, slots=True)
class Hit:
    """A step with something bad."""

    step: int
    rank: int
    kind: str
    name: str  # ``scope/op, phase``
    said: str
    source: str | None
    path: str | None  # the capture that was saved, None where none was
    tensors: str  # whether its tensors were saved, or why not


def reproduction(again: Rerun, reproduced: Reproduced) -> str:
    """Say whether executing again gave the same tensors."""
    early = f"; it ended early: {again.ended_early}" if again.ended_early else ""
    if reproduced.differing:
        some = ", ".join(reproduced.differing[:3])
        why = "the operation is not deterministic, or depends on what changed"
        return f"executed again and NOT the same: {some} differ, so {why}{early}"
    if not reproduced.same:
        return f"executed again without meeting the call{early}"
    missing = f"; {len(reproduced.missing)} tensors were not met again" if reproduced.missing else ""
    return f"executed again with the same result, {reproduced.same} tensors saved{missing}{early}"


def name_of(call: Call) -> str:
    """Name a call: ``scope/op, phase``."""
    return f"{f'{call.scope}/' if call.scope else ''}{call.op}, {call.phase}"


def message(hit: Hit, text: str | None) -> str:
    """Return the lines that describe a saved hit."""
    lines = [hit.said]
    if hit.source:
        lines.append(f"  your code: {hit.source}{f': {text}' if text else ''}")
    lines.append(f"  tensors:   {hit.tensors}")
    lines.append(f"  saved:     {hit.path}")
    lines.append(f"  next:      trueup overflow {hit.path}")
    return "\n".join(lines)


def last_words(directory: Path, count: int, hit: Hit) -> str:
    """Return what is said when the run is stopped."""
    hits = "the first hit" if count == 1 else f"{count} hits"
    where = hit.path or directory
    return f"the run was stopped after {hits}, as asked; everything is in {directory}, the last hit in {where} (exit code 3)"


class CannotRerun(Exception):
    """Why a call could not be executed again."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """What executing again gave."""

    rows: Rows
    ended_early: str | None  # why it did not come to its end, after what was recorded


# Runs calls of a step again, given also all its calls; raises `CannotRerun`
Again = Callable[[Sequence[Call], Sequence[Call]], Rerun]
