"""The contents of a capture and its losses: a damaged file is named, nothing raises.

Whether all that a rank recorded is there: its parts of records against the counts that were written with them.

The seal of each part says how many parts and rows its rank had written before, and the rank's manifest how many in all::

    step-000000/records-0000.parquet    before: 0 parts, 0 rows       holds 567 rows
    step-000001/records-0000.parquet    before: 1 part, 567 rows      holds 567 rows
    step-000003/records-0000.parquet    before: 3 parts, 1,701 rows   so one part of 567 rows is missing
    manifest.json                       written: 4 parts, 2,268 rows

A part that is gone, was cut or comes from elsewhere leaves a gap, and the gap has a place. Captures whose seals do not count, which
are older, are held against the manifest alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout, parts
from trueup.foundation.store.durable import RANK_LIMIT, side_by_side
from trueup.foundation.store.layout import read_object
from trueup.foundation.store.parts import BROKEN, Part
from trueup.foundation.store.segment import open_segment
from trueup.foundation.store.writer import inspect_packed

HEAP = 64  # parts that a task looks at


ENDED = {
    "recording": "was interrupted or is still recording (status {status}): readable up to the last flush",
    "interrupted": "was ended by an error (status {status}): what would have run later is missing",
    "stopped": "stopped recording before the run ended (status {status}): what ran later is missing",
}
"""What a rank's status means that is not ``complete``."""


@dataclass(slots=True)
class Found:
    """What is there, and what is wrong with it."""

    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    sites: dict[int, list[Path]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # the problems that mean records or tensors were there once and cannot be read
    left_behind: list[Path] = field(default_factory=list)  # files of parts that are packed, too
    unfinished: list[str] = field(default_factory=list)  # problems that mean the run, or its capture, ended too early

    def lack(self, text: str) -> None:
        """Add a problem of that kind."""
        self.problems.append(text)
        self.unfinished.append(text)

    def lose(self, text: str) -> None:
        """Add a problem of that kind."""
        self.problems.append(text)
        self.lost.append(text)


def scan(root: Path, run: Mapping[str, Any]) -> Found:
    """Look at every folder, manifest and footer of a capture, whose own manifest is ``run``."""
    found = Found()
    for name, folder, _ in _entries(root, found):
        rank = layout.number(layout.RANK, name)
        if rank is not None and _is(root / name, folder, found):
            _scan_rank(root, rank, found)
    for rank in absent(root, run, found.ranks):
        found.lack(f"rank {rank} is missing: it left no folder, and no report that it had nothing to record")
    _check_references(root, found)
    return found


def _scan_rank(root: Path, rank: int, found: Found) -> None:
    folder = root / layout.rank_name(rank)
    found.ranks[rank] = _rank_manifest(root, folder, rank, found)
    found.sites[rank] = []
    candidates: list[tuple[int, Path]] = []
    own: list[Part] = []
    for name, is_folder, is_file in _entries(folder, found):  # sorted: what is packed comes before the steps
        step = layout.number(layout.STEP, name)
        if step is not None and _is(folder / name, is_folder, found):
            candidates += _step_parts(folder / name, rank, step, {part.number for part in own if part.step == step}, found)
        elif layout.number(layout.PACKED, name) is not None and _is(folder / name, is_file, found):
            own += _packed(folder / name, rank, found)
        elif layout.number(layout.SITES, name) is not None and _is(folder / name, is_file, found):
            found.sites[rank].append(folder / name)
        elif name.endswith(layout.TEMPORARY) and layout.number(layout.PACKED, name.removesuffix(layout.TEMPORARY)) is None:
            found.problems.append(f"rank {rank}: {name} was never finished; what it would have held is missing")
    packed = {(part.step, part.number): part for part in own}
    heaps = [candidates[n : n + HEAP] for n in range(0, len(candidates), HEAP)]  # a task for each would cost more than it does
    inspected = side_by_side(lambda heap: [_inspect(path, rank, step) for step, path in heap], heaps)
    for (step, path), part in zip(candidates, [one for heap in inspected for one in heap], strict=True):
        twin = packed.get((step, layout.number(layout.RECORDS, path.name) or 0))
        if twin is not None and (isinstance(part, str) or (part.writer, part.before) == (twin.writer, twin.before)):
            found.left_behind.append(path)  # by a `compact` that was killed
        elif isinstance(part, str):
            found.lose(part)
        else:
            own.append(part)
    own.sort(key=lambda part: (part.step, part.number))
    found.parts += own
    for text in missing(rank, found.ranks[rank], own):
        found.lose(text)


def _rank_manifest(root: Path, folder: Path, rank: int, found: Found) -> dict[str, Any]:
    try:
        content = layout.read_object(root, folder / layout.MANIFEST)
    except FileNotFoundError:
        found.lack(f"rank {rank} has no {layout.MANIFEST}: the process ended as it began to record")
        return {}
    except (TrueupError, OSError) as error:
        found.lack(f"rank {rank}: {error}")
        return {}
    is_imported = "imported" in content
    found.problems += [f"rank {rank}: {text}" for text in layout.check_rank(content)]
    if is_imported:
        told = content.get("imported", {"lost": ["whether anything was cannot be read"]})
        found.lost += [f"rank {rank}: lost when it was imported: {text}" for text in told.get("lost", [])]
    status = content.get("status")
    if status != "complete" and content.get("steps_over") is not True:
        ended = ENDED.get(status if isinstance(status, str) else "", ENDED["recording"])
        found.lack(f"rank {rank} {ended.format(status=repr(str(status)[:40]))}")
    return content


def _packed(path: Path, rank: int, found: Found) -> list[Part]:
    try:
        return inspect_packed(path, rank)
    except BROKEN as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        found.lose(f"rank {rank}: {path.name} is truncated or damaged ({reason}); the calls of its steps are missing")
        return []


def _step_parts(folder: Path, rank: int, step: int, packed: set[int], found: Found) -> Iterator[tuple[int, Path]]:
    numbers = []
    for name, _, is_file in _entries(folder, found):
        index = layout.number(layout.RECORDS, name)
        if index is not None and _is(path := folder / name, is_file, found):
            numbers.append(index)
            yield step, path
        elif name.endswith(layout.TEMPORARY):
            found.problems.append(f"rank {rank} step {step}: {name} was never finished; its calls are missing")
    expected = range(min(max(numbers, default=-1), 2 * len(numbers) + 8) + 1)  # a hostile number must not cost memory
    for index in sorted(set(expected) - set(numbers) - packed)[:8]:
        found.lose(f"rank {rank} step {step}: records-{index:04d}.parquet is missing, and its calls")


def _inspect(path: Path, rank: int, step: int) -> Part | str:
    try:
        return parts.inspect(path, rank, step)
    except BROKEN as error:
        return damaged(path, rank, step, error)


def damaged(path: Path, rank: int, step: int, error: BaseException) -> str:
    """Return the note on a part that cannot be read."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return f"rank {rank} step {step}: {path.name} is truncated or damaged ({reason}); skipped, its calls are missing"


def _check_references(root: Path, found: Found) -> None:
    """Look for the payload segments and call stacks that records refer to."""
    segments: dict[tuple[int, str], None] = {}
    for part in found.parts:
        segments |= dict.fromkeys((part.rank, name) for name in sorted(part.segments))
    for rank, name in segments:
        try:
            open_segment(segment_path(root, rank, name)).check()
        except (TrueupError, OSError) as error:
            found.lose(f"rank {rank}: {error}")
    for rank in sorted({part.rank for part in found.parts if part.has_sites}):
        if not found.sites[rank]:
            found.problems.append(f"rank {rank}: the call stacks (sites-*.parquet) are missing; findings have no source")


def segment_path(root: Path, rank: int, name: str) -> Path:
    """Return the file of a payload segment; raises TrueupError if the name is none, or it is missing or outside the capture."""
    if layout.number(layout.SEGMENT, name) is None:
        raise TrueupError(f"{name[:80]!r} is no payload segment: expected tensors-NNNN.safetensors; record again")
    path = root / layout.rank_name(rank) / name
    try:
        return layout.real_file(root, path)
    except FileNotFoundError:
        raise TrueupError(
            f"{path} is missing: its tensors cannot be read; copy it back from the machine that recorded the capture, "
            "or record again"
        ) from None


def _entries(folder: Path, found: Found) -> list[tuple[str, bool, bool]]:
    """List a folder: name, whether it is a folder, whether it is a file; a link is neither."""
    try:
        with os.scandir(folder) as entries:  # it knows what they are without asking for each of 10,000
            return sorted((e.name, e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False)) for e in entries)
    except OSError as error:
        found.lose(f"{folder} cannot be read: {error.strerror}")
        return []


def _is(path: Path, kind: bool, found: Found) -> bool:
    if not kind:
        found.lose(f"{path} is a link or not what its name says; skipped")
    return kind


NAMED = 8  # gaps and strange parts that are named; a hostile capture may have as many as parts


@dataclass(frozen=True, slots=True)
class Gap:
    """What is missing between two parts, or at the end."""

    after: Part | None
    parts: int
    rows: int


def absent(root: Path, run: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the ranks that a capture was to hold and does not, the first `NAMED` of them. An armed process whose report says
    that it recorded nothing, because the options selected nothing in it, is not missing."""
    sizes = [held["world_size"] for held in ranks.values() if type(held.get("world_size")) is int]
    if "imported" in run or not 1 < max(sizes, default=1) <= RANK_LIMIT:
        return []
    config = run.get("config")
    wanted = config.get("ranks") if isinstance(config, dict) else None
    missing = [rank for rank in range(max(sizes)) if rank not in ranks and _selects(wanted, rank)]
    if not missing:
        return []
    idle = _idle(root)
    return [rank for rank in missing if rank not in idle][:NAMED]


def _selects(ranges: Any, rank: int) -> bool:
    """Tell whether half-open ranges, as a manifest has them, hold a rank; what cannot be read holds all."""
    try:
        return ranges is None or any(start <= rank and (stop is None or rank < stop) for start, stop in ranges)
    except (TypeError, ValueError):
        return True


def _idle(root: Path) -> set[Any]:
    """Return the ranks of processes that say that they ended well and recorded nothing."""
    found = set()
    for path in (root / layout.PROCESSES).glob("*.json"):
        with suppress(OSError, TrueupError, TypeError):
            said = read_object(root, path)
            if said.get("state") == "ended" and not said.get("calls") and not said.get("failure"):
                found.add(said.get("process_rank"))
    return found


def missing(rank: int, manifest: Mapping[str, Any], parts: Sequence[Part]) -> list[str]:
    """Return a sentence for each gap in a rank's records (its manifest may be lost: empty), and for each part of another run."""
    counted = sorted((part for part in parts if part.before is not None), key=lambda part: (part.before, part.path))
    uncounted = [part for part in parts if part.before is None]
    try:
        whole = _total(manifest)
    except (KeyError, TypeError, ValueError):
        return [f"rank {rank}: its manifest has no counts of parts and rows that can be read"]
    gaps = [*_gaps(counted, whole, is_final=manifest.get("status") == "complete")]
    held = sum(part.rows for part in uncounted)
    if gaps and (sum(gap.parts for gap in gaps), sum(gap.rows for gap in gaps)) == (len(uncounted), held):
        gaps = []  # written by another tool, or before seals counted, and whole
    if gaps and whole is not None and not counted:
        said = [f"rank {rank} wrote {_amount(*whole)}, {_amount(len(uncounted), held)} can be read"]
    else:
        said = [f"rank {rank}: {_gap(gap)}{_rewritten(uncounted)}" for gap in gaps[:NAMED]]
    return said + _of_another_run(rank, manifest, counted)


def _total(manifest: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many parts and rows a rank wrote in all, or up to the end of the last step that was wanted; None: not known."""
    written = manifest.get("written")
    if not isinstance(written, dict) or not (manifest.get("status") == "complete" or manifest.get("steps_over") is True):
        return None
    return int(written["parts"]), int(written["rows"])


def _gaps(counted: Sequence[Part], whole: tuple[int, int] | None, *, is_final: bool) -> Iterator[Gap]:
    """Yield where the count jumps; ``is_final``: nothing was written after ``whole`` was counted."""
    parts = rows = 0
    last = None
    for part in counted:
        before = part.before or (0, 0)
        if before != (parts, rows):
            yield Gap(last, before[0] - parts, before[1] - rows)
        (parts, rows), last = (before[0] + 1, before[1] + part.rows), part
    if whole is not None and (whole > (parts, rows) or (is_final and whole != (parts, rows))):
        yield Gap(last, whole[0] - parts, whole[1] - rows)


def _gap(gap: Gap) -> str:
    place = f"after {_name(gap.after)}" if gap.after is not None else "at the beginning"
    if gap.parts > 0 and gap.rows >= 0:
        return f"{_amount(gap.parts, gap.rows)} {'is' if gap.parts == 1 else 'are'} missing {place}"
    return f"what comes {place} was counted as {gap.parts:+,} parts and {gap.rows:+,} rows away from there: it is not in its place"


def _rewritten(uncounted: Sequence[Part]) -> str:
    """Name parts that another tool wrote in place of what is missing."""
    named = [f"{_name(part)} ({part.rows:,} rows)" for part in uncounted[:NAMED]]
    return f"; not written by the capture: {', '.join(named)}" if named else ""


def _of_another_run(rank: int, manifest: Mapping[str, Any], counted: Sequence[Part]) -> list[str]:
    """Name parts that another process wrote than the one whose manifest this is."""
    own = manifest.get("writer", next((part.writer for part in counted), None))
    strange = [part for part in counted if part.writer != own]
    owner = "the rank's manifest" if "writer" in manifest else "the parts before it"
    return [f"rank {rank}: {_name(part)} is of another run than {owner}" for part in strange[:NAMED]]


def _amount(parts: int, rows: int) -> str:
    return f"{parts:,} part{'' if parts == 1 else 's'} of records with {rows:,} row{'' if rows == 1 else 's'}"


def _name(part: Part) -> str:
    return f"{part.path.parent.name}/{part.path.name}"
