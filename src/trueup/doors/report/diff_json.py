"""Two tensors compared, as strict JSON; numbers that it cannot hold are the strings ``NaN``, ``Infinity``, ``-Infinity``."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from trueup.doors.report.histograms import histograms
from trueup.doors.report.operands import Operand
from trueup.doors.report.tensor_diff import TensorDiff, value
from trueup.foundation.kernels.metrics import Metrics

FORMAT_VERSION = 1


def to_json(diff: TensorDiff) -> str:
    """Write all that is known of two tensors; docs/looking-around.md has the keys."""
    sides = [side.values for side in (diff.baseline, diff.candidate)]
    there = [side for side in sides if side is not None]
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "answer": diff.answer,
        "sentence": diff.sentence,
        "rtol": diff.tolerance.rtol,
        "atol": diff.tolerance.atol,
        "baseline": _side(diff.baseline),
        "candidate": _side(diff.candidate),
        "notes": list(diff.notes),
        "metrics": _metrics(diff.metrics) if diff.metrics is not None else None,
        "closeness": _closeness(diff),
        "estimate": dataclasses.asdict(diff.estimate) if diff.estimate is not None else None,
        "values": [
            {"from": low, "to": high, "baseline": counts[0], "candidate": counts[1]}
            for low, high, counts in (histograms(there) if diff.metrics is not None and len(there) == 2 else [])
        ],
    }
    return json.dumps(_plain(document), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _side(side: Operand) -> dict[str, Any]:
    stats = dataclasses.asdict(side.stats) if side.stats is not None else None
    said = {name: getattr(side, name) for name in ("name", "where", "dtype", "shape", "digest", "missing")}
    return said | {"statistics": stats}


def _metrics(metrics: Metrics) -> dict[str, Any]:
    found = {field.name: getattr(metrics, field.name) for field in dataclasses.fields(metrics) if field.name != "pair"}
    positions = {name: getattr(metrics.pair, name)._asdict() for name in ("nan", "posinf", "neginf", "mask")}
    return found | {"same": metrics.same, "positions": positions}


def _closeness(diff: TensorDiff) -> dict[str, Any] | None:
    if diff.closeness is None:
        return None
    names = ("index", "absolute", "times")
    worst = [
        {name: getattr(each, name) for name in names} | {"baseline": value(each.baseline), "candidate": value(each.candidate)}
        for each in diff.closeness.worst
    ]
    return {"elements": diff.closeness.elements, "outside": diff.closeness.outside, "worst": worst}


def _plain(held: Any) -> Any:
    if isinstance(held, float) and not math.isfinite(held):
        return "NaN" if math.isnan(held) else "Infinity" if held > 0 else "-Infinity"
    if isinstance(held, dict):
        return {str(key): _plain(each) for key, each in held.items()}
    if isinstance(held, (list, tuple)):
        return [_plain(each) for each in held]
    return held
