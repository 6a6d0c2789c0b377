"""`assess`: a training run for a few steps on shapes alone, and each of its operators looked up."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import counted
from trueup.migration.assess.support import GRADES, Grade, Source, has_kernel, numbers, support
from trueup.migration.port.running import SIMULATED, redirected

INTO, STEPS = "TRUEUP_SHAPES_INTO", "TRUEUP_SHAPES_STEPS"
"""Environment variables that `trueup.simdev.shapes` reads."""
TOLD: dict[Grade, tuple[str, str]] = {
    "kernel": ("has a kernel", "have a kernel"), "composite": ("is made of others", "are made of others"),
    "CPU fallback": ("goes through the CPU", "go through the CPU"), "unsupported": ("is not supported", "are not supported"),
    "dtype-limited": ("lacks a dtype", "lack a dtype"), "unknown": ("is in no table", "are in no table"),
}  # fmt: skip
"""Of one operator, and of several."""
FULL = 8
"""Shapes of a row, of which the run keeps no more: whether they changed between steps cannot be told then."""


class Row(msgspec.Struct):
    """An operator at one line of the user's, as the run wrote it."""

    operator: str
    kind: Literal["kernel", "composite", "custom"]
    phase: Literal["forward", "backward"]
    function: str
    dtypes: list[str]
    site: tuple[str, int, str] | None
    calls: int
    flops: int
    shapes: list[tuple[int, str]]
    why: Literal["shape", "meta"] | None
    decomposes: bool

    @property
    def place(self) -> str:
        """Return the user's line, or whose backward it is."""
        if self.site is None:
            return ""
        file, line, name = self.site
        return f"{os.path.relpath(file)}:{line}" if file else f"backward of {name.removesuffix('0').removesuffix('Backward')}"

    @property
    def varies(self) -> bool:
        """Return whether its shapes in one step are others than in another."""
        steps: dict[int, set[str]] = {}
        for step, shapes in self.shapes:
            steps.setdefault(step, set()).add(shapes)
        several = list(steps.values())
        return len(self.shapes) < FULL and any(one != several[0] for one in several[1:])


class _Run(msgspec.Struct):
    steps: int
    torch: str
    rows: list[Row]


@dataclass(frozen=True)
class Operator:
    """An operator with its grade. ``flops`` is of all its calls, multiplications and additions counted apart; 0 where PyTorch has
    no formula. ``places`` are the user's lines, most calls first."""

    name: str
    grade: Grade
    why: str
    remedy: str
    calls: int
    flops: int
    dtypes: tuple[str, ...]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Assessment:
    """What a training asks of a device. ``dynamic`` are lines whose shapes change, with why; ``reads`` lines that read numbers
    back, with how often in a step; ``failed`` says why the run ended early."""

    product: str
    torch: str
    steps: int
    operators: tuple[Operator, ...]
    dynamic: tuple[tuple[str, str], ...]
    reads: tuple[tuple[str, float], ...]
    failed: str | None
    sources: tuple[Source, ...]

    @property
    def counts(self) -> dict[Grade, int]:
        """Return how many operators have each grade."""
        found = Counter(one.grade for one in self.operators)
        return {grade: found[grade] for grade in GRADES if found[grade]}

    @property
    def exit_code(self) -> int:
        """Return 0 where all runs on the device, 1 where something does not or goes through the CPU, 2 where nobody can tell."""
        bad = any(self.counts.get(grade) for grade in ("unsupported", "CPU fallback", "dtype-limited"))
        return 1 if bad else 2 if self.failed or not self.operators or self.counts.get("unknown") else 0

    @property
    def sentence(self) -> str:
        """Return the conclusion in a sentence."""
        if not self.operators:
            return f"Could not tell: {self.failed or 'nothing ran on the device'}."
        parts = [f"{number} {TOLD[grade][number > 1]}" for grade, number in reversed(self.counts.items())]
        where = f"Ascend {self.product} (PyTorch {self.torch.partition('+')[0]})"
        whole = f"Of {counted(len(self.operators), 'operator')} on {where}, {', '.join(parts)}."
        return whole + (f" The run ended early: {self.failed}." if self.failed else "")

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        whole = asdict(self) | {"sources": [msgspec.to_builtins(one) for one in self.sources]}
        return {"schema": "trueup-assess", "schema_version": 1, "sentence": self.sentence, "counts": self.counts, **whole}


def assess(command: Sequence[str], *, product: str = "A2", steps: int = 2, timeout: float | None = 600.0) -> Assessment:
    """Run a training on a device that computes shapes and no numbers, and say what a real one has for it.

    Args:
        command: the program and its arguments: ``("python", "train.py")``, for CUDA, an NPU, or whatever accelerator is there.
        product: of Ascend: A2, A3 or 950DT.
        steps: of the optimizer, after which the run ends.
        timeout: seconds that it may take; None: any.

    Raises:
        TrueupError: the command cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="trueup-assess-") as folder:
        into = Path(folder, "shapes")
        into.mkdir()
        log = Path(folder, "log")
        environment = {SIMULATED: "shapes", INTO: str(into), STEPS: str(steps)}
        ran = redirected(command, Path(folder), environment=environment, output=log, timeout=timeout)
        runs = [msgspec.json.decode(path.read_bytes(), type=_Run) for path in sorted(into.glob("*.json"))]
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    failed = None if ran.exit_code == 0 else (lines[-1][:300] if lines else f"exit code {ran.exit_code}").rstrip(".")
    if not runs:
        raise TrueupError(
            f"Nothing of the command could be looked at.\n  where:    {' '.join(command)}\n"
            "  expected: a training in PyTorch, run by a Python that has trueup installed\n"
            f"  got:      {failed or 'no import of torch'}\n"
            "  next:     run the command by itself; then name that Python: trueup assess -- .venv/bin/python train.py"
        )
    rows = [row for run in runs for row in run.rows]
    version = runs[0].torch
    steps_run = max(max(run.steps for run in runs), 1)
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.operator, []).append(row)
    operators = [_operator(name, its, product, numbers(version)) for name, its in by_name.items()]
    operators.sort(key=lambda one: (GRADES.index(one.grade), -one.flops, -one.calls, one.name))
    dynamic = {row.place: _dynamic(row) for row in rows if row.site and row.site[0] and (row.varies or row.why == "shape")}
    reads: Counter[str] = Counter()
    for row in rows:
        if row.operator == "aten::_local_scalar_dense" and row.site and row.site[0]:
            reads[row.place] += row.calls
    told = tuple((place, calls / steps_run) for place, calls in reads.most_common())
    return Assessment(
        product, version, steps_run, tuple(operators), tuple(dynamic.items()), told, failed, support().source
    )


def _operator(name: str, rows: list[Row], product: str, version: tuple[int, ...]) -> Operator:
    grade, why = min((_graded(name, row, product, version) for row in rows), key=lambda one: GRADES.index(one[0]))
    places = Counter[str]()
    for row in rows:
        if _graded(name, row, product, version)[0] == grade:
            places[row.place or "PyTorch itself"] += row.calls
    dtypes = tuple(sorted({dtype for row in rows for dtype in row.dtypes}))
    calls, flops = sum(row.calls for row in rows), sum(row.flops for row in rows)
    listed = tuple(place for place, _ in places.most_common())
    return Operator(name, grade, why, _remedy(name, grade, rows, calls), calls, flops, dtypes, listed)


def _graded(name: str, row: Row, product: str, version: tuple[int, ...]) -> tuple[Grade, str]:
    """Grade an operator at one line. The vendor's list of kernels says that it runs; its pages of functions say in which dtypes."""
    if row.kind == "custom":
        return "unknown", f"an operator of {name.partition('::')[0]}: no table has it"
    said = support().by_function.get(row.function)
    if said is not None and product in said.lacking:
        return "unsupported", f"{row.function} does not run on {product}"
    if said is not None and "inference" in said.remarks:
        return "unsupported", f"{row.function} runs for inference alone"
    has = has_kernel(name, version)
    if not has:
        if row.kind == "composite":
            return "composite", "PyTorch makes it of other operators"
        return "CPU fallback", "the device has no kernel: each call copies its tensors to the CPU and back"
    missing = [dtype for dtype in row.dtypes if said is not None and said.dtypes and dtype not in said.dtypes]
    if missing and not set(row.dtypes) & set(said.dtypes if said is not None else ()):
        return "dtype-limited", f"the vendor's page of {row.function} lists {', '.join(said.dtypes if said else ())}"
    return "kernel", ""


def _remedy(name: str, grade: Grade, rows: list[Row], calls: int) -> str:
    """Return what to do, in the porting guide's order: an equivalent, the CPU, an operator of one's own."""
    if grade == "dtype-limited":
        return "cast its inputs to a dtype that it takes"
    if grade == "unknown":
        return "ask its package for the device, or write it with PyTorch's functions"
    if grade not in ("unsupported", "CPU fallback"):
        return ""
    if any(row.decomposes for row in rows):
        plain = name.replace("::", ".").split(".")
        return f"PyTorch makes it of others: torch._decomp.get_decompositions([torch.ops.{plain[0]}.{plain[1]}])"
    often = f"{counted(calls, 'call')} in these steps"
    return f"write it with other functions; or leave it on the CPU ({often}); or develop the operator"


def _dynamic(row: Row) -> str:
    if row.why == "shape":
        return f"{row.function or row.operator}: the shape of its result depends on numbers"
    first, last = row.shapes[0], row.shapes[-1]
    return f"{row.function or row.operator}: {first[1]} in step {first[0]}, {last[1]} in step {last[0]}"
