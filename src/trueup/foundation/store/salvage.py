"""Finding out what a capture holds and what it has lost: a damaged file is named, nothing raises."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.foundation.store import completeness, layout, manifest, parts
from trueup.foundation.store.parallel import side_by_side
from trueup.foundation.store.parts import BROKEN, Part
from trueup.foundation.store.segment import open_segment

HEAP = 64
"""Parts that a task looks at."""


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
    lost: list[str] = field(default_factory=list)
    """The problems that mean records or tensors were there once and cannot be read."""
    unfinished: list[str] = field(default_factory=list)
    """The problems that mean the run, or its capture, ended before all was recorded that was wanted."""

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
    for rank in completeness.absent(root, run, found.ranks):
        found.lack(f"rank {rank} is missing: it left no folder, and no report that it had nothing to record")
    _check_references(root, found)
    return found


def _scan_rank(root: Path, rank: int, found: Found) -> None:
    folder = root / layout.rank_name(rank)
    found.ranks[rank] = _rank_manifest(root, folder, rank, found)
    found.sites[rank] = []
    candidates: list[tuple[int, Path]] = []
    for name, is_folder, is_file in _entries(folder, found):
        step = layout.number(layout.STEP, name)
        if step is not None and _is(folder / name, is_folder, found):
            candidates += _step_parts(folder / name, rank, step, found)
        elif layout.number(layout.SITES, name) is not None and _is(folder / name, is_file, found):
            found.sites[rank].append(folder / name)
        elif name.endswith(layout.TEMPORARY):
            found.problems.append(f"rank {rank}: {name} was never finished; what it would have held is missing")
    heaps = [candidates[n : n + HEAP] for n in range(0, len(candidates), HEAP)]  # a task for each would cost more than it does
    for inspected in side_by_side(lambda heap: [_inspect(path, rank, step) for step, path in heap], heaps):
        for part in inspected:
            if isinstance(part, str):
                found.lose(part)
            else:
                found.parts.append(part)
    for text in completeness.missing(rank, found.ranks[rank], [part for part in found.parts if part.rank == rank]):
        found.lose(text)


def _rank_manifest(root: Path, folder: Path, rank: int, found: Found) -> dict[str, Any]:
    try:
        content = manifest.read_object(root, folder / layout.MANIFEST)
    except FileNotFoundError:
        found.lack(f"rank {rank} has no {layout.MANIFEST}: the process ended as it began to record")
        return {}
    except (TrueupError, OSError) as error:
        found.lack(f"rank {rank}: {error}")
        return {}
    is_imported = "imported" in content
    found.problems += [f"rank {rank}: {text}" for text in manifest.check_rank(content)]
    if is_imported:
        told = content.get("imported", {"lost": ["whether anything was cannot be read"]})
        found.lost += [f"rank {rank}: lost when it was imported: {text}" for text in told.get("lost", [])]
    status = content.get("status")
    if status != "complete" and content.get("steps_over") is not True:
        ended = ENDED.get(status if isinstance(status, str) else "", ENDED["recording"])
        found.lack(f"rank {rank} {ended.format(status=repr(str(status)[:40]))}")
    return content


def _step_parts(folder: Path, rank: int, step: int, found: Found) -> Iterator[tuple[int, Path]]:
    numbers = []
    for name, _, is_file in _entries(folder, found):
        index = layout.number(layout.RECORDS, name)
        if index is not None and _is(path := folder / name, is_file, found):
            numbers.append(index)
            yield step, path
        elif name.endswith(layout.TEMPORARY):
            found.problems.append(f"rank {rank} step {step}: {name} was never finished; its calls are missing")
    expected = range(min(max(numbers, default=-1), 2 * len(numbers) + 8) + 1)  # a hostile number must not cost memory
    for index in sorted(set(expected) - set(numbers))[:8]:
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
            found.problems.append(
                f"rank {rank}: the call stacks (sites-*.parquet) are missing; findings have no source"
            )


def segment_path(root: Path, rank: int, name: str) -> Path:
    """Return the file of a payload segment.

    Raises:
        TrueupError: the name is none of a segment, the file is missing, or it lies outside the capture.
    """
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
