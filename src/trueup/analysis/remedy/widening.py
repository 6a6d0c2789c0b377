"""Which calls go on in float32 so that a gradient fits: the one whose backward overflows, then those that made what it read.

    loss <- head <- mid <- tanh <- enc       the gradient of what `mid` read overflows, and has the dtype of that tensor:
                                             rules for `mid`, `tanh`, `enc`, nearest first

A rule is for a module that holds no other, else for a function in its scope.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

from trueup.analysis.anomalies.describing import NARROW, wider_function, wider_module
from trueup.foundation.facts.anomaly import Anomaly
from trueup.foundation.facts.operators import has
from trueup.foundation.store import Capture

COLUMNS = ("seq", "parent", "level", "phase", "scope", "op", "slot", "dtype", "forward_seq", "producer_seq", "site")

Row = Mapping[str, Any]


def wider_on_the_way(capture: Capture, found: Anomaly) -> tuple[str, ...]:
    """Return rules for the call whose backward overflows, and for all whose narrow results led to it, nearest first.

    Args:
        capture: the run, at any level; of a module alone the modules are known, and no function.
        found: a call of the backward.
    """
    calls = _calls(capture, found)
    parts = [row[0]["scope"].split(".") for row in calls.values()]
    held = {"", *(".".join(names[:k]) for names in parts for k in range(1, len(names)))}
    rules = dict.fromkeys(_rule(calls, seq, held) for seq in _back(calls, _forward(calls, found.place.seq)))
    return tuple(rule for rule in rules if rule)


def cast_on_the_way(capture: Capture, found: Anomaly) -> str:
    """Return the line that casts a wide tensor whose gradient overflows, ``train.py:8 in forward``; nothing where none does."""
    calls = _calls(capture, found)
    for seq in _back(calls, _forward(calls, found.place.seq)):
        first, read = calls[seq][0], [row["dtype"] for row in calls[seq] if str(row["slot"]).startswith("input.")]
        narrows = any(row["dtype"] in NARROW for row in calls[seq]) and not any(dtype in NARROW for dtype in read)
        if narrows and first["level"] == "api" and has(first["op"], "converts"):
            frames, _ = capture.sites(found.place.rank).get(first["site"], ((), None))
            return frames[0] if frames else str(first["op"])
    return ""


def _calls(capture: Capture, found: Anomaly) -> dict[int, list[Row]]:
    """Return the calls of a step, by place in its order, each as its rows."""
    calls: dict[int, list[Row]] = defaultdict(list)
    for row in capture.records(columns=list(COLUMNS), rank=found.place.rank, step=found.place.step).to_pylist():
        calls[row["seq"]].append(row)
    return calls


def _forward(calls: Mapping[int, list[Row]], seq: int | None) -> int | None:
    """Return the forward call whose backward a call belongs to, by itself or by a call around it."""
    while seq is not None and seq in calls:
        row = calls[seq][0]
        if row["forward_seq"] is not None:
            return int(row["forward_seq"])
        seq = row["parent"]
    return None


def _back(calls: Mapping[int, list[Row]], start: int | None) -> Iterator[int]:
    """Go from a call to those that made the tensors it read, and on, in the forward pass; only through what is narrow somewhere."""
    inside = [seq for seq, rows in calls.items() if rows[0]["parent"] == start and rows[0]["phase"] in ("forward", "recompute")]
    waiting, seen = deque([start] if start in calls else inside[::-1]), {start}  # at level aten what the function called
    while waiting:
        seq = waiting.popleft()
        if seq is None or seq not in calls or calls[seq][0]["phase"] not in ("forward", "recompute"):
            continue
        yield seq
        for row in calls[seq]:
            made = row["producer_seq"]
            if str(row["slot"]).startswith("input.") and str(row["dtype"]).startswith(("float", "bfloat")) and made not in seen:
                seen.add(made)
                waiting.append(made)


def _rule(calls: Mapping[int, list[Row]], seq: int, held: set[str]) -> str:
    """Return the rule for a call that reads or gives something narrow; nothing for a view, which computes in no dtype."""
    row = calls[seq][0]
    scope, op = row["scope"], None
    if not any(one["dtype"] in NARROW for one in calls[seq]):
        return ""
    if scope and scope not in held:
        return wider_module(scope)
    outer: int | None = seq
    while outer is not None and outer in calls and calls[outer][0]["scope"] == scope:
        op = calls[outer][0]["op"] if calls[outer][0]["level"] == "api" else op
        outer = calls[outer][0]["parent"]
    if op is None:
        return wider_module(scope) if scope else ""
    return "" if has(op, "view") or has(op, "converts") or "::" in op else wider_function(scope, op)
