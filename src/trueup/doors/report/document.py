"""``verdict.json``: a result as a document that a program can rely on. Schema and meaning: docs/verdict-json.md.

Strict JSON: a number that JSON cannot hold is one of the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from importlib import resources
from typing import Any

from trueup.analysis.remedy.advice import next_command, policy_to_try
from trueup.foundation.model import Evidence, Finding, Neighbour, Occurrence, Result, RunSummary, SlotComparison

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; new fields may come at any time."""


def document(result: Result) -> dict[str, Any]:
    """Return a result as JSON-ready data: everything but the rows of ``result.calls``, which are in calls.parquet."""
    advice, remedy = next_command(result), policy_to_try(result)
    return {
        "schema": "trueup-verdict",
        "schema_version": SCHEMA_VERSION,
        "verdict": result.verdict,
        "exit_code": result.exit_code,
        "sentence": result.sentence,
        "next_command": advice[1] if advice else None,
        "policy_to_try": remedy[0] if remedy else None,
        "criterion": result.criterion,
        "counts": dict(result.counts),
        "culprits": [_finding(finding) for finding in result.culprits],
        "victims": [_call(finding) for finding in result.victims],
        "unmatched": [
            _call(finding) | {"side": finding.side, "neighbours": [_neighbour(near) for near in finding.neighbours]}
            for finding in result.unmatched
        ],
        "rules": [dataclasses.asdict(rule) for rule in result.rules],
        "occurrences": [_occurrence(one) for one in result.occurrences],
        "notes": list(result.notes),
        "baseline": _run(result.baseline),
        "candidate": _run(result.candidate),
    }


def dumps(result: Result) -> str:
    """Return the text of verdict.json."""
    return json.dumps(document(result), indent=2, allow_nan=False) + "\n"


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) that every ``document`` fulfils."""
    text = resources.files("trueup.doors.report").joinpath("verdict.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def json_number(value: float) -> float | str:
    """Return a number, or its name if JSON has none for it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _call(finding: Finding) -> dict[str, Any]:
    names = ("kind", "rank", "step", "phase", "level", "scope", "op", "ordinal", "source")
    return {name: getattr(finding, name) for name in names} | {
        "seq_baseline": finding.seq[0],
        "seq_candidate": finding.seq[1],
        "error_in": json_number(finding.error_in),
        "error_out": json_number(finding.error_out),
        "expected": json_number(finding.expected),
        "ratio": json_number(finding.ratio),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return _call(finding) | {
        "sentence": finding.sentence,
        "confidence": finding.confidence,
        "rule": finding.rule,
        "because": finding.because,
        "side": finding.side,
        "api": finding.api,
        "aten": list(finding.aten),
        "stack": list(finding.stack),
        "source_line": finding.source_line,
        "victims": finding.victims,
        "beyond": finding.beyond,
        "alike": finding.alike,
        "alike_in": list(finding.alike_in),
        "slots": [_slot(slot) for slot in finding.slots],
        "evidence": None if finding.evidence is None else _evidence(finding.evidence),
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    return {
        "histograms": [
            {"slot": spread.slot} | {name: list(getattr(spread, name)) for name in ("edges", "baseline", "candidate")}
            for spread in evidence.histograms
        ],
        "worst": [
            {
                "slot": element.slot,
                "index": list(element.index),
                "baseline": json_number(element.baseline),
                "candidate": json_number(element.candidate),
                "ulps": json_number(element.ulps),
            }
            for element in evidence.worst
        ],
        "nodes": [_neighbour(near) for near in evidence.nodes],
        "edges": [
            {
                "source": edge.source,
                "target": edge.target,
                "slots": list(edge.slots),
                "side": edge.side,
                "error": json_number(edge.error),
            }
            for edge in evidence.edges
        ],
        "omitted": evidence.omitted,
        "notes": list(evidence.notes),
    }


def _occurrence(one: Occurrence) -> dict[str, Any]:
    names = ("rank", "step", "phase", "level", "scope", "op", "ordinal", "sender", "cause", "sentence")
    return {name: getattr(one, name) for name in names} | {
        "seq_baseline": one.seq[0],
        "seq_candidate": one.seq[1],
        "error": json_number(one.error),
    }


def _neighbour(near: Neighbour) -> dict[str, Any]:
    names = ("hops", "step", "phase", "level", "scope", "op", "ordinal", "state", "role", "side")
    return {name: getattr(near, name) for name in names} | {
        "seq_baseline": near.seq[0],
        "seq_candidate": near.seq[1],
        "error_in": json_number(near.error_in),
        "error_out": json_number(near.error_out),
    }


def _slot(slot: SlotComparison) -> dict[str, Any]:
    return {
        "slot": slot.slot,
        "state": slot.state,
        "relative_l2": json_number(slot.relative_l2),
        "method": slot.method,
        "dtype": list(slot.dtype),
        "shape": list(slot.shape),
        "baseline": _held(slot.baseline),
        "candidate": _held(slot.candidate),
        "reason": slot.reason,
    }


def _held(held: Any) -> Any:
    if not dataclasses.is_dataclass(held) or isinstance(held, type):
        return held
    facts = dataclasses.asdict(held)
    return {name: json_number(value) if isinstance(value, float) else value for name, value in facts.items()}


def _run(run: RunSummary) -> dict[str, Any]:
    return {
        "path": run.path,
        "framework": run.framework,
        "devices": list(run.devices),
        "ranks": run.ranks,
        "steps": run.steps,
        "calls": run.calls,
        "losses": [{"step": step, "loss": json_number(loss)} for step, loss in run.losses],
        "gradient_norms": [{"step": step, "norm": json_number(norm)} for step, norm in run.gradient_norms],
        "gradient_source": run.gradient_source,
        "environment": dict(run.environment),
        "notes": list(run.notes),
        "policy": list(run.policy),
    }
