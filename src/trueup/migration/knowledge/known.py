"""The knowledge base: rows of the tables in ``rows/``, each a line of a log that is known, with its cause and what to do about it.

A row says what a line holds (``says``: regular expressions without look-around, which RE2 and Python read alike), and what the line
is: ``cause`` (the error itself), ``generic`` (an error whose reason stands in another line), ``echo`` (what a process prints
because another one ended), ``note`` (stops nothing). ``hit`` and ``miss`` are lines that it must and must not take; a test holds
each row to them.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from trueup.foundation import toml

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
        if parts and len(parts[-1]) + len(piece) < LONGEST:
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


LONGEST = 4_500  # characters of an expression
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
