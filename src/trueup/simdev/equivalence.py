"""Whether two expressions of PyTorch compute the same: executed forward and backward, over shapes and dtypes, on the CPU.

It reads rows as JSON from its input and writes what it found; `trueup.migration.rewrites` asks it about rows of its catalogue.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
Values = dict[str, Any]


def judged(row: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """Return whether ``after`` computes what ``before`` does, for each of ``inputs`` in each dtype: how many ``cases``, how many of
    them the same bit for bit, the first that ``differs`` by more than rounding, and how many times faster it is."""
    cases = bitwise = 0
    for given in row["inputs"]:
        for dtype in DTYPES:
            random = torch.Generator().manual_seed(seed + cases)
            inputs = _inputs(given, dtype, random)
            before, after = (_run(row, which, inputs) for which in ("before", "after"))
            cases += 1
            if all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
                bitwise += 1
                continue
            exact = _run(row, "before", {name: one.double() if _floating(one) else one for name, one in inputs.items()})
            if row["exact"] or not _within(before, after, exact, dtype):
                return {"cases": cases, "bitwise": bitwise, "differs": f"{given} in {dtype}", "gain": None}
    return {"cases": cases, "bitwise": bitwise, "differs": None, "gain": _gain(row)}


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _inputs(given: Mapping[str, Any], dtype: torch.dtype, random: torch.Generator) -> Values:
    """Return values by name: a list is the shape of a tensor where the name is one of a tensor's, a text a condition."""
    made: Values = {}
    for name, value in given.items():
        if name in ("X", "P", "Q", "W", "of") and isinstance(value, list):
            made[name] = torch.randn(value, dtype=torch.float64, generator=random).to(dtype)
        else:
            made[name] = tuple(value) if isinstance(value, list) else value
    return made


def _function(row: Mapping[str, Any], which: str) -> Callable[[Values], Any]:
    text = row["reference"] if which == "before" and row.get("reference") else row[which]
    names = {"torch": torch}
    if row.get("reference"):

        def apply(values: Values) -> Any:
            made = eval(text, {**names, **values})  # a row of our own catalogue
            return (made.to(values["of"].dtype) if isinstance(made, torch.nn.Module) else made)(values["of"])

        return apply
    if "X[M] = V" in row["before"]:

        def write(values: Values) -> Any:
            held = {**names, **values, "X": values["X"].clone()}
            held["M"] = eval(values["M"], held)
            exec(text, held)
            return held["X"]

        return write

    def compute(values: Values) -> Any:
        held = {**names, **values}
        if isinstance(values.get("M"), str):
            held["M"] = eval(values["M"], held)
        return eval(text, held)

    return compute


def _run(row: Mapping[str, Any], which: str, inputs: Values) -> list[torch.Tensor]:
    """Return the results and the gradients of all inputs."""
    leaves = {name: one.detach().clone().requires_grad_() for name, one in inputs.items() if _floating(one)}
    made = _function(row, which)({**inputs, **leaves})
    results = [one for one in (made if isinstance(made, tuple) else (made,)) if isinstance(one, torch.Tensor)]
    weights = [torch.linspace(-1, 1, one.numel(), dtype=one.dtype).reshape(one.shape) for one in results]
    gradients = torch.autograd.grad(results, list(leaves.values()), weights)
    return [one.detach() for one in (*results, *gradients)]


def _within(before: list[torch.Tensor], after: list[torch.Tensor], exact: list[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether the new results are about as near to float64's as the old: four times as far, and sixteen roundings, for
    float64 itself has no wider reference."""
    for old, new, true in zip(before, after, exact, strict=True):
        room = 4 * (old.double() - true).abs().max() + 16 * torch.finfo(dtype).eps * true.abs().max()
        if new.shape != old.shape or new.dtype != old.dtype or not bool((new.double() - true).abs().max() <= room):
            return False
    return True


def _gain(row: Mapping[str, Any]) -> float:
    """Return how many times as long ``before`` takes as ``after`` on the CPU, forward and backward, with the last inputs."""
    inputs = _inputs(row["inputs"][-1], torch.float32, torch.Generator().manual_seed(0))
    taken = {}
    for which in ("before", "after"):
        times = []
        for _ in range(15):
            start = time.perf_counter()
            _run(row, which, inputs)
            times.append(time.perf_counter() - start)
        taken[which] = sorted(times)[len(times) // 2]
    return taken["before"] / taken["after"]


if __name__ == "__main__":
    print(json.dumps([judged(row) for row in json.load(sys.stdin)]))
