"""Choosing slots by the state of their numbers: ``n_nan > 0 and l2 >= 1e3``, read and never evaluated.

A condition is ``NAME OP NUMBER``; several are joined by ``and``. NAME is a statistic or ``numel``. A slot that lacks the number
(an argument, a digest) fulfils none.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.foundation.model import NUMBERS, TrueupError
from trueup.foundation.words.wording import one_line

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

NAMES = ("numel", *NUMBERS)
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
    """Read ``--where`` and the options beside it.

    >>> str(read_conditions("n_nan > 0 and l2>=1e3").all_of[1])
    'l2 >= 1000'

    Raises:
        TrueupError: a part of the text is no condition, or names no statistic.
    """
    parts = re.split(r"\s+and\s+", text.strip()) if text is not None else []
    states = {"nan": nan, "inf": inf, "saturated": saturated}
    return Conditions(tuple(map(_condition, parts)), tuple(name for name, wanted in states.items() if wanted))


def _condition(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    try:
        if match is None or match[1] not in NAMES:
            raise ValueError
        return Condition(match[1], match[2], float(match[3]))
    except ValueError:
        raise TrueupError(
            "--where cannot be read.\n"
            "  expected: NAME OP NUMBER, several joined by `and`, such as 'n_nan > 0 and l2 >= 1e3'\n"
            f"  got:      {one_line(text)!r}\n"
            f"  next:     NAME is one of {', '.join(NAMES)}; OP one of {', '.join(OPERATORS)}"
        ) from None


def column(rows: pa.Table, name: str) -> NDArray[np.float64]:
    """Return a column as float64, NaN where it is null."""
    import pyarrow as pa

    return np.asarray(rows[name].cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)
