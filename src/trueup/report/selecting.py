"""Choosing calls out of a capture's records, and saying what is wrong with a choice that leaves none."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.model import TrueupError
from trueup.report.wording import one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

COLUMNS = (
    "step", "rank", "seq", "phase", "level", "scope", "op", "ordinal", "slot", "dtype", "shape", "device", "numel",
    "min", "max", "mean", "l2", "n_nan", "n_posinf", "n_neginf", "n_zero", "n_subnormal", "n_saturated", "digest",
    "payload_segment", "payload_key", "payload_view", "value", "producer_seq", "site",
)  # fmt: skip
"""All that is shown of a record; the sketch, its widest column, is not."""


class Records(Protocol):
    """What can be asked for records."""

    problems: list[str]

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

    def options(self) -> dict[str, str]:
        """Return the choices that were made, as command line options."""
        names = ("scope", "op", "phase", "step", "rank", "level")
        return {f"--{name}": str(getattr(self, name)) for name in names if getattr(self, name) is not None}


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


def chosen_rows(capture: Records, chosen: Selection, columns: Sequence[str]) -> pa.Table:
    """Return the rows of the chosen calls.

    Raises:
        TrueupError: there are none; the message names the option that leaves nothing and what comes close.
    """
    where = {name: getattr(chosen, name) for name in ("step", "rank", "level")}
    rows = capture.records(list(columns), **{name: value for name, value in where.items() if value is not None})
    kept = rows.filter(_mask(rows, chosen))
    if kept.num_rows == 0:
        raise _nothing(capture, chosen)
    return kept


def calls_of(rows: pa.Table, limit: int) -> tuple[list[Call], int]:
    """Group rows by call; returns the first ``limit`` calls and how many there are."""
    keys = np.stack([rows[name].to_numpy().astype(np.int64) for name in ("rank", "step", "seq")])
    starts: NDArray[np.int64] = np.zeros(0, np.int64)
    if rows.num_rows:
        starts = np.flatnonzero(np.concatenate([[True], (np.diff(keys) != 0).any(axis=0)]))
    end = int(starts[limit]) if len(starts) > limit else rows.num_rows
    grouped: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for row in rows.slice(0, end).to_pylist():
        grouped.setdefault((row["rank"], row["step"], row["seq"]), []).append(row)
    return [_call(slots) for slots in grouped.values()], len(starts)


def find_call(rows: pa.Table, name: str) -> Call:
    """Return the one call that ``name`` (a seq, or ``scope/op#ordinal``) means.

    Raises:
        TrueupError: there is none, or there are several.
    """
    if name.isdecimal():
        found = rows.filter(pc.equal(rows["seq"], int(name)))
    else:
        path, _, ordinal = name.rpartition("#")
        scope, _, op = (path or name).rpartition("/")
        mask = pc.and_(_matches(rows["scope"], lambda text: text == scope), _matches(rows["op"], _op_matcher(op)))
        if path and ordinal.isdecimal():
            mask = pc.and_(mask, pc.equal(rows["ordinal"], int(ordinal)))
        found = rows.filter(mask)
    calls, total = calls_of(found, 8)
    if total == 1:
        return calls[0]
    got = "none" if not total else "; ".join(_where(call) for call in calls) + ("; …" if total > len(calls) else "")
    raise TrueupError(
        f"{name} does not mean one call.\n"
        "  expected: a seq number, or scope/op#ordinal, of exactly one call\n"
        f"  got:      {one_line(got)}\n"
        "  next:     choose with --step, --phase, --rank or --level, or give its seq; without --tensor calls are listed"
    )


def _where(call: Call) -> str:
    return f"seq {call.seq} ({call.phase}, step {call.step}, rank {call.rank}, {call.level})"


def _call(slots: Sequence[dict[str, Any]]) -> Call:
    first = slots[0]
    texts = {name: first[name] or "" for name in ("phase", "level", "scope", "op")}
    return Call(first["step"], first["rank"], first["seq"], **texts, ordinal=first["ordinal"], slots=tuple(slots))


def _mask(rows: pa.Table, chosen: Selection) -> NDArray[np.bool_]:
    mask = np.ones(rows.num_rows, bool)
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


def _nothing(capture: Records, chosen: Selection) -> TrueupError:
    everything = capture.records(["step", "rank", "level", "phase", "scope", "op"])
    options = chosen.options()
    following = "drop or widen an option; `trueup show CAP --tree` lists the modules"
    if everything.num_rows == 0:
        expected, got = "at least one recorded call", "an empty capture"
        following = f"record again ({capture.problems[0]})" if capture.problems else "record again"
    else:
        expected = f"calls that match {' '.join(f'{name} {value}' for name, value in options.items())}"
        got = _close(everything, options)
    return TrueupError(
        f"Nothing in {chosen.path} was chosen.\n"
        f"  expected: {one_line(expected)}\n"
        f"  got:      {one_line(got)}\n"
        f"  next:     {one_line(following)}"
    )


def _close(everything: pa.Table, options: dict[str, str]) -> str:
    """Name the first option that no row fulfils by itself, and what there is instead."""
    for option, value in options.items():
        name = option.removeprefix("--")
        there = [str(one) for one in pc.unique(everything[name]).to_pylist() if one not in (None, "")]
        test = _test(name, value)
        if not any(map(test, there)):
            return f"no {name} {value}; {_offer(value, there)}"
    return "calls for each option, but none for all of them together"


def _test(name: str, value: str) -> Callable[[str], bool]:
    alone = {"scope": Selection(Path(), scope=value), "op": Selection(Path(), op=value)}
    return _tests(alone[name])[name] if name in alone else value.__eq__


def _offer(value: str, there: Iterable[str]) -> str:
    names = sorted(there, key=lambda text: (len(text), text))
    near = difflib.get_close_matches(value, names, 3, 0.5)
    return (
        f"near are {', '.join(near)}" if near else f"there are {', '.join(names[:6])}{', …' if len(names) > 6 else ''}"
    )
