"""The report of a shadow run on the terminal: the sentence, then a row per operator, the worst first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trueup.foundation.words.wording import counted, one_line, sci, times
from trueup.recording.execution.shadow_result import WORST, ShadowResult


@dataclass
class _Operator:
    calls: int = 0
    worst: dict[str, Any] | None = None


def render(result: ShadowResult, limit: int, console: Console) -> None:
    """Print what was found."""
    for line in result.sentence.splitlines():
        console.print(Text(line), soft_wrap=True)
    operators = _operators(result)
    if not operators:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("operator", "phase"):
        table.add_column(heading, overflow="fold")
    for heading in ("outputs", "largest error", "of what rounding explains"):
        table.add_column(heading, justify="right")
    table.add_column("state")
    ordered = sorted(operators.items(), key=lambda item: _rank(item[1]))
    for (op, phase), operator in ordered[:limit]:
        worst = operator.worst or {}
        error, excess = worst.get("error"), worst.get("excess")
        table.add_row(
            Text(one_line(op)), Text(one_line(phase)), f"{operator.calls:,}",
            "" if error is None or math.isnan(error) else sci(error), "" if excess is None else times(excess),
            Text(one_line(str(worst.get("state")))),
        )  # fmt: skip
    console.print()
    console.print(table)
    if len(ordered) > limit:
        console.print(f"and {counted(len(ordered) - limit, 'more operator')}: --limit {len(ordered)}")


def _operators(result: ShadowResult) -> dict[tuple[str, str], _Operator]:
    found: dict[tuple[str, str], _Operator] = {}
    columns = ["op", "phase", "state", "error", "excess"]
    for row in result.calls.select(columns).to_pylist():
        if row["state"] not in WORST:
            continue
        operator = found.setdefault((row["op"], row["phase"]), _Operator())
        operator.calls += 1
        if operator.worst is None or _order(row) < _order(operator.worst):
            operator.worst = row
    return found


def _order(row: dict[str, Any]) -> tuple[int, float]:
    return WORST.index(row["state"]), -(row["excess"] or 0.0)


def _rank(operator: _Operator) -> tuple[int, float]:
    return _order(operator.worst) if operator.worst else (len(WORST), 0.0)
