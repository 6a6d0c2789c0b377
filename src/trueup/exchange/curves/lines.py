"""Numbers by step out of the lines of a log, by a table of how trainers write them (``lines.toml``) or by the user's patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
STEPS = ("step", "steps", "global_step", "global step", "iter", "iteration", "eta", "num_updates")  # are no series

Numbers = dict[str, list[tuple[int, float]]]


class Row(toml.Table):
    """A ``[[row]]`` table."""

    name: str
    line: str
    origin: str
    mark: str = ""
    pair: str = ""
    prefix: str = ""  # before each name
    heading: str = ""  # a line that gives the step of those below it
    first: int = 1  # number of the first epoch
    counted: bool = False  # its step is no step: lines are counted
    general: bool = False  # of no trainer: for logs in which no other row knows a line

    def __post_init__(self) -> None:
        for text in filter(None, (self.line, self.pair, self.heading)):
            try:
                re.compile(text.replace("{number}", NUMBER))
            except re.error as error:
                raise ValueError(f"{text!r} is no regular expression ({error})") from None


@dataclass
class _Reader:
    row: Row
    line: re.Pattern[str]
    pair: re.Pattern[str] | None
    heading: re.Pattern[str] | None
    seen: int = 0
    example: str = ""  # the first line
    last: tuple[int, int] = (0, -1)  # epoch and step of the last line
    before: int = 0  # steps of the epochs before, where each begins anew
    headed: int | None = None  # step of the heading above

    @classmethod
    def of(cls, row: Row) -> _Reader:
        line, pair, heading = (re.compile(one.replace("{number}", f"(?:{NUMBER})")) for one in (row.line, row.pair, row.heading))
        return cls(row, line, pair if row.pair else None, heading if row.heading else None)

    def take(self, text: str, into: Numbers) -> bool:
        """Add the numbers of a line, if it is one of this kind."""
        if self.heading is not None and (heading := self.heading.search(text)):
            self.headed = _whole(heading["step"])
            return False
        if self.row.mark not in text or (self.heading is not None and self.headed is None):
            return False
        found = self.line.search(text)
        if found is None:
            return False
        groups = found.groupdict()
        if self.row.general:
            if "loss" not in text.lower():
                return False
            values = self._pairs(text, found.end()) or self._pairs(text, 0)
        else:
            values = self._pairs(text, 0) or {name: one for name, one in groups.items() if name not in PLACES and one is not None}
        if not values:
            return False
        step = self._step(groups) if self.heading is None else self.headed
        self.seen += 1
        self.example = self.example or text.strip()
        for name, value in values.items():
            held = into.setdefault(f"{self.row.prefix}{name.strip()}", [])
            held.append((len(held) + 1 if step is None else step, float(value.replace(",", ""))))
        return True

    def _pairs(self, text: str, start: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for match in self.pair.finditer(text, start) if self.pair is not None else ():
            if match["name"].lower() not in STEPS and not (self.row.general and match["name"] in found):  # an average may follow
                found[match["name"]] = match["value"]
        return {} if self.row.general and not any("loss" in name.lower() for name in found) else found

    def _step(self, groups: dict[str, str | None]) -> int | None:
        if self.row.counted:
            return None
        epoch, inner, each, step = (_whole(groups.get(name)) for name in ("epoch", "inner", "each", "step"))
        if step is not None and epoch is not None:  # a step of its epoch, or of all
            if epoch > self.last[0] and step <= self.last[1]:
                self.before += self.last[1] + (step == 0)
            self.last = epoch, step
            return self.before + step
        if step is not None or epoch is None or inner is None or each is None:
            return step
        return (epoch - self.row.first) * each + inner


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text.replace(",", "")[:15])


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
    known = [reader for reader in readers if not reader.row.general]
    found: Numbers = {}
    guessed: list[tuple[_Reader, Numbers]] = [(reader, {}) for reader in readers if reader.row.general]
    total = kept = 0
    for text in lines:
        total += 1
        kept += any(reader.take(text, found) for reader in known) or any(reader.take(text, own) for reader, own in guessed)
        if kept * 8 > MOST:
            raise TrueupError(f"{where} is too long.\n  expected: at most {MOST:,} numbers\n  next:     give a part of it")
    by = [reader for reader in known if reader.seen]
    if not found and guessed:
        reader, found = max(guessed, key=lambda one: one[0].seen)
        by = [reader]
    if not found:
        named = "" if own else f"; {', '.join(row.name for row in _known())}"
        raise TrueupError(
            f"No line of the log is known.\n  where:    {where}, {counted(total, 'line')}\n"
            f"  expected: {'lines that match --pattern' if own else 'lines of a trainer'}{named}\n"
            r"  next:     say how a line looks: --pattern 'it=(?P<step>\d+) .*loss=(?P<loss>{number})'"
        )
    remarks = [f"read as lines of {reader.row.name}; lines are counted, for they have no step" for reader in by if _counts(reader)]
    for reader in by:
        if reader.row.general:
            as_this = reader.example[:100].replace("\t", " ")
            read = f"{counted(reader.seen, 'line')} with {reader.row.name} and a loss"
            remarks.append(f"a log of no known trainer; read as it looks, from {read}, such as: {as_this}")
        if reader.before:
            remarks.append("steps begin anew in each epoch: they are counted on")
    return found, remarks


def _counts(reader: _Reader) -> bool:
    return reader.row.counted or not (reader.row.heading or {"step", "inner"} & set(reader.line.groupindex))


def of_file(file: Path) -> Iterator[str]:
    """Yield the lines of a log, without colours; a progress bar's returns end a line, too, and a very long line is cut."""
    with file.open(encoding="utf-8", errors="replace", newline=None) as opened:
        while text := opened.readline(LONGEST):
            yield COLOURS.sub("", text) if "\x1b" in text else text
