"""Choosing calls out of a capture's records, and saying what is wrong with a choice that leaves none.

A capture may hold millions of rows. So the choice reads the few columns that it needs, some steps at a time, and all that is shown
of a call is read for the calls that are shown.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.doors.report.conditions import Conditions
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

COLUMNS = (
    "step", "rank", "seq", "phase", "level", "scope", "op", "ordinal", "slot", "dtype", "shape", "device", "numel",
    "min", "max", "mean", "l2", "n_nan", "n_posinf", "n_neginf", "n_zero", "n_subnormal", "n_saturated", "digest",
    "payload_segment", "payload_key", "payload_view", "value", "producer_seq", "site",
)  # fmt: skip
"""All that is shown of a record; the sketch, its widest column, is not."""
FOREIGN = ("foreign_name", "foreign_checksum", "foreign_statistics")
"""And of a record that was imported."""


KEYS = ("rank", "step", "seq")
NAMES = (*KEYS, "phase", "level", "scope", "op", "ordinal")
"""What names a call."""
STEPS_AT_A_TIME = 16


class Records(Protocol):
    """What can be asked for records."""

    ranks: Any
    problems: Any

    @property
    def steps(self) -> list[int]:
        """Steps with records, in order."""

    def records(self, columns: Any = None, **where: Any) -> pa.Table:
        """Return rows, one per slot, in order of execution."""


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


def scan(capture: Records, chosen: Selection, columns: Sequence[str]) -> Iterator[pa.Table]:
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


def chosen_calls(capture: Records, chosen: Selection, limit: int) -> tuple[list[Call], int]:
    """Return the first ``limit`` of the chosen calls with all that is shown of them, and how many there are.

    Raises:
        TrueupError: there are none; the message names the option that leaves nothing and what comes close.
    """
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


def find_call(capture: Records, chosen: Selection, name: str) -> Call:
    """Return the one chosen call that ``name`` (a seq, or ``scope/op#ordinal``) means, with all its slots.

    Raises:
        TrueupError: there is none, or there are several.
    """
    names, total = _meant(capture, chosen, name)
    if total == 1:
        return _read(capture, Selection(chosen.path), names)[0]
    raise _unclear(name, names, total)


def find_first(capture: Records, chosen: Selection, name: str) -> tuple[Call, str]:
    """Return the first of the chosen calls that ``name`` means, with all its slots, and the others in words.

    Raises:
        TrueupError: there is none.
    """
    names, total = _meant(capture, chosen, name)
    if not total:
        raise _unclear(name, names, total)
    others = "; ".join(_where(one) for one in names[1:]) + ("; …" if total > len(names) else "")
    return _read(capture, Selection(chosen.path), names[:1])[0], one_line(others)


def _meant(capture: Records, chosen: Selection, name: str) -> tuple[list[dict[str, Any]], int]:
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


def _read(capture: Records, chosen: Selection, names: Sequence[dict[str, Any]]) -> list[Call]:
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


def nothing(capture: Records, chosen: Selection) -> TrueupError:
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
    return TrueupError(
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
    return (
        f"near are {', '.join(near)}" if near else f"there are {', '.join(names[:6])}{', …' if len(names) > 6 else ''}"
    )
