"""Choosing calls out of a capture's records, and saying what is wrong with a choice that leaves none.

A capture may hold millions of rows. So the choice reads the few columns that it needs, some steps at a time; all else is read for
the calls that are shown.

Choosing slots by the state of their numbers: ``n_nan > 0 and l2 >= 1e3``, read and never evaluated. A condition is ``NAME OP
NUMBER``; several are joined by ``and``. NAME is a statistic or ``numel``. A slot that lacks the number (an argument, a digest)
fulfils none.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.foundation.model import NUMBERS, TrueupError
from trueup.foundation.words.wording import call_name, one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trueup.foundation.store import Capture

NUMBERED = ("numel", *NUMBERS)
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "=": operator.eq,
    "!=": operator.ne,
}  # fmt: skip
STATES = {"nan": ("n_nan",), "inf": ("n_posinf", "n_neginf"), "saturated": ("n_saturated",)}
"""What an option of that name looks for: one of these counts is not zero."""

_CONDITION = re.compile(r"\s*([a-z_0-9]+)\s*(>=|<=|==|!=|>|<|=)\s*(\S+)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of a column with a number."""

    name: str
    operator: str
    value: float

    def holds(self, rows: pa.Table) -> NDArray[np.bool_]:
        """Tell for each row whether it is so; not where the column is null."""
        values = column(rows, self.name)
        with np.errstate(invalid="ignore"):
            return np.asarray(OPERATORS[self.operator](values, self.value) & ~np.isnan(values), np.bool_)

    def __str__(self) -> str:
        return f"{self.name} {self.operator} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Conditions:
    """All of ``all_of`` and, if there are any states, one of these."""

    all_of: tuple[Condition, ...] = ()
    states: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are needed to tell."""
        return tuple(dict.fromkeys([each.name for each in self.all_of] + [name for state in self.states for name in STATES[state]]))

    def __bool__(self) -> bool:
        return bool(self.all_of or self.states)

    def holds(self, rows: pa.Table) -> NDArray[np.bool_]:
        """Tell for each row whether it is so."""
        mask = np.ones(rows.num_rows, np.bool_)
        for each in self.all_of:
            mask &= each.holds(rows)
        if self.states:
            counts = [Condition(name, ">", 0).holds(rows) for state in self.states for name in STATES[state]]
            mask &= np.logical_or.reduce(counts)
        return mask

    def options(self) -> dict[str, str]:
        """Return what was asked for as command line options."""
        where = {"--where": f"'{' and '.join(map(str, self.all_of))}'"} if self.all_of else {}
        return where | {f"--{state}": "" for state in self.states}


def read_conditions(text: str | None, *, nan: bool = False, inf: bool = False, saturated: bool = False) -> Conditions:
    """Read ``--where`` and the options beside it; raises TrueupError if a part is no condition, or names no statistic.

    >>> str(read_conditions("n_nan > 0 and l2>=1e3").all_of[1])
    'l2 >= 1000'
    """
    parts = re.split(r"\s+and\s+", text.strip()) if text is not None else []
    states = {"nan": nan, "inf": inf, "saturated": saturated}
    return Conditions(tuple(map(_condition, parts)), tuple(name for name, wanted in states.items() if wanted))


def _condition(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    try:
        if match is None or match[1] not in NUMBERED:
            raise ValueError
        return Condition(match[1], match[2], float(match[3]))
    except ValueError:
        raise TrueupError(
            "--where cannot be read.\n"
            "  expected: NAME OP NUMBER, several joined by `and`, such as 'n_nan > 0 and l2 >= 1e3'\n"
            f"  got:      {one_line(text)!r}\n"
            f"  next:     NAME is one of {', '.join(NUMBERED)}; OP one of {', '.join(OPERATORS)}"
        ) from None


def column(rows: pa.Table, name: str) -> NDArray[np.float64]:
    """Return a column as float64, NaN where it is null."""
    import pyarrow as pa

    return np.asarray(rows[name].cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)


COLUMNS = (
    "step", "rank", "seq", "phase", "level", "scope", "op", "ordinal", "slot", "dtype", "shape", "device", "numel",
    "min", "max", "mean", "l2", "n_nan", "n_posinf", "n_neginf", "n_zero", "n_subnormal", "n_saturated", "digest",
    "payload_segment", "payload_key", "payload_view", "value", "producer_seq", "site",
)  # fmt: skip
"""All that is shown of a record; the sketch, its widest column, is not."""
FOREIGN = ("foreign_name", "foreign_checksum", "foreign_statistics")  # and of a record that was imported


KEYS = ("rank", "step", "seq")
NAMES = (*KEYS, "phase", "level", "scope", "op", "ordinal")  # what names a call
STEPS_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class Selection:
    """Which calls of which capture; None chooses all."""

    path: Path
    scope: str | None = None
    op: str | None = None
    phase: str | None = None
    step: int | None = None
    rank: int | None = None
    level: str | None = None
    where: Conditions = field(default_factory=Conditions)

    def options(self) -> dict[str, str]:
        """Return the choices that were made, as command line options."""
        names = ("scope", "op", "phase", "step", "rank", "level")
        made = {f"--{name}": str(getattr(self, name)) for name in names if getattr(self, name) is not None}
        return made | self.where.options()


@dataclass(frozen=True, slots=True)
class Call:
    """One call with the records of its slots."""

    step: int
    rank: int
    seq: int
    phase: str
    level: str
    scope: str
    op: str
    ordinal: int
    slots: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        """``neck.lstm/torch.lstm#0``."""
        return call_name(self.scope, self.op, self.ordinal)

    @property
    def place(self) -> str:
        """``forward, step 0, rank 0, api``."""
        return one_line(f"{self.phase}, step {self.step}, rank {self.rank}, {self.level}")


def scan(capture: Capture, chosen: Selection, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the chosen rows with ``columns``, some steps of a rank at a time, in order of rank, step and seq."""
    needed = [*dict.fromkeys([*columns, *_tests(chosen), *chosen.where.columns])]
    level = {} if chosen.level is None else {"level": chosen.level}
    steps = [step for step in capture.steps if chosen.step in (None, step)]
    for rank in sorted(capture.ranks):
        for k in range(0, len(steps) if chosen.rank in (None, rank) else 0, STEPS_AT_A_TIME):
            rows = capture.records(needed, rank=rank, step=steps[k : k + STEPS_AT_A_TIME], **level)
            rows = rows.filter(_mask(rows, chosen))
            if rows.num_rows:
                yield rows


def chosen_calls(capture: Capture, chosen: Selection, limit: int) -> tuple[list[Call], int]:
    """Return the first ``limit`` of the chosen calls with all that is shown of them, and how many there are. Raises TrueupError
    if there are none; it names the option that leaves nothing and what comes close."""
    total = 0
    names: list[dict[str, Any]] = []
    for rows in scan(capture, chosen, KEYS):
        starts = _starts(rows)
        if len(names) < limit:
            names += rows.select(KEYS).take(pa.array(starts[: limit - len(names)])).to_pylist()
        total += len(starts)
    if not total:
        raise nothing(capture, chosen)
    return _read(capture, chosen, names), total


def find_call(capture: Capture, chosen: Selection, name: str) -> Call:
    """Return the call that ``name`` (a seq, or ``scope/op#ordinal``) means, with all slots; raises TrueupError unless it is one."""
    names, total = _meant(capture, chosen, name)
    if total == 1:
        return _read(capture, Selection(chosen.path), names)[0]
    raise _unclear(name, names, total)


def find_first(capture: Capture, chosen: Selection, name: str) -> tuple[Call, str]:
    """Return the first call that ``name`` means, with its slots, and the others in words; raises TrueupError if there is none."""
    names, total = _meant(capture, chosen, name)
    if not total:
        raise _unclear(name, names, total)
    others = "; ".join(_where(one) for one in names[1:]) + ("; …" if total > len(names) else "")
    return _read(capture, Selection(chosen.path), names[:1])[0], one_line(others)


def _meant(capture: Capture, chosen: Selection, name: str) -> tuple[list[dict[str, Any]], int]:
    """Return the first calls that a name means, and how many there are."""
    names: list[dict[str, Any]] = []
    seen, total = False, 0
    for rows in scan(capture, chosen, NAMES):
        seen = True
        rows = rows.filter(_named(rows, name))
        starts = _starts(rows)
        names += rows.select(NAMES).take(pa.array(starts[: 8 - len(names)])).to_pylist()
        total += len(starts)
    if not seen:
        raise nothing(capture, chosen)
    return names, total


def _unclear(name: str, names: Sequence[dict[str, Any]], total: int) -> TrueupError:
    got = "none" if not total else "; ".join(_where(one) for one in names) + ("; …" if total > len(names) else "")
    return TrueupError(
        f"{one_line(name)} does not mean one call.\n"
        "  expected: a seq number, or scope/op#ordinal, of exactly one call\n"
        f"  got:      {one_line(got)}\n"
        "  next:     choose with --step, --phase, --rank or --level, or give its seq; `trueup show CAP` lists calls"
    )


def _named(rows: pa.Table, name: str) -> Any:
    if name.isdecimal():
        return pc.equal(rows["seq"], int(name))
    path, _, ordinal = name.rpartition("#")
    scope, _, op = (path or name).rpartition("/")
    mask = pc.and_(_matches(rows["scope"], lambda text: text == scope), _matches(rows["op"], _op_matcher(op)))
    return pc.and_(mask, pc.equal(rows["ordinal"], int(ordinal))) if path and ordinal.isdecimal() else mask


def _starts(rows: pa.Table) -> NDArray[np.int64]:
    """Return where each call begins."""
    if not rows.num_rows:
        return np.zeros(0, np.int64)
    keys = np.stack([rows[name].to_numpy().astype(np.int64) for name in KEYS])
    return np.flatnonzero(np.concatenate([[True], (np.diff(keys) != 0).any(axis=0)]))


def _read(capture: Capture, chosen: Selection, names: Sequence[dict[str, Any]]) -> list[Call]:
    """Read the slots of some calls: of each rank and step only those."""
    places: dict[tuple[int, int], list[int]] = {}
    for one in names:
        places.setdefault((one["rank"], one["step"]), []).append(one["seq"])
    grouped: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for (rank, step), seqs in places.items():
        foreign = [name for name in FOREIGN if name in getattr(capture, "names", ())]
        rows = capture.records([*COLUMNS, *foreign], rank=rank, step=step, seq=seqs)
        for row in rows.filter(_mask(rows, chosen)).to_pylist():
            grouped.setdefault((rank, step, row["seq"]), []).append(row)
    return [_call(slots) for slots in grouped.values()]


def _where(call: dict[str, Any]) -> str:
    return f"seq {call['seq']} ({call['phase']}, step {call['step']}, rank {call['rank']}, {call['level']})"


def _call(slots: Sequence[dict[str, Any]]) -> Call:
    first = slots[0]
    texts = {name: first[name] or "" for name in ("phase", "level", "scope", "op")}
    return Call(first["step"], first["rank"], first["seq"], **texts, ordinal=first["ordinal"], slots=tuple(slots))


def _mask(rows: pa.Table, chosen: Selection) -> NDArray[np.bool_]:
    mask = chosen.where.holds(rows)
    for name, matches in _tests(chosen).items():
        mask &= _matches(rows[name], matches).to_numpy(zero_copy_only=False)
    return mask


def _tests(chosen: Selection) -> dict[str, Callable[[str], bool]]:
    tests: dict[str, Callable[[str], bool]] = {}
    if chosen.scope is not None:
        scope = chosen.scope
        tests["scope"] = lambda text: fnmatchcase(text, scope) or fnmatchcase(text, f"{scope}.*")
    if chosen.op is not None:
        tests["op"] = _op_matcher(chosen.op)
    if chosen.phase is not None:
        tests["phase"] = lambda text: text == chosen.phase
    return tests


def _op_matcher(op: str) -> Callable[[str], bool]:
    return lambda text: fnmatchcase(text, op) or fnmatchcase(text.rpartition("::")[2], op)


def _matches(column: pa.ChunkedArray, matches: Callable[[str], bool]) -> pa.Array:
    """Test each distinct text once."""
    plain = pc.fill_null(pc.cast(column, pa.string()), "").combine_chunks().dictionary_encode()
    wanted = np.array([matches(text) for text in plain.dictionary.to_pylist()], bool)
    return pa.array(wanted[np.asarray(plain.indices)] if len(plain) else np.zeros(0, bool))


class NothingChosen(TrueupError):
    """No call of a capture is what was asked for, though it has some."""


def nothing(capture: Capture, chosen: Selection) -> TrueupError:
    """Return what to raise where nothing was chosen."""
    options = chosen.options()
    there: dict[str, set[str]] = {name: set() for name in ("step", "rank", "level", "phase", "scope", "op")}
    for rows in scan(capture, Selection(chosen.path), tuple(there)):
        for name, values in there.items():
            values.update(str(one) for one in pc.unique(rows[name]).to_pylist() if one not in (None, ""))
    following = "drop or widen an option; `trueup show CAP --tree` lists the modules"
    if not there["step"]:
        expected, got = "at least one recorded call", "an empty capture"
        following = f"record again ({capture.problems[0]})" if capture.problems else "record again"
    else:
        expected = f"calls that match {' '.join(f'{name} {value}'.strip() for name, value in options.items())}"
        got = _close(there, options)
    return (NothingChosen if there["step"] else TrueupError)(
        f"Nothing in {chosen.path} was chosen.\n"
        f"  expected: {one_line(expected)}\n"
        f"  got:      {one_line(got)}\n"
        f"  next:     {one_line(following)}"
    )


def _close(there: dict[str, set[str]], options: dict[str, str]) -> str:
    """Name the first option that no row fulfils by itself, and what there is instead."""
    for option, value in options.items():
        name = option.removeprefix("--")
        if name in there and not any(map(_test(name, value), there[name])):
            return f"no {name} {value}; {_offer(value, there[name], numeric=name in KEYS)}"
    if any(option.removeprefix("--") not in there for option in options):
        return "no tensor whose numbers are like that" + (" among the calls chosen otherwise" if len(options) > 1 else "")
    return "calls for each option, but none for all of them together"


def _test(name: str, value: str) -> Callable[[str], bool]:
    alone = {"scope": Selection(Path(), scope=value), "op": Selection(Path(), op=value)}
    return _tests(alone[name])[name] if name in alone else value.__eq__


def _offer(value: str, there: Iterable[str], *, numeric: bool) -> str:
    names = sorted(there, key=lambda text: (len(text), text))
    near = [] if numeric else difflib.get_close_matches(value, names, 3, 0.5)
    return f"near are {', '.join(near)}" if near else f"there are {', '.join(names[:6])}{', …' if len(names) > 6 else ''}"
