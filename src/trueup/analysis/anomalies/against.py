"""Does it matter, told by a second run: whether a trusted run gives the same numbers in the calls found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.comparison.result.comparing import compare
from trueup.foundation.facts.anomaly import Anomaly
from trueup.foundation.store import Capture
from trueup.foundation.words.wording import sci

TRAINED = frozenset({"loss", "gradients", "parameters", "other ranks"})


def settled_against(found: Sequence[Anomaly], baseline: str | Path, capture: Capture) -> tuple[list[Anomaly], list[str]]:
    """Return the anomalies with what comparing their calls with those of a baseline told, and notes.

    - the same numbers there, and nothing lasting got the bad ones: *harmless*, this run loses nothing against that one
    - other numbers of the same inputs: *accuracy-relevant*
    - its inputs differ already, or it is not there: as it was, and why

    Args:
        found: of the capture.
        baseline: a capture of the same training, whole or of these calls alone (``--include``).
        capture: the one that was judged.

    Raises:
        TrueupError: the baseline cannot be read.
    """
    result = compare(baseline, capture.path)
    places = _places(result.matched)
    told = [_told(one, places.get((one.place.rank, one.place.seq))) for one in found]
    return told, [f"{result.counts.get('compared', 0):,} calls were compared with {baseline}"]


def _places(calls: pa.Table) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the rows of matched calls by rank and execution number."""
    names = ("rank", "seq_candidate", "state", "role", "error_in", "error_out", "expected")
    rows = calls.select(list(names)).to_pylist()
    return {(row["rank"], row["seq_candidate"]): row for row in rows}


def _told(one: Anomaly, row: dict[str, Any] | None) -> Anomaly:
    if one.place.seq < 0 or one.kind in ("input", "parameters", "loss_scale"):
        return one
    if row is None:
        return dataclasses.replace(one, because=f"{one.because}; the baseline has no such call", run_next="")
    if row["state"] in ("equal", "agrees"):
        same = "the baseline's call gives the same"
        if one.matters == "accuracy-relevant" or (one.matters == "unknown" and TRAINED & set(one.reached)):
            return dataclasses.replace(one, because=f"{one.because}; {same}, so it is not this device's doing", run_next="")
        return dataclasses.replace(
            one, matters="harmless", transient=True, because=f"{same}: this run loses nothing against it", run_next=""
        )  # fmt: skip
    error = float(row["error_in"] or 0.0)
    if row["state"] == "deviates" and row["role"] != "victim" and np.isfinite(error):
        size = f"by {sci(float(row['error_out']))} (relative L2), where {sci(float(row['expected']))} is explained"
        because = f"the baseline's call gives other numbers of the same inputs, {size}"
        return dataclasses.replace(one, matters="accuracy-relevant", because=because, transient=False, run_next="")
    why = "what it reads is not what the baseline's call reads" if row["state"] == "deviates" else "it cannot be compared"
    return dataclasses.replace(one, because=f"{one.because}; against the baseline: {why}", run_next="")
