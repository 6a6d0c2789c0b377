"""Align models in PyTorch with their ports to PaddlePaddle or Keras, and planted differences of the port: `make bench-align`.

Prints a table of pairs and a table of differences (what was named, in numbers and before any). Errors are relative L2 against
PyTorch. Of layers and gradients the median is given: the largest are of gradients that are zero but for rounding (a bias before a
norm), and of running variances, which frameworks define in other ways. Needs both frameworks in one environment.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import trueup
from trueup.doors.comparing import Alignment

STEPS = 3

MODULES = {"paddle": "framework_pairs", "keras": "keras_pairs"}
"""Which pairs; the two frameworks cannot be in one process."""

pairs: Any = None


def main() -> None:
    """Run all pairs and all differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--detail", default="tensor", choices=("tensor", "stats"))
    parser.add_argument("--other", default="paddle", choices=tuple(MODULES), help="the framework of the ports")
    chosen = parser.parse_args()
    detail = chosen.detail
    global pairs
    pairs = import_module(MODULES[chosen.other])
    print(f"{STEPS} steps, detail {detail}\n")
    print("| pair | verdict | calls | output of the model | layers | gradients | largest part of what is explained |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in pairs.PAIRS:
        print(_pair(name, detail))
    print("\n| difference | planted in | first culprit | before any number |")
    print("| --- | --- | --- | --- |")
    for difference in pairs.DIFFERENCES:
        print(_difference(difference, detail))


def _run(name: str, difference: str, steps: int, detail: str) -> Alignment:
    pairs.seeded()
    twins = pairs.PAIRS[name](difference)
    made = pairs.optimizers(twins, difference)
    with tempfile.TemporaryDirectory() as into:
        return trueup.align(
            twins.torch, twins.port, twins.batch, loss=twins.losses, optimizers=made, steps=steps, detail=detail,
            output=Path(into) / "run",
        )  # fmt: skip


def _pair(name: str, detail: str) -> str:
    found = _run(name, "", STEPS, detail).result
    calls = found.calls.to_pylist()
    output = max(c["error_out"] for c in calls if (c["level"], c["phase"], c["scope"]) == ("module", "forward", ""))
    known = [(c["phase"], c["error_out"]) for c in calls if c["error_out"] is not None]
    layers, gradients = (float(np.median([error for its, error in known if its == phase])) for phase in ("forward", "backward"))
    ratio = max((c["ratio"] for c in calls if c["ratio"] is not None and c["ratio"] < float("inf")), default=0.0)
    numbers = " | ".join(f"{number:.1e}" for number in (output, layers, gradients))
    return f"| {name} | {found.verdict} | {found.counts['compared']:,} | {numbers} | {ratio:.0%} |"


def _difference(difference: str, detail: str) -> str:
    name, layer, _ = pairs.DIFFERENCES[difference]
    found = _run(name, difference, 1, detail)
    culprit = found.result.culprit
    named = "none" if culprit is None else f"{culprit.name}: {culprit.sentence.partition(': ')[2]}"
    said = "; ".join(map(str, found.findings)) or "nothing: it is no setting of a layer"
    return f"| {difference} | {name}, {layer} | {named} | {said} |"


if __name__ == "__main__":
    main()
