"""The results of a replay so far, on disk: what a killed one goes on from."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import IO, Any

from trueup.foundation.model import TrueupError
from trueup.recording.execution.outcomes import Outcome, Replay

OUTCOMES, SUMMARY, TABLE = "outcomes.jsonl", "replay.json", "outcomes.parquet"


class Journal:
    """The results so far, on disk if wanted.

    Raises:
        TrueupError: the folder holds another replay, or cannot be written.
    """

    def __init__(self, output: Path | None, settings: dict[str, Any]) -> None:
        self.done: dict[tuple[int, int, int], Outcome] = {}
        self._lock = threading.Lock()
        self._folder, self._settings = output, settings | {"base": str(Path(settings["base"]).resolve())}
        self._file: IO[str] | None = None
        if output is not None:
            try:
                self._open(output)
            except OSError as error:
                said = f"{output} cannot be written: {error.strerror}\n  next:     name another folder with -o"
                raise TrueupError(said) from None

    def _open(self, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        summary, lines = output / SUMMARY, output / OUTCOMES
        if summary.exists():
            if not self._is_same(summary):
                expected = "the same capture and options"
                raise TrueupError(f"{output} holds another replay\n  expected: {expected}\n  next:     name another folder with -o")
            self._read(lines)
        elif any(path.name != f"{SUMMARY}.tmp" for path in output.iterdir()):
            raise TrueupError(f"{output} is not empty and holds no replay\n  next:     name another folder with -o")
        else:
            _replace(summary, json.dumps({"settings": self._settings}, indent=1))
        self._file = lines.open("a", encoding="utf-8")

    def _is_same(self, summary: Path) -> bool:
        try:
            held = json.loads(summary.read_text())["settings"]
        except (ValueError, KeyError, TypeError):
            return False
        return bool(held == json.loads(json.dumps(self._settings)))

    def _read(self, lines: Path) -> None:
        if not lines.exists():
            return
        kept = 0
        with lines.open("rb") as file:
            for line in file:
                try:
                    found = Outcome.from_json(json.loads(line))
                except (ValueError, TypeError, KeyError):
                    break  # cut off when it was killed
                self.done[found.place] = found
                kept += len(line)
        os.truncate(lines, kept)

    def add(self, outcome: Outcome) -> None:
        """Keep one result."""
        with self._lock:
            self.done[outcome.place] = outcome
            if self._file is not None:
                self._file.write(json.dumps(outcome.to_json()) + "\n")
                self._file.flush()

    def finish(self, replayed: Replay) -> None:
        """Write the verdict and the table."""
        if self._folder is None or self._file is None:
            return
        self._file.close()
        import pyarrow.parquet as pq

        from trueup.doors.report.replayed import to_json, to_table

        pq.write_table(to_table(replayed), self._folder / TABLE)
        text = json.dumps({"settings": self._settings} | to_json(replayed), indent=1)
        _replace(self._folder / SUMMARY, text)


def _replace(path: Path, text: str) -> None:
    """Write a file as a whole or not at all: the process may be killed meanwhile."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
