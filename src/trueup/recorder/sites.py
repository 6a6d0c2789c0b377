"""Call sites: the stack of a call, walked cheaply, kept once, without the framework's and our own frames."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MAX_FRAMES = 48
OURS = str(Path(__file__).resolve().parents[1])


class Sites:
    """Numbers distinct call stacks.

    ``internal`` are the directories whose frames are left out (the framework's own); ours always are.
    """

    def __init__(self, internal: tuple[str, ...] = ()) -> None:
        self._internal = tuple(f"{folder.rstrip(os.sep)}{os.sep}" for folder in (OURS, *internal))
        self._lock = threading.Lock()
        self._kept: dict[CodeType, bool] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._new: list[tuple[int, list[str], str | None]] = []

    def here(self) -> int | None:
        """Return the number of the stack that leads to the caller, or None when only internal frames do."""
        frame: FrameType | None = sys._getframe(1)
        key: list[Any] = []
        while frame is not None and len(key) < 2 * MAX_FRAMES:
            code = frame.f_code
            kept = self._kept.get(code)
            if kept is None:
                kept = self._kept[code] = self._is_kept(code)
            if kept:
                key += (code, frame.f_lineno)
            frame = frame.f_back
        if not key:
            return None
        known = self._numbers.get(found := tuple(key))
        return known if known is not None else self._add(found)

    def take_new(self) -> list[tuple[int, list[str], str | None]]:
        """Return the sites added since the last call, as rows for the store."""
        with self._lock:
            new, self._new = self._new, []
        return new

    def _is_kept(self, code: CodeType) -> bool:
        name = code.co_filename
        if name.startswith("<"):
            return name in ("<stdin>", "<string>")
        return not name.startswith(self._internal)

    def _add(self, key: tuple[Any, ...]) -> int:
        places = list(zip(key[::2], key[1::2], strict=True))
        code, line = places[0]
        frames = [f"{c.co_filename}:{n} in {c.co_name}" for c, n in places]
        text = linecache.getline(code.co_filename, line).strip() or None
        with self._lock:  # forward and backward threads come here, and the writer takes the new ones away
            known = self._numbers.get(key)
            if known is not None:
                return known
            number = self._numbers[key] = len(self._numbers)
            self._new.append((number, frames, text))
        return number
