"""What a result holds beside its findings: the two runs in short, the table of calls, the counts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.model import LEVELS, RunSummary
from trueup.report.scaling import COLUMNS as SCALE_COLUMNS
from trueup.report.scaling import OP as SCALER
from trueup.report.scaling import loss_scale
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
        errors = j.error_in, j.error_out, j.expected, j.ratio
        key = c.step, c.rank, c.phase, c.level, c.scope, c.op, c.ordinal, b.seq, c.seq
        rows.append((*key, *errors, j.role, "", j.row.name, frames[0] if frames else None))
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
        elif told in ("carried", "unsized"):
            after = first is not None and (step, seq) > first
            before = "agrees" if told == "carried" else "incomparable"
            cells[state], cells[role] = ("deviates", "victim") if after else (before, "")
        finished.append(cells)
    columns: list[Any] = list(zip(*finished, strict=True)) if finished else [[] for _ in SCHEMA]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def count(table: pa.Table, unmatched: int, steps: int) -> dict[str, int]:
    """Count the calls by state."""
    states = table.column("state").to_pylist()
    names = ("equal", "agrees", "deviates", "incomparable")
    return {"compared": len(states), **{n: states.count(n) for n in names}, "unmatched": unmatched, "steps": steps}


@dataclass(frozen=True)
class Overview:
    """What is told from a capture's records at a glance, read once."""

    levels: tuple[str, ...]
    calls: int
    losses: dict[int, float]
    """Loss per step: the mean over ranks and micro-batches of what ``backward()`` was called on."""
    scale: str | None
    """How the scale of a GradScaler went, in words; None where there was none."""

    @classmethod
    def of(cls, capture: Capture) -> Overview:
        """Read the narrow columns of a capture."""
        table = capture.records(columns=["rank", "step", "seq", "level", "op", "mean"])
        numbers = [table.column(n).to_numpy().astype(np.int64) for n in ("rank", "step", "seq")]  # sorted by these
        changes = np.zeros(max(table.num_rows - 1, 0), dtype=bool)
        for column in numbers:
            changes |= column[1:] != column[:-1]
        held = set(table.column("level").unique().to_pylist())
        calls = int(np.count_nonzero(changes)) + bool(table.num_rows)
        scaled = pc.any(pc.equal(table.column("op"), SCALER)).as_py()
        scale = loss_scale(capture.records(columns=list(SCALE_COLUMNS), op=SCALER)) if scaled else None
        return cls(tuple(level for level in LEVELS if level in held), calls, _losses(table), scale)


def _losses(table: pa.Table) -> dict[int, float]:
    table = table.filter(pc.equal(table.column("op"), LOSS_OP))
    values: defaultdict[int, list[float]] = defaultdict(list)
    for step, mean in zip(table.column("step").to_pylist(), table.column("mean").to_pylist(), strict=True):
        if mean is not None:  # else no statistics were kept
            values[step].append(float(mean))
    return {step: sum(v) / len(v) for step, v in sorted(values.items())}


def summarise(capture: Capture, overview: Overview, ranks: Sequence[int]) -> RunSummary:
    """Say in short what a capture is."""
    manifests = [capture.ranks[r] for r in ranks if r in capture.ranks]
    first = manifests[0] if manifests else {}
    devices = dict.fromkeys(str(d) for m in manifests for d in m.get("devices", []))
    environment = {f"version of {k}": str(v) for k, v in first.get("versions", {}).items()}
    environment |= {str(k): str(v) for k, v in first.get("environment", {}).items()}
    environment |= {f"seed of {k}": str(v) for k, v in first.get("seeds", {}).items()}
    environment |= {} if overview.scale is None else {"loss scale": overview.scale}
    notes = dict.fromkeys([str(n) for m in manifests for n in m.get("notes", [])] + list(capture.problems))
    return RunSummary(
        path=str(capture.path),
        framework=str(first.get("framework", "?")),
        devices=tuple(devices),
        ranks=len(capture.ranks),
        steps=len(capture.steps),
        calls=overview.calls,
        losses=tuple(overview.losses.items()),
        environment=environment,
        notes=tuple(notes),
    )


def loss_note(baseline: RunSummary, candidate: RunSummary, limit: float) -> str | None:
    """Say that the losses are too far apart to call two runs aligned, or return None."""
    other = dict(candidate.losses)
    for step, loss in baseline.losses:
        value = other.get(step, loss)  # a step that one side lacks is said elsewhere
        if loss == value or (math.isnan(loss) and math.isnan(value)):
            continue
        apart = abs(value - loss) / max(abs(loss), 1e-12)
        if not apart <= limit:  # NaN against a number too
            return (
                f"the losses are {'' if math.isnan(apart) else f'{apart:.1%} '}apart at step {step} ({loss:.6g} and "
                f"{value:.6g}), more than {limit:.0%}, and no single call explains it: the difference may be the growth of "
                "rounding errors, or lie in calls not captured"
            )
    return None
