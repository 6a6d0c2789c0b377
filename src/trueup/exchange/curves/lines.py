"""Numbers by step out of the lines of a log, by a table of how trainers write them (``lines.toml``) or by the user's patterns."""

from __future__ import annotations

import math
import re
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
STEPS = ("step", "steps", "global_step", "global step", "iter", "iteration", "eta", "num_updates")  # are no series
VALIDATION = re.compile(r"(?i)(?<![\w./-])(?:valid(?:at(?:e|ion|ing))?|val|eval(?:uat(?:e|ion|ing))?|test(?:ing)?)(?![\w./-])")
RANK = re.compile(r"(?i)(?<![\w.])rank\W{0,3}(\d{1,6})")
LABEL = re.compile(r"\[default(\d{1,6})\]|\s{0,8}(\d{1,6}): ")  # torchrun's and srun's

Numbers = dict[str, list[tuple[int, float]]]
Ranks = dict[str, dict[str, list[tuple[int, float]]]]
"""Numbers by name and by the rank that wrote them; ranks are those of lines that say one."""


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
    general: bool = False  # of no trainer: for logs in which no other row knows a line

    def __post_init__(self) -> None:
        for text in filter(None, (self.line, self.pair, self.heading)):
            try:
                re.compile(text.replace("{number}", NUMBER))
            except re.error as error:
                raise ValueError(f"{text!r} is no regular expression ({error})") from None


@dataclass
class _Counted:
    """How far the steps of one rank's lines are, of a training or of its validation."""

    last: tuple[int, int] = (0, -1)  # epoch and step of the last line
    before: int = 0  # steps of the epochs before, where each begins anew
    epochs: dict[str, list[float]] = field(default_factory=dict)  # of lines without a step, by name


@dataclass
class _Reader:
    row: Row
    line: re.Pattern[str]
    pair: re.Pattern[str] | None
    heading: re.Pattern[str] | None
    seen: int = 0
    example: str = ""  # the first line
    counted: dict[tuple[str, str], _Counted] = field(default_factory=dict)
    headed: dict[str, str | None] | None = None  # of the heading above; empty below one that ends it

    @classmethod
    def of(cls, row: Row) -> _Reader:
        line, pair, heading = (re.compile(one.replace("{number}", f"(?:{NUMBER})")) for one in (row.line, row.pair, row.heading))
        return cls(row, line, pair if row.pair else None, heading if row.heading else None)

    def take(self, text: str, into: Ranks) -> bool:
        """Add the numbers of a line, if it is one of this kind."""
        if self.heading is not None and (heading := self.heading.search(text)):
            self.headed = {name: held for name, held in heading.groupdict().items() if held is not None}
            return False
        if self.row.mark not in text or not self._begun():
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
        numbers = {name.strip(): float(value.replace(",", "")) for name, value in values.items()}
        before = text[: found.end()].lower()
        of_validation = ("val" in before or "test" in before) and VALIDATION.search(text, 0, found.end())
        prefix = self.row.prefix or ("validation " if of_validation else "")
        label = RANK.search(text) if "rank" in text.lower() else LABEL.match(text)
        rank = next(filter(None, label.groups())) if label else ""
        counted = self.counted.setdefault((prefix, rank), _Counted())
        step = self._step({**(self.headed or {}), **groups}, counted)
        self.seen += 1
        self.example = self.example or text.strip()
        for name, value in numbers.items():
            at = _place(counted.epochs.setdefault(name, []), numbers.get("epoch")) if step is None else step
            into.setdefault(f"{prefix}{name}", {}).setdefault(rank, []).append((at, value))
        return True

    def _begun(self) -> bool:
        """Tell whether there was the heading that a line needs; batches of an epoch are counted without one."""
        return self.heading is None or bool(self.headed) or (self.headed is None and "each" in self.line.groupindex)

    def _pairs(self, text: str, start: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for match in self.pair.finditer(text, start) if self.pair is not None else ():
            if match["name"].lower() not in STEPS and not (self.row.general and match["name"] in found):  # an average may follow
                found[match["name"]] = match["value"]
        return {} if self.row.general and not any("loss" in name.lower() for name in found) else found

    def _step(self, groups: dict[str, str | None], counted: _Counted) -> int | None:
        epoch, inner, each, step = (_whole(groups.get(name)) for name in ("epoch", "inner", "each", "step"))
        if step is not None and epoch is not None:  # a step of its epoch, or of all
            if epoch > counted.last[0] and step <= counted.last[1]:
                counted.before += counted.last[1] + (step == 0)
            counted.last = epoch, step
            return counted.before + step
        if step is not None or inner is None or each is None:
            return step
        if epoch is not None:
            return (epoch - self.row.first) * each + inner
        if inner < counted.last[1] and counted.last == (each, each):  # the bar was full, and is drawn anew
            counted.before += each
        counted.last = each, inner
        return counted.before + inner


def _place(epochs: list[float], epoch: float | None) -> int:
    """Return the number of a line without a step: after those before it, or where its epoch goes back to, as after a restart."""
    if epoch is not None and epochs and epoch < epochs[-1]:
        while epochs and epochs[-1] >= epoch:
            epochs.pop()
    epochs.append(-math.inf if epoch is None else epoch)
    return len(epochs)


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text.replace(",", "")[:15])


@cache
def _known() -> tuple[Row, ...]:
    held = toml.packaged(__package__, "lines.toml")
    rows = [{**row, "pair": held["pair"]} if row.get("general") else row for row in held["row"]]
    return toml.checked(rows, tuple[Row, ...])


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


def numbers(lines: Iterable[str], own: Sequence[Row], where: Path) -> tuple[Numbers, list[str], dict[str, list[float]]]:
    """Return the numbers of a log by name, ``(step, value)`` in order of the lines; remarks; and of names whose lines have no step,
    and are counted, the epoch of each. Raises TrueupError if no line is known."""
    readers = [_Reader.of(row) for row in (own or _known())]
    known = [reader for reader in readers if not reader.row.general]
    found: Ranks = {}
    guessed: list[tuple[_Reader, Ranks]] = [(reader, {}) for reader in readers if reader.row.general]
    total = kept = 0
    example = ""
    for text in lines:
        total += 1
        kept += any(reader.take(text, found) for reader in known) or any(reader.take(text, own) for reader, own in guessed)
        example = example or (text.strip() if "loss" in text.lower() else "")
        if kept * 8 > MOST:
            raise TrueupError(f"{where} is too long.\n  expected: at most {MOST:,} numbers\n  next:     give a part of it")
    by = [reader for reader in known if reader.seen]
    if not found and guessed:
        reader, found = max(guessed, key=lambda one: one[0].seen)
        by = [reader]
    if not found:
        raise TrueupError(
            f"No line of the log is known.\n  where:    {where}\n"
            f"  expected: {'lines that match --pattern' if own else 'lines of a trainer, or lines with a step and a loss'}\n"
            f"  got:      {counted(total, 'line')}{f', such as: {_short(example)}' if example else ''}\n"
            r"  next:     say how a line looks: --pattern 'it=(?P<step>\d+) .*loss=(?P<loss>{number})'"
        )
    remarks = [f"read as lines of {reader.row.name}; lines are counted, for they have no step" for reader in by if _counts(reader)]
    for reader in by:
        if reader.row.general:
            read = f"{counted(reader.seen, 'line')} with {reader.row.name} and a loss"
            remarks.append(f"a log of no known trainer; read as it looks, from {read}, such as: {_short(reader.example)}")
        if any(one.before for one in reader.counted.values()):
            remarks.append("steps begin anew in each epoch: they are counted on")
    ranks = {rank for held in found.values() for rank in held}
    if len(ranks) > 1:
        remarks.append(f"lines of {len(ranks)} ranks: where their numbers differ, the mean counts")
    lines_of = [(prefix, one.epochs) for reader in by for (prefix, _), one in reader.counted.items() if _counts(reader)]
    counts = {f"{prefix}{name}": epochs for prefix, held in lines_of for name, epochs in held.items()}
    return {name: _joined(held) for name, held in found.items()}, remarks, counts


def _short(line: str) -> str:
    return line[:100].replace("\t", " ")


def _counts(reader: _Reader) -> bool:
    return not (reader.row.heading or {"step", "inner"} & set(reader.line.groupindex))


def _joined(ranks: dict[str, list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Return the mean over the ranks that wrote a step. A rank whose number never moves, while another's does, has none: torchtitan
    writes -1 where a pipeline's stage has no loss."""
    if len(ranks) == 1:
        return next(iter(ranks.values()))
    moves = [held for held in ranks.values() if len({value for _, value in held}) > 1]
    still = [held for held in ranks.values() if len({value for _, value in held}) == 1 and len(held) > 1 and moves]
    by_step: dict[int, list[float]] = {}
    for held in ranks.values():
        for step, value in {} if held in still else dict(held).items():
            by_step.setdefault(step, []).append(value)
    return [(step, held[0] if len(set(held)) == 1 else math.fsum(held) / len(held)) for step, held in by_step.items()]


def of_file(file: Path) -> Iterator[str]:
    """Yield the lines of a log, without colours; a bar's returns and backspaces end a line, too, and a very long line is cut."""
    with file.open(encoding="utf-8", errors="replace", newline=None) as opened:
        while text := opened.readline(LONGEST):
            plain = COLOURS.sub("", text) if "\x1b" in text else text
            yield from (filter(None, plain.split("\b")) if "\b" in plain else (plain,))
