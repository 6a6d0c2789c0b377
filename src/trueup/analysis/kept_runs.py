"""A search by runs: the fewest of several things with which something still happens (delta debugging, ddmin); and runs that are
kept, for a search may be interrupted: the same command goes on after those that ended, and makes none of them again.

    DIR/runs.jsonl     what is searched for; then each run that ended, and `{"over": true}`: then nothing goes on here
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from trueup.foundation.redaction import redacted
from trueup.foundation.store.layout import new_folder
from trueup.foundation.words.wording import counted, say
from trueup.recording.recorder.launch import uninterrupted

T = TypeVar("T")

FILE = "runs.jsonl"
LARGEST = 1 << 20  # bytes; a search makes some twenty runs


def fewest(items: Sequence[T], enough: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return a smallest set of ``items`` that is enough: none of its members can be left out. All items together are taken to be
    enough without asking; a set that cannot be tried is not. With one guilty of n items it asks about 2 log2(n) times (Zeller and
    Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002)."""
    kept = tuple(items)
    parts = 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        pieces = [kept[k : k + size] for k in range(0, len(kept), size)]
        # Where no half was enough no smaller piece is: beyond halves, a piece is left out and the rest tried.
        tried = pieces if parts == 2 else [tuple(item for item in kept if item not in piece) for piece in pieces]
        found = next((some for some in tried if enough(some)), None)
        if found is not None:
            kept, parts = found, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept


class KeptRuns:
    """Runs of ``command`` in ``folder`` that look for an answer to ``question`` (JSON). Raises TrueupError if the folder holds
    something else, or an answer already."""

    def __init__(self, folder: Path, command: Sequence[str], question: Any) -> None:
        self.folder = folder
        self._asked = json.dumps({"version": 1, "command": redacted(list(command)), "question": question})
        self._done: dict[str, tuple[str, int, float]] = {}
        rows = unfinished(folder, self._asked)
        if rows is None:
            new_folder(folder)
            return
        (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")  # half a line goes
        self._done = {str(row["run"]): (str(row["order"]), int(row["code"]), float(row["seconds"])) for row in rows[1:]}
        if self._done:
            taken = counted(len(self._done), "run")
            say(f"going on in {folder}, where {taken} ended before the interruption; remove it if the training was changed since")

    def __enter__(self) -> KeptRuns:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and (self.folder / FILE).exists():
            self._write({"over": True})

    def made(self, name: str, order: Any, outputs: Sequence[Path], run: Callable[[], int]) -> tuple[int, float]:
        """Make a run, or take over what it was: its exit code and its seconds. ``order`` (JSON) is what it depends on, ``outputs``
        what it leaves, which is removed where it did not end. Raises KeyboardInterrupt where somebody stopped it."""
        asked = json.dumps(order)
        held = self._done.get(name)
        if held is not None and held[0] == asked and any(path.exists() for path in outputs):
            return held[1:]
        for path in outputs:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if not (self.folder / FILE).exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(json.loads(self._asked))
        begun = time.monotonic()
        code = uninterrupted(run())
        seconds = time.monotonic() - begun
        self._write({"run": name, "order": asked, "code": code, "seconds": seconds})
        return code, seconds

    def _write(self, row: dict[str, Any]) -> None:
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def unfinished(folder: Path, asked: str) -> list[dict[str, Any]] | None:
    """Return the header and the runs of an interrupted search for the same, or None: there is no such search."""
    file = folder / FILE
    try:
        if file.stat().st_size > LARGEST:
            return None
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]
        if json.dumps(rows[0]) != asked or any(row.get("over") for row in rows):
            return None
        _ = [(row["run"], row["order"], int(row["code"]), float(row["seconds"])) for row in rows[1:]]
        return rows
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
