"""``verdict.json``: a result as a document that a program can rely on. Schema and meaning: docs/verdict-json.md. Strict JSON: a
number that JSON cannot hold is one of the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib import resources
from pathlib import PurePath
from typing import Any

from trueup.analysis.remedy.advice import next_command, policy_to_try
from trueup.foundation.model import Evidence, Finding, Neighbour, Occurrence, Result, RunSummary

SCHEMA_VERSION = 1  # raised when a field changes its meaning or goes; new fields may come at any time


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
        "rules": json_plain(result.rules),
        "occurrences": [
            fields(one, "rank step phase level scope op ordinal sender cause sentence") | _seqs(one) | fields(one, "error")
            for one in result.occurrences
        ],
        "notes": list(result.notes),
        "settings": json_plain(result.settings),
        "baseline": _run(result.baseline),
        "candidate": _run(result.candidate),
    }


def dumps(document: Any) -> str:
    """Return the text of a document: strict JSON in ASCII."""
    return json.dumps(json_plain(document), indent=2, allow_nan=False) + "\n"


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) that every ``document`` fulfils."""
    text = resources.files("trueup.doors.report").joinpath("verdict.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def headed(schema: str, found: Any, names: str) -> dict[str, Any]:
    """Return the head of a feature's document (schema, version 1, verdict, exit code, sentence), then some fields of it."""
    return {"schema": schema, "schema_version": 1} | fields(found, f"verdict exit_code sentence {names}")


def json_plain(held: Any) -> Any:
    """Return facts as JSON-ready data: dataclasses by their fields, numbers that JSON lacks by their names."""
    if dataclasses.is_dataclass(held) and not isinstance(held, type):
        return fields(held, " ".join(field.name for field in dataclasses.fields(held)))
    if isinstance(held, PurePath):
        return str(held)
    if isinstance(held, dict):
        return {str(key): json_plain(one) for key, one in held.items()}
    if isinstance(held, (list, tuple)):
        return [json_plain(one) for one in held]
    if not isinstance(held, float) or math.isfinite(held):
        return held
    return "NaN" if math.isnan(held) else "Infinity" if held > 0 else "-Infinity"


def fields(held: Any, names: str) -> dict[str, Any]:
    """Return some fields of facts as JSON-ready data, in the order of ``names``."""
    return {name: json_plain(getattr(held, name)) for name in names.split()}


def _call(finding: Finding) -> dict[str, Any]:
    place = fields(finding, "kind rank step phase level scope op ordinal source")
    return place | _seqs(finding) | fields(finding, "error_in error_out expected ratio")


def _finding(finding: Finding) -> dict[str, Any]:
    said = "sentence confidence rule because cause side api aten stack source_line victims beyond cleared alike alike_in slots"
    evidence = None if finding.evidence is None else _evidence(finding.evidence)
    return _call(finding) | fields(finding, said) | {"evidence": evidence}


def _evidence(evidence: Evidence) -> dict[str, Any]:
    nodes = {"nodes": [_neighbour(near) for near in evidence.nodes]}
    return fields(evidence, "histograms worst") | nodes | fields(evidence, "edges omitted notes")


def _neighbour(near: Neighbour) -> dict[str, Any]:
    place = fields(near, "hops step phase level scope op ordinal state role side")
    return place | _seqs(near) | fields(near, "error_in error_out")


def _seqs(call: Finding | Occurrence | Neighbour) -> dict[str, int]:
    return {"seq_baseline": call.seq[0], "seq_candidate": call.seq[1]}


def _run(run: RunSummary) -> dict[str, Any]:
    curves = {
        "losses": [{"step": step, "loss": json_plain(loss)} for step, loss in run.losses],
        "gradient_norms": [{"step": step, "norm": json_plain(norm)} for step, norm in run.gradient_norms],
    }
    head, tail = "path framework devices ranks steps calls", "gradient_source environment notes policy"
    return fields(run, head) | curves | fields(run, tail)
