"""Call sites: the stack of a call, walked cheaply, kept once, without the framework's and our own frames.

A stack is walked up to the frame that runs the enclosing module, whose own stack is known already, so what a call pays does not
grow with the depth of the model.

The line that called a function, where the function is executed from another one of ours.

>>> from_line(sys._getframe())(max, 1, 2)  # executes ``max(1, 2)`` from the line of a frame
2

Python gives a warning the place of the frame that raised it (C code: the innermost one), or of one some levels above
(``stacklevel``), and shows it once for each place. So what a mode executes for a program, it executes from a frame that has file,
line and globals of the one that called: place, text, filters and the number of times are those of a run without a capture.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from trueup.foundation.redaction import redacted_code

MAX_FRAMES = 48
OURS = [str(Path(__file__).resolve().parents[2])]
"""Folders whose frames are ours: `trueup`, and `trueup_compat` once it is imported."""


class Sites:
    """Numbers distinct call stacks; frames of the ``internal`` directories (the framework's), and ours, are left out."""

    def __init__(self, internal: tuple[str, ...] = ()) -> None:
        self._internal = tuple(f"{folder.rstrip(os.sep)}{os.sep}" for folder in (*OURS, *internal))
        self._lock = threading.RLock()
        self._codes: dict[int, tuple[bool, CodeType]] = {}
        """Whether frames of a code are kept, by its address, for hashing a code object is slow; held, it keeps its address."""
        self._known: dict[tuple[Any, ...], int | None] = {}
        self._numbers: dict[tuple[str, ...], int] = {}
        self._frames: list[tuple[str, ...]] = []
        self._new: list[tuple[int, list[str], str | None]] = []

    def here(self, above: int | None = None, until: CodeType | None = None) -> int | None:
        """Return the number of the caller's stack, None where all of it is internal; ``above``: that up to the innermost frame of
        code ``until``."""
        frame: FrameType | None = sys._getframe(1)
        codes, end = self._codes, until if above is not None else None
        key: list[Any] = [above]
        while frame is not None and len(key) < 2 * MAX_FRAMES:
            code = frame.f_code
            if code is end:
                break
            number = id(code)
            if (codes.get(number) or self._judge(code))[0]:
                key += (number, frame.f_lasti)
            frame = frame.f_back
        if len(key) == 1:
            return above
        found = tuple(key)
        try:
            return self._known[found]
        except KeyError:
            return self._add(found)

    def named(self, frames: Sequence[tuple[str, int, str]]) -> int | None:
        """Return the number of a stack that somebody else tells: file, line and function of each frame, innermost first."""
        kept = [one for one in frames if not one[0].startswith((*self._internal, "<"))][:MAX_FRAMES]
        if not kept:
            return None
        text = _source(*kept[0][:2])
        return self._number(tuple(f"{name}:{line} in {function}" for name, line, function in kept), text)

    def frames(self, number: int | None) -> tuple[str, ...]:
        """Return the frames of a site, innermost first."""
        return () if number is None else self._frames[number]

    def take_new(self) -> list[tuple[int, list[str], str | None]]:
        """Return the sites added since the last call, as rows for the store."""
        with self._lock:
            new, self._new = self._new, []
        return new

    def of(self, numbers: Collection[int | None]) -> Sites:
        """Return sites with these numbers as the new ones, for a recorder that writes rows which refer to them."""
        chosen = Sites()
        with self._lock:
            chosen._new = [row for row in self._new if row[0] in numbers]
        return chosen

    def known(self) -> dict[int, tuple[tuple[str, ...], str | None]]:
        """Return the sites that were not taken yet: frames, innermost first, and the text of the line."""
        with self._lock:
            return {number: (tuple(frames), text) for number, frames, text in self._new}

    def _judge(self, code: CodeType) -> tuple[bool, CodeType]:
        name = code.co_filename
        kept = name in ("<stdin>", "<string>") if name.startswith("<") else not name.startswith(self._internal)
        kept = kept and code.co_name != CALLED
        found = self._codes[id(code)] = kept, code
        return found

    def _add(self, key: tuple[Any, ...]) -> int:
        codes = [self._codes[number][1] for number in key[1::2]]
        places = [(code, _line(code, offset)) for code, offset in zip(codes, key[2::2], strict=True)]
        code, line = places[0]
        text = _source(code.co_filename, line)
        with self._lock:  # forward and backward threads come here, and the writer takes the new ones away
            above = () if key[0] is None else self._frames[key[0]]
            frames = (*(f"{c.co_filename}:{n} in {c.co_name}" for c, n in places), *above)[:MAX_FRAMES]
            number = self._known[key] = self._number(frames, text)
        return number

    def _number(self, frames: tuple[str, ...], text: str | None) -> int:
        with self._lock:
            number = self._numbers.setdefault(frames, len(self._frames))
            if number == len(self._frames):
                self._frames.append(frames)
                self._new.append((number, list(frames), text))
        return number


def _source(file: str, line: int) -> str | None:
    """Return the text of a line, its secrets masked; None where there is none."""
    return redacted_code(linecache.getline(file, line).strip()) or None


def _line(code: CodeType, offset: int) -> int:
    """Return the source line of an instruction; comprehensions and decorators may have none."""
    found = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
    return found or code.co_firstlineno


CALLED = "<called>"
"""Name of the functions of `from_line`. Their frames repeat the one that they stand for."""

(_CALL,) = (
    one for one in compile("lambda function, /, *args, **kwargs: function(*args, **kwargs)", "", "eval").co_consts
    if isinstance(one, CodeType)
)  # fmt: skip
_MOST = 20_000
"""Lines that are kept: a program that compiles code as it goes on has no end of them."""
_known: dict[tuple[int, int], tuple[CodeType, CodeType]] = {}
"""What calls, by address of a code, which is held for that, and instruction; no globals, which hold a program's models."""


def from_line(frame: FrameType) -> Callable[..., Any]:
    """Return what calls a function, ``(function, *args, **kwargs)``, from the line that a frame is at."""
    code = frame.f_code
    key = id(code), frame.f_lasti
    made = _known.get(key)
    if made is None:
        if len(_known) >= _MOST:
            _known.clear()
        made = _known[key] = _at(code.co_filename, frame.f_lineno or 1), code
    return FunctionType(made[0], frame.f_globals)


def _at(file: str, line: int) -> CodeType:
    """Return the call as if it stood in a line of a file: a code counts its lines from the first one, so nothing is compiled."""
    return _CALL.replace(co_filename=file, co_firstlineno=line, co_name=CALLED)
