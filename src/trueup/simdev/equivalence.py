"""Whether two expressions of PyTorch compute the same: executed forward and backward, over shapes and dtypes, on the CPU.

It reads rows as JSON from its input and writes what it found; `trueup.migration.rewrites` asks it about rows of its catalogue.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
Values = dict[str, Any]
TENSORS = ("X", "P", "Q", "W", "of")
"""Names that stand for tensors, where a list is given: its shape."""
KINDS: dict[str, Callable[[Values], Values]] = {
    "as drawn": lambda values: values,
    "times 5": lambda values: {name: one * 5 if _floating(one) else one for name, one in values.items()},
    "all equal": lambda values: {name: torch.full_like(one, 0.75) if _floating(one) else one for name, one in values.items()},
}
"""The numbers that a form is executed with: drawn from the normal distribution, large, and all the same."""


def judged(row: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """Return whether ``after`` computes what ``before`` does, for each of ``inputs`` in each dtype: how many ``cases``, how many of
    them the same bit for bit, the first that ``differs`` by more than rounding, and how many times faster it is."""
    cases = bitwise = 0
    found: dict[str, Any] = {"differs": None, "gradients": False}
    for given, dtype, kind in _cases(row):
        inputs = KINDS[kind](_inputs(given, dtype, torch.Generator().manual_seed(seed + cases)))
        before, after = (_run(row, which, inputs) for which in ("before", "after"))
        cases += 1
        found["gradients"] = found["gradients"] or any(map(_floating, inputs.values()))
        if len(before) == len(after) and all(_same(one, other) for one, other in zip(before, after, strict=True)):
            bitwise += 1
            continue
        if row["exact"] or not _within(before, after, *_wide(row, inputs, dtype), dtype):
            return {**found, "cases": cases, "bitwise": bitwise, "differs": f"{given} in {dtype}, {kind}", "gain": None}
    return {**found, "cases": cases, "bitwise": bitwise, "gain": _gain(row)}


def _cases(row: Mapping[str, Any]) -> Iterator[tuple[Values, torch.dtype, str]]:
    """Yield inputs, dtypes and the kind of numbers; once where no tensor goes in."""
    for given in row["inputs"]:
        tensors = any(name in TENSORS and isinstance(value, list) for name, value in given.items())
        for dtype in DTYPES if tensors else DTYPES[:1]:
            for kind in KINDS if tensors else ("as drawn",):
                yield given, dtype, kind


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num()))


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _inputs(given: Mapping[str, Any], dtype: torch.dtype, random: torch.Generator) -> Values:
    """Return values by name: a list is the shape of a tensor where the name is one of a tensor's, a text a condition."""
    made: Values = {}
    for name, value in given.items():
        if name in TENSORS and isinstance(value, list):
            made[name] = torch.randn(value, dtype=torch.float64, generator=random).to(dtype)
        else:
            made[name] = tuple(value) if isinstance(value, list) else value
    return made


def _function(row: Mapping[str, Any], which: str) -> Callable[[Values], Any]:
    text = row["reference"] if which == "before" and row.get("reference") else row[which]
    names = {"torch": torch, "math": math}
    if row.get("reference"):

        def apply(values: Values) -> Any:
            made = eval(text, {**names, **values})  # a row of our own catalogue
            return (made.to(values["of"].dtype) if isinstance(made, torch.nn.Module) else made)(values["of"])

        return apply
    if "X[M] = " in row["before"]:

        def write(values: Values) -> Any:
            held = {**names, **values, "X": values["X"].clone()}
            held["M"] = eval(values["M"], held)
            exec(text, held)
            return held["X"]  # as it was written into

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
    trained = [one for one in results if one.requires_grad]
    weights = [torch.linspace(-1, 1, one.numel(), dtype=one.dtype).reshape(one.shape) for one in trained]
    gradients = torch.autograd.grad(trained, list(leaves.values()), weights) if trained else ()
    return [one.detach() for one in (*results, *gradients)]


def _wide(row: Mapping[str, Any], inputs: Values, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what ``before`` gives in float64, and what it gives of inputs that are off by a rounding of their dtype."""
    exact = {name: one.double() if _floating(one) else one for name, one in inputs.items()}
    signs = torch.Generator().manual_seed(1)

    def off(one: torch.Tensor) -> torch.Tensor:
        sign = 2 * torch.randint(2, one.shape, generator=signs).double() - 1
        return one * (1 + torch.finfo(dtype).eps * sign)

    near = {name: off(one) if _floating(one) else one for name, one in exact.items()}
    return _run(row, "before", exact), _run(row, "before", near)


def _within(
    before: list[torch.Tensor], after: list[torch.Tensor], exact: list[torch.Tensor], near: list[torch.Tensor], dtype: torch.dtype
) -> bool:  # fmt: skip
    """Return whether the new results are about as near to float64's as the old: four times as far, and sixteen roundings of the
    results and eight of the inputs, for float64 itself has no wider reference."""
    if len(before) != len(after):
        return False
    for old, new, true, off in zip(before, after, exact, near, strict=True):
        room = 4 * (old.double() - true).abs().max() + 16 * torch.finfo(dtype).eps * true.abs().max() + 8 * (off - true).abs().max()
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
