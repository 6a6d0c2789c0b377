"""Logs as they are: files, folders, standard input, packed by gzip or not, of any size, with lines of any length. What is looked
for is found by one pass of RE2 over chunks of 4 MB (Arrow's ``match_substring_regex``), which takes time by the byte however many
expressions there are; only lines that it takes come to Python.

`operators`: which operators CANN's host log says that it was asked for, with which parameters, how often, and when it
compiled them.

    [INFO] ASCENDCL(3021,python3):2021-07-01-10:00:00.000.001 [op_compile.cpp:300]3021 aclopCompile::aclOp OpType: TransData,
    INPUT...

An operator that is compiled after the first step has a shape or attribute that changes. A host log knows no steps: they are counted
by the lines that the training prints into it (ASCEND_SLOG_PRINT_TO_STDOUT=1).
"""

from __future__ import annotations

import dataclasses
import gzip
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import counted

CHUNK = 4 << 20  # bytes looked through at once
LONGEST = 64 << 10  # bytes of a line that are kept
BEFORE = 64 << 10  # bytes before a line in which the last time is looked for
MOST_FILES = 10_000  # in a folder
STANDARD_INPUT = "-"
GZIP = b"\x1f\x8b"
NEWLINE = 10

ASKED = re.compile(rb"aclopCompile(?:::aclOp)?\b.*?OpType: ?(\w+)(?:, ?(.*))?")
COMPILED = re.compile(rb"Match op inputs(?:/type)? failed|To compile op")
STEP = r"(?i:\biteration\s+(\d+)\s*/|\bEpoch:? ?\[\d+\]\s?\[\s*(\d+)/|\b(?:global[ _])?step[ =:]+(\d+)|\biter[ =:]+(\d+))"
FORMATS = ("TransData", "TransDataTo", "Cast", "Transpose", "AsStrided", "ViewCopy", "TensorMove", "Identity")
"""Operators that copy or change formats and compute nothing."""
MOST = 100_000  # operators with parameters that are kept apart


@dataclass(frozen=True, slots=True)
class Line:
    """A line that was looked for: the number of its log from 0, its own from 1, its first bytes, and where it starts in which
    bytes; those of its log begin at ``since``."""

    log: int
    number: int
    text: bytes
    within: bytes
    start: int
    since: int

    @property
    def before(self) -> bytes:
        """Return the last bytes before it."""
        return self.within[max(self.since, self.start - BEFORE) : self.start]


class Reader:
    """Goes through one log. ``size`` is in bytes, unpacked; ``broken`` says why the end of a packed file could not be read."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.size = 0
        self.broken = ""

    @property
    def name(self) -> str:
        """Return what the log is called in a report."""
        return "standard input" if self.path is None else str(self.path)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield the log in pieces of whole lines, each with the number of its first line; a line of more than 4 MB is cut. Raises
        TrueupError if it cannot be read."""
        number, rest = 1, b""
        try:
            with self._opened() as stream:
                while read := self._read(stream):
                    chunk = rest + read.replace(b"\r", b"\n")
                    end = chunk.rfind(b"\n") + 1 or (len(chunk) if len(chunk) >= CHUNK else 0)
                    if end:
                        yield number, chunk[:end]
                        number += chunk.count(b"\n", 0, end)
                    rest = chunk[end:]
            if rest:
                yield number, rest
        except OSError as error:
            raise TrueupError(
                f"A log cannot be read.\n  where:    {self.name}\n  expected: a text file, or one packed by gzip\n"
                f"  got:      {error.strerror or error}\n  next:     correct the path"
            ) from None

    def _opened(self) -> IO[bytes]:
        if self.path is None:
            return sys.stdin.buffer
        raw = self.path.open("rb")
        packed = raw.read(2) == GZIP
        raw.seek(0)
        return gzip.open(raw) if packed else raw  # type: ignore[return-value]

    def _read(self, stream: IO[bytes]) -> bytes:
        try:
            read = stream.read(CHUNK)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.broken = f"{self.name} is damaged, and was read up to there: {error}"
            return b""
        self.size += len(read)
        return read


def lines(some: Sequence[Reader], wanted: Callable[[int], tuple[Sequence[str], Sequence[str]]]) -> Iterator[Line]:
    """Yield the lines of some logs that one of some expressions takes, in order, but not those that one of others takes; they are
    asked for anew for each 4 MB, by the number of the log that it begins with. Raises TrueupError if a log cannot be read."""
    batch: list[tuple[int, int, bytes]] = []
    size, last = 0, -1  # bytes of the batch, the log that the one before ended with
    for log, reader in enumerate(some):
        if batch and batch[0][0] == last:  # what is left out of a log may be the first of its kind in the next one
            yield from _taken(batch, *wanted(last))
            batch, size = [], 0
        for number, piece in reader.pieces():
            batch.append((log, number, piece))
            size += len(piece)
            if size >= CHUNK:
                yield from _taken(batch, *wanted(batch[0][0]))
                batch, size, last = [], 0, log
    if batch:
        yield from _taken(batch, *wanted(batch[0][0]))


def _taken(batch: Sequence[tuple[int, int, bytes]], wanted: Sequence[str], but: Sequence[str]) -> Iterator[Line]:
    """Look through several pieces at once: an expression is compiled for each pass."""
    ends = []
    for _, _, piece in batch:
        found = np.flatnonzero(np.frombuffer(piece, np.uint8) == NEWLINE) + 1
        ends.append(found if len(found) and found[-1] == len(piece) else np.append(found, len(piece)))
    starts = np.cumsum([0, *(len(piece) for _, _, piece in batch)])
    shifted = (one + start for one, start in zip(ends, starts, strict=False))
    offsets = np.concatenate([np.zeros(1, np.int64), *shifted]).astype(np.int32)
    whole = b"".join(piece for _, _, piece in batch)
    array = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(whole)])
    taken = np.flatnonzero(_matched(array, wanted))
    if but and len(taken):
        taken = taken[~_matched(array.take(pa.array(taken)), but)]
    first = np.cumsum([0, *map(len, ends)])
    parts = np.searchsorted(first, taken, "right") - 1
    held = [(log, number, int(start)) for (log, number, _), start in zip(batch, starts, strict=False)]
    for part, nth, start, stop in np.stack([parts, taken - first[parts], offsets[taken], offsets[taken + 1]], 1).tolist():
        log, number, since = held[part]
        yield Line(log, number + nth, whole[start : min(stop, start + LONGEST)].rstrip(b"\n"), whole, start, since)


def _matched(array: pa.Array, expressions: Sequence[str]) -> np.ndarray[Any, Any]:
    """Tell of each line whether one of some expressions takes it."""
    found = np.zeros(len(array), bool)
    for one in expressions:
        found |= pc.match_substring_regex(array, f"(?m){one}").to_numpy(zero_copy_only=False)
    return found


def readers(given: Sequence[str]) -> list[Reader]:
    """Return what the arguments name: files, all files of folders, standard input (``-``). Raises TrueupError where there is
    none."""
    found: list[Reader] = []
    for text in given:
        path = Path(text)
        if text == STANDARD_INPUT:
            found.append(Reader(None))
        elif path.is_dir():
            inside = [Path(top, name) for top, _, names in os.walk(path) for name in sorted(names)]
            found += [Reader(one) for one in inside if one.is_file() and not one.is_symlink()][:MOST_FILES]
        elif path.is_file():
            found.append(Reader(path))
        else:
            raise TrueupError(
                f"A log is not there.\n  where:    {text}\n  expected: a file, a folder of logs, or - for standard input\n"
                f"  got:      {'something else' if path.exists() else 'nothing of that name'}\n  next:     correct the path"
            )
    if not found:
        raise TrueupError(
            "There is no log to explain.\n  expected: files, folders that hold files, or - for standard input\n"
            f"  got:      {', '.join(given) or 'nothing'}\n  next:     trueup explain-log train.log ~/ascend/log"
        )
    return found


@dataclass(frozen=True)
class Operator:
    """An operator with its parameters: how often it was asked for and compiled, and in which steps (0: before the first)."""

    type: str
    parameters: str
    asked: int
    compiled: int
    first: int
    last: int
    late: int  # how often it was compiled after step one

    @property
    def moves(self) -> bool:
        """Return whether it only copies or changes a format."""
        return self.type in FORMATS


@dataclass(frozen=True)
class Operators:
    """The operators of some host logs, those compiled late first, then by how often they were asked for."""

    operators: tuple[Operator, ...]
    steps: int
    logs: tuple[str, ...]
    left_out: int

    @property
    def late(self) -> tuple[Operator, ...]:
        """Return those that were compiled after step one."""
        return tuple(one for one in self.operators if one.late)

    @property
    def exit_code(self) -> int:
        """Return 0 where all was compiled by step one, 1 where something was compiled later, 2 where nobody can tell."""
        return 2 if not self.operators or not self.steps else 1 if self.late else 0

    @property
    def sentence(self) -> str:
        """Return the conclusion in a sentence."""
        if not self.operators:
            return "No line of aclopCompile stands in these logs: set ASCEND_SLOG_PRINT_TO_STDOUT=1 and ASCEND_GLOBAL_LOG_LEVEL=1."
        asked, kinds = sum(one.asked for one in self.operators), {one.type for one in self.operators}
        head = (
            f"{counted(len(kinds), 'operator')} with {counted(len(self.operators), 'set')} of parameters, asked for {asked:,} times"
        )
        if not self.steps:
            return f"{head}; no line says a step, so when they were compiled is not known."
        late = sorted({one.type for one in self.late})
        tail = (
            f"{', '.join(late[:3])}{' and others' if len(late) > 3 else ''} compiled after step one"
            if late
            else "all compiled by step one"
        )
        return f"{head} in {counted(self.steps, 'step')}; {tail}."

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        rows = [dataclasses.asdict(one) for one in self.operators]
        return {
            "schema": "trueup-operators", "schema_version": 1, "sentence": self.sentence, "exit_code": self.exit_code,
            "steps": self.steps, "logs": list(self.logs), "left_out": self.left_out, "operators": rows,
        }  # fmt: skip


def operators(logs: Sequence[str], step: str | None = None) -> Operators:
    """Return the operators that CANN's host logs name.

    Args:
        logs: files, folders, ``-`` for standard input.
        step: a regular expression for the lines of the training that say a step; None: the usual forms.

    Raises:
        TrueupError: a log cannot be read, or ``step`` is no regular expression.
    """
    marks = _marks(step)
    some = readers(logs)
    held: dict[tuple[str, str], list[int]] = {}
    steps, now, last_mark, left_out = 0, 0, b"", 0
    current: list[int] | None = None
    for line in lines(some, lambda _log: ((f"aclopCompile|Match op inputs|To compile op|{step or STEP}",), ())):
        asked = ASKED.search(line.text)
        if asked is not None:
            name = asked[1].decode(), _parameters(asked[2] or b"")
            if name not in held and len(held) >= MOST:
                left_out, current = left_out + 1, None
                continue
            current = held.setdefault(name, [0, 0, now, now, 0])
            current[0] += 1
            current[3] = now
        elif COMPILED.search(line.text):
            if current is not None:
                current[1] += 1
                current[4] += now > 1
                current = None
        elif (mark := marks.search(line.text)) is not None and mark[0] != last_mark:
            last_mark = mark[0]
            steps, now = steps + 1, now + 1
    rows = [Operator(*name, asked, compiled, first, last, late) for name, (asked, compiled, first, last, late) in held.items()]
    rows.sort(key=lambda one: (-one.late, -one.asked, one.type, one.parameters))
    return Operators(tuple(rows), steps, tuple(reader.name for reader in some), left_out)


def _parameters(text: bytes) -> str:
    said = text.decode("utf-8", "replace").strip().rstrip(".")
    open_ = said.count("]") > said.count("[")  # the line's own closing bracket, which the log's prefix opens
    return (said.removesuffix("]") if open_ else said).strip()[:400]


def _marks(step: str | None) -> re.Pattern[bytes]:
    try:
        return re.compile((step or STEP).encode())
    except re.error as error:
        raise TrueupError(
            f"--step cannot be read.\n  expected: a regular expression for lines that say a step\n  got:      {step!r} ({error})\n"
            "  next:     correct it, or leave it out"
        ) from None
