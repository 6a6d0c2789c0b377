"""The line that called a function, where the function is executed from another one of ours.

>>> from_line(sys._getframe())(max, 1, 2)  # executes ``max(1, 2)`` from the line of a frame
2

Python gives a warning the place of the frame that raised it (C code: the innermost one), or of one some levels above
(``stacklevel``), and shows it once for each place. So what a mode executes for a program, it executes from a frame that has file,
line and globals of the one that called: place, text, filters and the number of times are those of a run without a capture.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

CALLED = "<called>"
"""Name of the functions of `from_line`. Their frames repeat the one that they stand for."""

_CALL = "lambda function, /, *args, **kwargs: function(*args, **kwargs)"
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
    """Compile the call as if it stood in a line of a file."""
    body = ast.increment_lineno(ast.parse(_CALL, mode="eval"), line - 1)
    (found,) = (one for one in compile(body, file, "eval").co_consts if isinstance(one, CodeType))
    return found.replace(co_name=CALLED)
