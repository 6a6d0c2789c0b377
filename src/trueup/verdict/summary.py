"""What a result holds beside its findings: the two runs in short, the table of calls, the counts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.model import RunSummary
from trueup.store import Capture
from trueup.verdict.findings import Frames
from trueup.verdict.judge import Judged

LOSS_OP = "torch.Tensor.backward"

SCHEMA = pa.schema(
    [
        *((n, pa.int32()) for n in ("step", "rank")),
        *((n, pa.string()) for n in ("phase", "level", "scope", "op")),
        ("ordinal", pa.int32()),
        *((n, pa.int64()) for n in ("seq_baseline", "seq_candidate")),
        *((n, pa.float64()) for n in ("error_in", "error_out", "expected", "ratio")),
        *((n, pa.string()) for n in ("state", "role", "rule", "source")),
    ]
)
"""Columns of ``calls.parquet``: one row per matched call."""


def call_rows(judged: Iterable[Judged], sites: Frames) -> list[tuple[Any, ...]]:
    """Return the rows of one rank and step; `finish_table` sets the state of what turns out to be a culprit or victim."""
    rows = []
    for j in judged:
        b, c = j.call.baseline, j.call.candidate
        frames = sites.get(c.site, ((), None))[0] if c.site is not None else ()
        rows.append(
            (
                c.step, c.rank, c.phase, c.level, c.scope, c.op, c.ordinal, b.seq, c.seq,
                j.error_in, j.error_out, j.expected, j.ratio, j.role, "", j.row.name, frames[0] if frames else None,
            )  # fmt: skip
        )
    return rows


def finish_table(rows: list[tuple[Any, ...]], culprits: set[tuple[int, int, int]], first: tuple[int, int] | None) -> pa.Table:
    """Build the table of calls.

    Args:
        rows: what `call_rows` made, of all parts.
        culprits: ``(rank, step, seq on the candidate)`` of the culprits.
        first: ``(step, seq)`` of the first culprit, or None: only what comes after it is a victim.
    """
    state, role = SCHEMA.get_field_index("state"), SCHEMA.get_field_index("role")
    finished = []
    for row in rows:
        cells = list(row)
        step, rank, seq, told = cells[0], cells[1], cells[8], cells[state]
        if (rank, step, seq) in culprits:
            cells[state], cells[role] = "deviates", "culprit"
        elif told == "carried":
            after = first is not None and (step, seq) > first
            cells[state], cells[role] = ("deviates", "victim") if after else ("agrees", "")
        finished.append(cells)
    columns = list(zip(*finished, strict=True)) if finished else [[] for _ in SCHEMA]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def count(table: pa.Table, unmatched: int, steps: int) -> dict[str, int]:
    """Count the calls by state."""
    states = table.column("state").to_pylist()
    names = ("equal", "agrees", "deviates", "incomparable")
    return {"compared": len(states), **{n: states.count(n) for n in names}, "unmatched": unmatched, "steps": steps}


def summarise(capture: Capture, ranks: Sequence[int]) -> RunSummary:
    """Say in short what a capture is."""
    manifests = [capture.ranks[r] for r in ranks if r in capture.ranks]
    first = manifests[0] if manifests else {}
    devices = dict.fromkeys(str(d) for m in manifests for d in m.get("devices", []))
    environment = {f"version of {k}": str(v) for k, v in first.get("versions", {}).items()}
    environment |= {str(k): str(v) for k, v in first.get("environment", {}).items()}
    environment |= {f"seed of {k}": str(v) for k, v in first.get("seeds", {}).items()}
    notes = dict.fromkeys([str(n) for m in manifests for n in m.get("notes", [])] + list(capture.problems))
    calls = capture.records(columns=["rank", "step", "seq"])
    number = len(np.unique(np.stack([np.asarray(calls.column(n), dtype=np.int64) for n in ("rank", "step", "seq")]), axis=1).T)
    return RunSummary(
        str(capture.path), str(first.get("framework", "?")), tuple(devices), len(capture.ranks), len(capture.steps), number,
        tuple(_losses(capture).items()), environment, tuple(notes),
    )  # fmt: skip


def _losses(capture: Capture) -> dict[int, float]:
    """Return the loss per step: the mean over ranks and micro-batches of what `backward()` was called on."""
    table = capture.records(columns=["step", "op", "mean"], level=["api"])
    table = table.filter(pa.compute.equal(table.column("op"), LOSS_OP)) if table.num_rows else table
    values: defaultdict[int, list[float]] = defaultdict(list)
    for step, mean in zip(table.column("step").to_pylist(), table.column("mean").to_pylist(), strict=True):
        values[step].append(math.nan if mean is None else float(mean))
    return {step: sum(v) / len(v) for step, v in sorted(values.items())}


def loss_note(baseline: RunSummary, candidate: RunSummary, limit: float) -> str | None:
    """Say that the losses are too far apart to call two runs aligned, or return None."""
    other = dict(candidate.losses)
    for step, loss in baseline.losses:
        value = other.get(step, loss)
        apart = abs(value - loss) / max(abs(loss), 1e-12)
        if apart > limit or math.isnan(value) != math.isnan(loss):
            return (
                f"the losses are {apart:.1%} apart at step {step} ({loss:.6g} and {value:.6g}), more than {limit:.0%}, "
                "and no single call explains it: the difference may be the growth of rounding errors, or lie in calls not captured"
            )
    return None
