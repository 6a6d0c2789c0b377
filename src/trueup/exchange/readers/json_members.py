"""JSON as training tools write it: too large to hold, cut off where the process was killed, with bare NaN and Infinity. The
standard library's decoder takes members of an object one at a time, so a file that ends early yields all its whole members. (The
streaming parsers at hand refuse NaN, or the whole of a broken file.)"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

CHUNK = 1 << 20
MEMBER_LIMIT = 8 << 20  # characters of one member; a call with ten thousand tensors has four million

LONGEST_NUMBER = 4096  # characters that may follow a number that is decoded in part: of ``-0.5`` a chunk may hold ``-0.``

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
_ENDS = _SPACE + ",}"  # what may follow a member


class Members:
    """Yields ``(group, key, value)`` of a JSON object: ``group`` is a member of its own that is entered, or None.

    >>> list(Members(io.BytesIO(b'{"task": "x", "data": {"a": 1, "b": NaN'), enter="data"))
    [(None, 'task', 'x'), ('data', '', None), ('data', 'a', 1)]
    """

    def __init__(self, file: BinaryIO, enter: str | None = None) -> None:
        self.problem: str | None = None  # why reading ended before the object did
        self._file, self._enter = file, enter
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._text, self._at, self._ended = "", 0, False

    def __iter__(self) -> Iterator[tuple[str | None, str, Any]]:
        if self._next() != "{":
            self.problem = "it does not begin with an object"
            return
        self._at += 1
        yield from self._members(None)

    def _members(self, group: str | None) -> Iterator[tuple[str | None, str, Any]]:
        while self.problem is None:
            sign = self._next()
            if sign == ",":
                self._at += 1
                continue
            if sign == "}":
                self._at += 1
                return
            known, key = self._value() if sign == '"' else self._broken()
            if not known or not isinstance(key, str):
                return
            if self._next() != ":":
                self._broken()
                return
            self._at += 1
            if group is None and key == self._enter and self._next() == "{":
                self._at += 1
                yield key, "", None  # tells that the group was found, though it be empty
                yield from self._members(key)
                continue
            known, value = self._value()
            if known:
                yield group, key, value

    def _broken(self) -> tuple[bool, None]:
        if self.problem is None:
            self.problem = "it ends too early" if self._ended and self._at >= len(self._text) else "it is no JSON"
        return False, None

    def _next(self) -> str:
        """Return the next character that is no space, empty at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._more(CHUNK):
                return ""

    def _more(self, size: int) -> bool:
        if self._ended:
            return False
        raw = self._file.read(size)
        self._ended = not raw
        self._text = self._text[self._at :] + self._decode(raw, self._ended)
        self._at = 0
        return not self._ended

    def _value(self) -> tuple[bool, Any]:
        """Decode the value that begins here, reading on until it is whole."""
        self._next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                following = self._text[end : end + 1]
                if isinstance(value, (dict, list, str)) or (following and following in _ENDS):  # else a number may go on
                    self._at = end
                    return True, value
                if self._ended:
                    self._at = end
                    return self._broken()
                if len(self._text) - end > LONGEST_NUMBER:
                    return self._broken()
            except RecursionError:
                self.problem = "it is nested too deeply"
                return False, None
            except ValueError:
                if self._ended:
                    self._at = len(self._text)
                    return self._broken()
            held = len(self._text) - self._at
            if held > MEMBER_LIMIT:
                self.problem = f"it holds a member of more than {MEMBER_LIMIT:,} characters, or is no JSON"
                return False, None
            self._more(max(CHUNK, held))


def whole(file: BinaryIO, size: int, limit: int) -> Any:
    """Decode a file at once; raises ValueError if it is larger than the limit, or no JSON."""
    if size > limit:
        raise ValueError(f"it has {size:,} bytes, and at most {limit:,} are read")
    try:
        return json.loads(file.read(limit + 1).decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
