"""What `trueup_compat` leaves beside the files of an old tool's layout, so that it is known who wrote them.

``trueup.json`` in the folder of a rank says where the native capture of the same run is, and that gradients bear the places of
their arguments: the tools numbered those of the last autograd node (`left_gradients`). ``trueup-names.jsonl`` has a line
``[seq, name]`` for each call that the folder holds.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.exchange.readers.dump import Tree, folder_of

MARKER, NAMES = "trueup.json", "trueup-names.jsonl"
SIZE_LIMIT = 1 << 16
MOST_NAMES = 1 << 22
_CAPTURE = re.compile(r"(?:\.\./){1,3}[A-Za-z0-9_-][A-Za-z0-9_.-]*")
"""A capture lies a few folders above, and nowhere else, whatever a marker says."""


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of ``trueup.json``."""

    capture: str  # path of the native capture from the marker's folder
    rank: int  # the capture's rank that the folder is of
    step: int | None  # the step, None where the folder holds all
    filtered: bool  # whether integers, booleans, and tensors without dimensions or elements were left out
    sides: tuple[str, ...]  # which of all, forward, backward, input and output were asked for
    levels: tuple[str, ...]

    def to_json(self, version: str) -> dict[str, Any]:
        """Encode; ``version`` is Trueup's."""
        return {
            "written_by": f"trueup {version}", "gradients": "arguments", "capture": self.capture, "rank": self.rank,
            "step": self.step, "filtered": self.filtered, "sides": list(self.sides), "levels": list(self.levels),
        }  # fmt: skip


def in_tree(tree: Tree, path: str) -> Marker | None:
    """Return the marker beside a file of a dump, None where there is none; the files of the marker count as read."""
    folder = folder_of(path)
    found = tree.within(folder, MARKER)
    if found is None:
        return None
    if (names := tree.within(folder, NAMES)) is not None:
        tree.open(names).close()
    with tree.open(found) as file:
        return _parse(file.read(SIZE_LIMIT))


def beside(path: Path) -> Marker | None:
    """Return the marker beside a file."""
    try:
        with path.with_name(MARKER).open("rb") as file:
            return _parse(file.read(SIZE_LIMIT))
    except OSError:
        return None


def names_beside(path: Path) -> dict[int, str]:
    """Return the tool's names of calls, by their `seq`; lines that are none are passed over."""
    found: dict[int, str] = {}
    try:
        with path.with_name(NAMES).open(encoding="utf-8", errors="replace") as file:
            while len(found) < MOST_NAMES and (line := file.readline(SIZE_LIMIT)):
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and isinstance(entry[1], str):
                    found[entry[0]] = entry[1]
    except OSError:
        pass
    return found


def _parse(content: bytes) -> Marker | None:
    try:
        told = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or told.get("gradients") != "arguments":
        return None
    capture, rank, step = told.get("capture"), told.get("rank"), told.get("step")
    lists = [tuple(map(str, told[name][:8])) if isinstance(told.get(name), list) else () for name in ("sides", "levels")]
    if not isinstance(capture, str) or not _CAPTURE.fullmatch(capture):
        return None
    if type(rank) is not int or not (step is None or type(step) is int):
        return None
    return Marker(capture, rank, step, bool(told.get("filtered")), lists[0] or ("all",), lists[1] or ("api",))
