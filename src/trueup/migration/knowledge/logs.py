"""What logs say: the rows that are known, and logs as they are.

The knowledge base is the tables in ``rows/``, each row a line of a log that is known, with its cause and what to do about it. A row
says what a line holds (``says``: regular expressions without look-around, which RE2 and Python read alike), and what the line
is: ``cause`` (the error itself), ``generic`` (an error whose reason stands in another line), ``echo`` (what a process prints
because another one ended), ``note`` (stops nothing). ``hit`` and ``miss`` are lines that it must and must not take; a test holds
each row to them.

Logs are files, folders, standard input, packed by gzip or not, of any size, with lines of any length. What is looked
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
import functools
import gzip
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.foundation import toml
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import counted

TABLES = ("notes", "guide", "ascend", "others", "distributed", "cuda", "pytorch")
"""In the order in which rows are asked: of two alike that take a line, the first decides."""
Role = Literal["cause", "generic", "echo", "note"]
ROLES: tuple[Role, ...] = ("note", "cause", "echo", "generic")
"""Which row decides where several take a line: the one that says most."""


class Row(toml.Table):
    """A line that is known."""

    id: str
    says: tuple[str, ...]
    cause: str
    remedy: str
    hit: tuple[str, ...]
    miss: tuple[str, ...] = ()
    probe: str = ""
    check: str = ""
    role: Role | None = None
    late: bool = False  # the failure was earlier than the line that Python names
    after: bool = False  # may follow from another error: launchers end and kill what is left
    versions: str | None = None
    origin: str | None = None
    corrects: str = ""  # what the guide says wrong


class _File(toml.Table):
    origin: str
    row: tuple[Row, ...]
    role: Role = "cause"
    versions: str = ""


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return all rows, in the order in which they are asked."""
    found: list[Row] = []
    for name in TABLES:
        table = toml.checked(toml.packaged("trueup.migration.knowledge", "rows", f"{name}.toml"), _File)
        for row in table.row:
            row.role = row.role or table.role
            row.origin = row.origin or table.origin
            row.versions = table.versions if row.versions is None else row.versions
            found.append(row)
    return tuple(sorted(found, key=lambda row: ROLES.index(row.role or "cause")))


@functools.cache
def by_id() -> dict[str, Row]:
    """Return the rows by name."""
    return {row.id: row for row in rows()}


@functools.lru_cache(maxsize=8)
def whole(only: frozenset[str] | None = None) -> tuple[str, ...]:
    """Return expressions for a first look: one of them takes each line that any row takes (or one of ``only`` these), by a piece of
    text that the row's lines hold. Plain text is what RE2 goes through at the speed of memory, if its automaton's states find room
    in its cache: of one expression of all rows they do not, and it takes a hundred times as long."""
    some = [one for one in _patterns() if only is None or one.row.id in only]
    pieces = (re.escape(one.literal).replace("\\ ", " ") if one.literal else _unnamed(one.text) for one in some)
    parts: list[str] = []
    for piece in dict.fromkeys(pieces):
        if parts and len(parts[-1]) + len(piece) < LONGEST_EXPRESSION:
            parts[-1] += f"|{piece}"
        else:
            parts.append(piece)
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """An expression of a row; ``literal`` is the longest piece of plain text in it, empty where that is too short to tell."""

    row: Row
    text: str
    literal: str
    compiled: re.Pattern[bytes]


LONGEST_EXPRESSION = 4_500  # characters
SHORTEST = 5  # characters from which on a piece of plain text is looked for


@functools.cache
def _patterns() -> tuple[_Pattern, ...]:
    found = []
    for row in rows():
        for text in row.says:
            piece = plain_piece(text)
            piece = piece if len(piece) >= SHORTEST else ""
            found.append(_Pattern(row, text, piece, re.compile(text.encode())))
    return tuple(found)


_TOKEN = re.compile(
    r"\\[A-Za-z]|\\(?P<plain>.)|\[\^?\]?(?:\\.|[^\]])*\]|(?P<open>\()|(?P<close>\))|(?P<less>[?*]|\{[\d,]*\})|[.^$|+]|(?P<text>.)"
)


def plain_piece(text: str) -> str:
    """Return the longest piece of plain text that every line must hold that an expression takes: outside groups, nothing
    optional."""
    runs, depth = [""], 0
    for token in _TOKEN.finditer(text):
        depth += (token["open"] is not None) - (token["close"] is not None)
        plain = token["plain"] or token["text"]
        if depth == 0 and plain:
            runs[-1] += plain
        elif token["less"] and depth == 0:
            runs[-1] = runs[-1][:-1]
            runs.append("")
        else:
            runs.append("")
    return max(runs, key=len)


def row_of(line: bytes) -> Row | None:
    """Return the row that takes a line, None if none does."""
    asked = sorted({at for piece in pieces_in(line) for at in _asked()[piece]} | set(_asked()[""]))
    return next((_patterns()[at].row for at in asked if _patterns()[at].compiled.search(line)), None)


def pieces_in(line: bytes) -> list[str]:
    """Return the rows' pieces of plain text that a line holds. Each is looked up by five of its bytes: to search for all of
    them, one by one, takes ten times as long."""
    index = _index()
    parts = {line[at : at + SHORTEST] for at in range(len(line) - SHORTEST + 1)}
    return [piece for part in index.keys() & parts for piece, held in index[part] if held in line]


@functools.cache
def _asked() -> dict[str, list[int]]:
    """Return the patterns, by number, for each piece of plain text."""
    found: dict[str, list[int]] = {"": []}
    for at, one in enumerate(_patterns()):
        found.setdefault(one.literal, []).append(at)
    return found


@functools.cache
def _index() -> dict[bytes, list[tuple[str, bytes]]]:
    """Return pieces by the five bytes of theirs that samples have least often."""
    samples = "\n".join(sample for row in rows() for sample in row.hit).encode()
    often = Counter(samples[at : at + SHORTEST] for at in range(len(samples)))
    found: dict[bytes, list[tuple[str, bytes]]] = {}
    for piece in filter(None, _asked()):
        held = piece.encode()
        part = min((held[at : at + SHORTEST] for at in range(len(held) - SHORTEST + 1)), key=lambda one: often[one])
        found.setdefault(part, []).append((piece, held))
    return found


@functools.cache
def codes() -> frozenset[bytes]:
    """Return the numbers of two digits and more that stand in expressions."""
    return frozenset(number.encode() for one in _patterns() for number in re.findall(r"\d{2,}", one.text))


def named_in(row: Row, line: bytes) -> dict[str, str]:
    """Return what the line names: an operator, a rank, a number of a collective."""
    for text in row.says:
        found = re.search(text.encode(), line)
        if found is not None:
            return {name.rstrip("2"): value.decode("ascii", "replace") for name, value in found.groupdict().items() if value}
    return {}


def nearest(text: str, most: int = 3) -> list[Row]:
    """Return the rows whose samples share most words with a text, rare words first; none where nothing telling is shared."""
    asked = _words(text)
    scores: Counter[str] = Counter()
    for row in rows():
        if row.role != "note":
            scores[row.id] = max(_alike(asked, _words(sample)) for sample in row.hit)  # type: ignore[assignment]
    return [by_id()[name] for name, score in scores.most_common(most) if score >= NEAR]


NEAR = 0.25  # share of the weight of both texts' words that they have in common, from which on two lines count as near


def _alike(some: frozenset[str], others: frozenset[str]) -> float:
    weight = _weights()
    both = sum(weight.get(word, 1.0) for word in some & others)
    all_ = sum(weight.get(word, 1.0) for word in some | others)
    return both / all_ if all_ else 0.0


@functools.cache
def _weights() -> dict[str, float]:
    counts = Counter(word for row in rows() for word in frozenset().union(*map(_words, row.hit)))
    return {word: 1 / count for word, count in counts.items()}


def _words(text: str) -> frozenset[str]:
    return frozenset(word.lower() for word in re.findall(r"[A-Za-z_]{3,}", text))


def _unnamed(text: str) -> str:
    return re.sub(r"\(\?P<\w+>", "(?:", text)


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
