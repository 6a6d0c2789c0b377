"""Arguments that differ at calls whose tensors differ, too: is it the program that asks for something else, or do data show?

A scalar that a program reads out of a tensor differs because the tensor does; it is a victim. What was never read out of one is a
choice of the program: an epsilon, a rate. So a call that is given other arguments is a culprit of its own, however much its
inputs differ, where the same change of arguments was seen to matter at a call with equal inputs, and where it gets other real
numbers in the first step of the training, before any number that differs was read out of a tensor.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from trueup.comparison.graph.names import normalised
from trueup.comparison.verdict.judged import Judged
from trueup.comparison.verdict.tree import Tree

READ_OUT = frozenset({
    "item", "_local_scalar_dense", "tolist", "numpy", "bool", "int", "float", "index", "array", "cpu", "nonzero", "is_nonzero",
    "equal", "allclose",
})  # fmt: skip
"""Functions that take numbers out of a tensor, where no record follows them."""

CASTS = (".bool", ".int", ".float")
"""How functions end that are called like these and make tensors: ``torch.Tensor.float`` is a cast, ``__float__`` is none."""

LEAST = 1e-6
"""Relative difference of two numbers from which they are not one number computed in two ways."""


def key_of(judged: Judged) -> tuple[str, ...]:
    """Return what tells one change of arguments from another: the operator, and both sides' arguments."""
    call = judged.call.candidate
    first, second = judged.call.arguments or (None, None)
    return call.level, call.phase, normalised(call.op), first or "", second or ""


def are_chosen(judged: Judged, tree: Tree) -> bool:
    """Tell whether a call in the first step of a training gets other real numbers that nothing before it can have made."""
    streams = tree.streams
    if judged.call.arguments is None or any(stream.imported or stream.mixed for stream in streams):
        return False
    try:
        first, second = (json.loads(side or "{}") for side in judged.call.arguments)
        chosen = _differ(first, second)
    except (ValueError, RecursionError):  # truncated, as very long arguments are, or nested beyond reason
        return False
    return chosen and judged.call.candidate.seq < _first_read_out(tree)


def _differ(first: Any, second: Any) -> bool:
    """Tell whether two decoded arguments hold a real number in the same place that is another one."""
    if isinstance(first, dict) and isinstance(second, dict):
        return any(_differ(first[name], second[name]) for name in first.keys() & second.keys())
    if isinstance(first, list) and isinstance(second, list):
        return any(map(_differ, first, second))
    numbers = all(isinstance(side, (int, float)) and not isinstance(side, bool) for side in (first, second))
    if not numbers or not (isinstance(first, float) or isinstance(second, float)):
        return False
    return not bool(np.isclose(first, second, rtol=LEAST, atol=0, equal_nan=True))


def _first_read_out(tree: Tree) -> float:
    """Return ``seq`` of the first call on the candidate that takes numbers that differ out of a tensor."""
    verdicts, stream = tree.verdicts, tree.streams[1]
    if not np.isin(stream.level, [stream.names.number(level) for level in ("api", "aten")]).any():
        return -np.inf  # what happens between modules was not recorded
    calls = verdicts.errors.calls[1]
    reads = stream.names.table(_reads_out)[stream.op]
    alone = np.flatnonzero(reads & (tree.pairs[1][:-1] < 0))
    differing = calls[reads[calls] & (np.maximum(verdicts.error_in, verdicts.error_out) > 0)]
    return float(min(stream.seq[np.r_[alone, differing]].tolist(), default=np.inf))


def _reads_out(op: str) -> bool:
    return normalised(op) in READ_OUT and not op.endswith(CASTS)
