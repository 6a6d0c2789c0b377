"""Numbers by step out of the lines of a log, by a table of how trainers write them (``lines.toml``) or by the user's patterns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from trueup.foundation import toml
from trueup.foundation.model import TrueupError, UsageError
from trueup.foundation.words.wording import counted

NUMBER = r"[-+]?(?:\d+(?:,\d{3})+|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf|NaN|Inf|Infinity)\b"
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONGEST = 8192  # characters of a line that are looked at
MOST = 20_000_000  # numbers that are kept of a file
PLACES = ("step", "epoch", "inner", "each", "name", "value")

Numbers = dict[str, list[tuple[int, float]]]


class Row(toml.Table):
    """A ``[[row]]`` table."""

    name: str
    line: str
    origin: str
    mark: str = ""
    pair: str = ""
    prefix: str = ""  # before each name
    first: int = 1  # number of the first epoch
    counted: bool = False  # its step is no step: lines are counted

    def __post_init__(self) -> None:
        for text in filter(None, (self.line, self.pair)):
            try:
                re.compile(text.replace("{number}", NUMBER))
            except re.error as error:
                raise ValueError(f"{text!r} is no regular expression ({error})") from None


@dataclass
class _Reader:
    row: Row
    line: re.Pattern[str]
    pair: re.Pattern[str] | None
    seen: int = 0
    steps: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, row: Row) -> _Reader:
        number = f"(?:{NUMBER})"
        pair = re.compile(row.pair.replace("{number}", number)) if row.pair else None
        return cls(row, re.compile(row.line.replace("{number}", number)), pair)

    def take(self, text: str, into: Numbers) -> bool:
        """Add the numbers of a line, if it is one of this kind."""
        if self.row.mark not in text:
            return False
        found = self.line.search(text)
        if found is None:
            return False
        groups = found.groupdict()
        pairs = self.pair.finditer(text) if self.pair is not None else ()
        values = {match["name"]: match["value"] for match in pairs} or {
            name: value for name, value in groups.items() if name not in PLACES and value is not None
        }
        values = {name: value for name, value in values.items() if name not in ("step", "steps", "global_step", "eta")}
        if not values:
            return False
        self.seen += 1
        step = self._step(groups)
        for name, value in values.items():
            held = into.setdefault(f"{self.row.prefix}{name.strip()}", [])
            held.append((len(held) + 1 if step is None else step, float(value.replace(",", ""))))
        return True

    def _step(self, groups: dict[str, str | None]) -> int | None:
        if self.row.counted:
            return None
        if groups.get("step") is not None:
            return int(str(groups["step"]).replace(",", "")[:18])
        epoch, inner, each = (groups.get(name) for name in ("epoch", "inner", "each"))
        if epoch is None or inner is None or each is None:
            return None
        return (int(epoch[:9]) - self.row.first) * int(each[:9]) + int(inner[:9])


@cache
def _known() -> tuple[Row, ...]:
    return toml.checked(toml.packaged(__package__, "lines.toml")["row"], tuple[Row, ...])


def patterns(given: Sequence[str]) -> list[Row]:
    """Read patterns of the user's; raises UsageError if one is none, or names no value."""
    rows = []
    for text in given:
        example = r"--pattern 'it=(?P<step>\d+) .*loss=(?P<loss>{number})'"
        try:
            row = Row("--pattern", text, "given")
            groups = set(_Reader.of(row).line.groupindex)
        except ValueError as error:
            raise UsageError(f"--pattern cannot be read: {error}\n  next:     {example}") from None
        if not groups - set(PLACES):
            raise UsageError(
                "--pattern names no value.\n  expected: a named group for each number, beside step\n"
                f"  got:      {text}\n  next:     {example}"
            )
        rows.append(row)
    return rows


def numbers(lines: Iterable[str], own: Sequence[Row], where: Path) -> tuple[Numbers, list[str]]:
    """Return the numbers of a log by name, ``(step, value)`` in order of the lines, and remarks. Raises TrueupError if no line is
    known."""
    readers = [_Reader.of(row) for row in (own or _known())]
    found: Numbers = {}
    total = kept = 0
    for text in lines:
        total += 1
        kept += any(reader.take(text, found) for reader in readers)
        if kept * 8 > MOST:
            raise TrueupError(f"{where} is too long.\n  expected: at most {MOST:,} numbers\n  next:     give a part of it")
    if not found:
        known = "" if own else f"; {', '.join(row.name for row in _known())}"
        raise TrueupError(
            f"No line of the log is known.\n  where:    {where}, {counted(total, 'line')}\n"
            f"  expected: {'lines that match --pattern' if own else 'lines of a trainer'}{known}\n"
            r"  next:     say how a line looks: --pattern 'it=(?P<step>\d+) .*loss=(?P<loss>{number})'"
        )
    by = [reader for reader in readers if reader.seen]
    remarks = [f"read as lines of {reader.row.name}; lines are counted, for they have no step" for reader in by if _counts(reader)]
    return found, remarks


def _counts(reader: _Reader) -> bool:
    return reader.row.counted or not {"step", "inner"} & set(reader.line.groupindex)


def of_file(file: Path) -> Iterator[str]:
    """Yield the lines of a log, without colours; a progress bar's returns end a line, too, and a very long line is cut."""
    with file.open(encoding="utf-8", errors="replace", newline=None) as opened:
        while text := opened.readline(LONGEST):
            yield COLOURS.sub("", text) if "\x1b" in text else text
