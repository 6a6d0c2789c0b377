"""`prove_spread`: a distributed port in one process and in several, whose gradients have to be those of one.

Where they are not, what was recorded says why: who had which batch, whether the processes agree, by which factor a gradient is
off, and which layers ran that see one process's share alone.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import counted
from trueup.migration.port.proving import record, words_of

NOISE = 1e-3
"""Largest relative L2 distance of two gradients of the same batch, once as a whole and once in parts. Measured in float32 on the
training of the tests: 1e-7. One lost sample of 256 is 1/256 of a mean, 4e-3; without an all-reduce a gradient is that of a part."""
APART = {
    "BatchNorm": "BatchNorm computes over a process's share (torch.nn.SyncBatchNorm: over all)",
    "Dropout": "dropout differs by process",
}
"""Layers that compute something else in each process, by a part of their class's name."""

Gradients: TypeAlias = "dict[tuple[int, int, str], NDArray[np.float64]]"
"""By step, number of the optimizer's step in it, and parameter."""
Batch: TypeAlias = "tuple[tuple[int, str], ...]"
"""What a model was given first: the number of elements and the digest of each tensor."""


@dataclass(frozen=True)
class Seen:
    """What one run showed: by process the gradients that its optimizers got and the first batch; and the classes of all modules."""

    gradients: Sequence[Gradients]
    batches: Sequence[Batch]
    layers: frozenset[str]


@dataclass(frozen=True)
class Spread:
    """Whether the gradients of several processes are those of one; ``same`` is None where nobody can tell."""

    processes: int
    same: bool | None
    sentence: str

    @property
    def exit_code(self) -> int:
        """Return 0 for the same, 1 for others, 2 where nobody can tell."""
        return 2 if self.same is None else int(not self.same)


def prove_spread(ported: Path, command: str, *, steps: int = 3, processes: int = 2) -> Spread:
    """Run a distributed port in one process and in several, on the simulated device, and compare the gradients of the first steps.

    Args:
        ported: the port, a folder.
        command: how the training is started there without torchrun: ``python train.py``.
        steps: how many.
        processes: how many, which gloo joins.

    Raises:
        TrueupError: the command is none.
    """
    words = words_of(command)
    found: list[Seen] = []
    if not Path(words[0]).name.startswith("python"):
        return Spread(processes, None, f"The gradients were not compared: {words[0]} is no Python, and torchrun starts Python.")
    with tempfile.TemporaryDirectory(prefix="trueup-prove-") as folder:
        for count in (1, processes):
            launched = [words[0], "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", *words[1:]]
            into = Path(folder) / f"of-{count}"
            chosen: dict[str, Any] = {"level": "module", "detail": "tensor", "phase": ("forward", "optimizer")}
            failed = record(into, ported, launched, {"TRUEUP_SIMULATED": "1"}, steps, **chosen)
            if failed is not None:
                where = f"the port does not run in {counted(count, 'process', 'processes')}: {failed}"
                return Spread(processes, None, f"The gradients were not compared: {where}")
            found.append(_seen(open_capture(into), count))
    return judged(found[0], found[1], steps)


def judged(one: Seen, several: Seen, steps: int) -> Spread:
    """Compare each gradient by its own size; a small one, which is rounding alone, by a thousandth of all of its step."""
    processes = len(several.gradients)
    single, first = one.gradients[0], several.gradients[0]
    if not single or single.keys() != first.keys():
        said = f"The gradients were not compared: {len(single)} were recorded in one process, {len(first)} in {processes}."
        return Spread(processes, None, said)
    if _whole(one, several):
        said = "Each process computes the whole batch: nothing shares the data between them (data_parallel.share, or a sampler)."
        return Spread(processes, False, f"The training of {processes} processes is not that of one. {said}")
    (step, _, name), worst = _worst(single, first)
    if worst <= NOISE:
        how = "bitwise" if worst == 0 else f"within rounding (rel. L2 {worst:.1g} at most)"
        count = f"{counted(steps, 'step')}, {counted(len(single) // steps, 'gradient')} each"
        return Spread(processes, True, f"The gradients of {processes} processes are those of one: {count}, {how}.")
    said = f"The gradients of {processes} processes are not those of one: {name}, step {step}, rel. L2 {worst:.2g}."
    return Spread(processes, False, f"{said} {_why(one, several)}")


def _why(one: Seen, several: Seen) -> str:
    """Say why gradients differ, by what was recorded; where it does not tell, what is left."""
    processes = len(several.gradients)
    sizes = [sum(size for size, _ in batch) for batch in (one.batches[0], *several.batches)]
    if sizes[0] and all(size == sizes[0] for size in sizes[1:]):
        return f"Each process reads a batch as large as that of one: together {processes} times as much (data_parallel.share)."
    if any(_worst(several.gradients[0], other)[1] > NOISE for other in several.gradients[1:]):
        return "The processes do not agree on them: nothing takes their mean (data_parallel.wrap)."
    factor = _factor(one.gradients[0], several.gradients[0])
    if factor is not None:
        known = "the loss is scaled otherwise"
        if math.isclose(factor, 1 / processes, rel_tol=NOISE):
            known = "the loss is a sum over the batch, of which the processes take the mean, or it is divided once more"
        elif math.isclose(factor, processes, rel_tol=NOISE):
            known = "they are added over the processes, and no mean is taken"
        return f"In the first step each is {factor:.4g} times that of one: {known}."
    apart = [said for part, said in APART.items() if any(part in name and not name.startswith("Sync") for name in several.layers)]
    if apart:
        return f"{'; '.join(apart)}."
    return "No BatchNorm or Dropout ran: random data, a loss that is no mean over samples, or a change that is missing."


def _whole(one: Seen, several: Seen) -> bool:
    """Return whether all processes were given what one was given; a batch of one sample they cannot share."""
    return bool(one.batches[0]) and all(batch == one.batches[0] for batch in several.batches) and one.batches[0][0][0] > 1


def _worst(one: Gradients, other: Gradients) -> tuple[tuple[int, int, str], float]:
    """Return the gradient that is furthest off, and its relative L2 distance."""
    whole = {step: math.hypot(*(float(np.linalg.norm(g)) for key, g in one.items() if key[0] == step)) for step, *_ in one}
    errors = {}
    for key, gradient in one.items():
        size = max(float(np.linalg.norm(gradient)), whole[key[0]] / 1000, 1e-30)
        errors[key] = float(np.linalg.norm(other[key] - gradient)) / size if key in other else math.inf
    return max(errors.items(), key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1])


def _factor(one: Gradients, several: Gradients) -> float | None:
    """Return by which positive factor all gradients of the first step are off, None if by none: later steps have other weights."""
    step = min(key[0] for key in one)
    a, b = (np.concatenate([each[key] for key in one if key[0] == step]) for each in (one, several))
    factor = float(a @ b / max(float(a @ a), 1e-300))
    if factor > 0 and abs(factor - 1) > NOISE and float(np.linalg.norm(b - factor * a)) <= NOISE * float(np.linalg.norm(b)):
        return factor
    return None


def _seen(capture: Capture, processes: int) -> Seen:
    """Return what was recorded of the processes of a run."""
    payload = ["payload_segment", "payload_key", "payload_view"]
    columns = ["step", "ordinal", "op", "scope", "slot", "phase", "shape", "digest", *payload]
    gradients, batches, layers = [], [], set()
    for rank in range(processes):
        rows = capture.records(columns, rank=rank, level="module").to_pylist()
        given = [row for row in rows if row["phase"] == "forward" and row["scope"] == "" and row["slot"].startswith("input.")]
        first = [row for row in given if all(row[name] == given[0][name] for name in ("step", "ordinal", "op"))]
        batches.append(tuple((math.prod(row["shape"]), str(row["digest"])) for row in first if row["shape"] is not None))
        layers |= {row["op"] for row in rows if row["phase"] == "forward"}
        gradients.append(_gradients(capture, rank, rows))
    return Seen(gradients, batches, frozenset(layers))


def _gradients(capture: Capture, rank: int, rows: list[dict[str, Any]]) -> Gradients:
    """Return what the optimizers of a process were given."""
    return {
        (row["step"], row["ordinal"], row["slot"][len("input.") : -len(".grad")].removeprefix("module.")): np.asarray(
            capture.payload(rank, row["payload_segment"], row["payload_key"], row["payload_view"]), np.float64
        ).ravel()
        for row in rows
        if row["op"].endswith(".step") and row["slot"].endswith(".grad") and row["payload_key"] is not None
    }
