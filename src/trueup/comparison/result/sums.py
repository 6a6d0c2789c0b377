"""What is odd about the sums over ranks of joined runs: terms that travel in a narrower dtype; a module that adds up more often
than others of its class."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from trueup.comparison.layout.joined import Joined, added
from trueup.foundation.model import Finding
from trueup.foundation.words import setup_sentence as said

NARROW = {"bfloat16": 1.64e-3, "float16": 1.64e-3 / 8}
"""Relative error of a tensor that is rounded to a dtype; sums of p terms that travel in it have it times sqrt(1 + 0.6 p)
(measured on rings of bfloat16, 2 to 32 ranks)."""

TRAVELLED = 2
"""Up to how many times that error a difference may be for it to be the cause."""

PEERS = 2
"""Modules of one class from which on they show how often one adds up over its ranks."""


def travelled(finding: Finding, sides: tuple[Joined, Joined]) -> Finding:
    """Say of a result that the ranks' terms of it travel in a narrower dtype, where that explains its error: a module's in the
    forward and backward, in the step of an optimizer a gradient's."""
    slot = next((one for one in finding.slots if one.relative_l2 == finding.error_out), finding.slots[0] if finding.slots else None)
    if finding.kind not in ("region", "operator", "overwritten") or slot is None:
        return finding
    error = max(slot.relative_l2, finding.error_out)
    if error > TRAVELLED * max(_makes(dtype, len(sides[1].original.ranks)) for dtype in NARROW):  # no sum explains it
        return finding
    gradient = finding.phase == "optimizer"
    sums = [_narrow_sums(run, finding.step, None if gradient else finding.scope) for run in sides]
    for dtype, ranks in sums[1].items():
        makes = _makes(dtype, ranks)
        if dtype not in sums[0] and dtype not in slot.dtype and error <= TRAVELLED * makes:
            return dataclasses.replace(finding, cause=said.travels(dtype, ranks, "" if gradient else finding.scope, makes))
    return finding


def _makes(dtype: str, ranks: int) -> float:
    """Return the relative error of a sum over ranks whose terms travel in a narrow dtype."""
    return NARROW[dtype] * math.sqrt(1 + 0.6 * ranks)


def _narrow_sums(run: Joined, step: int, scope: str | None) -> dict[str, int]:
    """Return the narrow dtypes in which terms of sums travel inside a module, or anywhere, with the most ranks of one sum."""
    found: dict[str, int] = {}
    for where, dtype, ranks in run.sums(step):
        if dtype in NARROW and (scope is None or f"{where}.".startswith(f"{scope}." if scope else "")):
            found[dtype] = max(found.get(dtype, 0), ranks)
    return found


def doubts_of_sums(sides: tuple[Joined, Joined]) -> list[str]:
    """Say what is odd about the sums over ranks in the first step, where nobody knows whether a difference is rounding."""
    steps = [run.steps[0] for run in sides]
    first, second = (_narrow_sums(run, step, None) for run, step in zip(sides, steps, strict=True))
    computes = {piece.dtype for piece in sides[0].step(steps[0]).slots.values()}
    found = [
        said.travels(dtype, ranks, "", _makes(dtype, ranks))
        for dtype, ranks in second.items() if dtype not in first and dtype not in computes
    ]  # fmt: skip
    return [*found, *list(odd_sums(sides[1], steps[1]).values())[:1]]


def odd_sums(run: Joined, step: int) -> dict[str, str]:
    """Say of modules that they add up over their ranks another number of times than all others of their class, where several do."""
    capture, rank = run.original, min(run.original.ranks)
    rows = capture.records(["scope", "value"], rank=rank, step=step, phase="collective", level="api").to_pylist()
    sums = Counter(row["scope"] for row in rows if added(row["value"]))
    modules = capture.records(["scope", "op"], rank=rank, step=step, phase="forward", level="module").to_pylist()
    classes: dict[str, list[str]] = {}
    for scope, kind in {row["scope"]: row["op"] for row in modules}.items():
        classes.setdefault(kind, []).append(scope)
    found = {}
    for kind, scopes in classes.items():
        (usual, alike), *_ = Counter(sums[scope] for scope in scopes).most_common(1)
        odd = [scope for scope in scopes if sums[scope] != usual]
        if len(odd) == 1 and alike >= PEERS:
            found[odd[0]] = said.added_otherwise(odd[0], sums[odd[0]], kind, alike, usual)
    return found
