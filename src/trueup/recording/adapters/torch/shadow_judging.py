"""Is what a call computed what its inputs make? Its outputs beside those of the reference, slot by slot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trueup.comparison.measures.roundoff import SINGLE, roundoff
from trueup.comparison.verdict.operands import Precision
from trueup.foundation.facts.operators import has, normalised
from trueup.recording.adapters.torch.golden import Change, Golden, NoReference, Prepared, Tensors, alone
from trueup.recording.adapters.torch.host import to_numpy
from trueup.recording.execution.local_error import Distance, LocalError, judge
from trueup.recording.execution.rounding import PLAIN, Operand, Operation, criterion, rounding, storing

Array = NDArray[Any]

DRAWS = 2
"""How many times the inputs of a call that looks wrong are moved by one unit in their last place."""

@dataclass(frozen=True, slots=True)
class Judgement:
    """What is said of one output."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    state: str
    error: float
    explained: float
    excess: float
    rule: str
    reason: str


@dataclass(slots=True)
class Case:
    """A call that has run, and what is needed to judge it."""

    call: Prepared
    operation: Operation
    inputs: list[tuple[str, torch.dtype, torch.Tensor]]
    """Slot, the training's dtype, the widened copy."""
    outputs: Tensors
    """On the reference device, in the training's dtype."""
    foreign: bool
    """Whether the training's device is another than the reference's."""


def judged(golden: Golden, case: Case, precision: Precision = PLAIN) -> Iterator[Judgement]:
    """Judge each output that can be compared.

    Raises:
        NoReference: the call cannot be computed again.
    """
    truth = golden.run(case.call, case.outputs)
    arrays = {slot: to_numpy(_host(tensor)) for slot, tensor in truth.items()}
    for slot, output in case.outputs.items():
        if slot not in arrays:
            continue
        shape = tuple(output.shape)
        name = str(output.dtype).removeprefix("torch.")
        if arrays[slot].shape != shape:
            text = f"its shape is {list(shape)}, the reference's {list(arrays[slot].shape)}: private to the device"
            yield Judgement(slot, name, shape, "could not tell", math.nan, 0.0, 0.0, "shape", text)
            continue
        distance = Distance.of(arrays[slot], to_numpy(_host(output)))
        granted = _granted(case.operation, name)
        if _plainly_accurate(distance, granted):
            excess = distance.relative / granted if granted else 0.0
            yield Judgement(slot, name, shape, "accurate", distance.relative, granted, excess, row_of(case.operation), "")
        else:
            yield _at_length(golden, case, slot, arrays[slot], distance, precision)


def _plainly_accurate(distance: Distance, granted: float) -> bool:
    """Tell whether an error is within what an operator is granted at least, whatever its operands: most calls are."""
    if distance.disagreeing or distance.saturated:
        return False
    return distance.rms <= granted * distance.truth_rms and distance.largest <= granted * distance.truth_largest


@lru_cache(maxsize=4096)
def _granted(operation: Operation, dtype: str) -> float:
    """Return the least that `rounding` explains of an output of an operator; its formulas only grow with the operands."""
    unit = roundoff(dtype)
    if not unit:
        return 0.0
    row = criterion().row(operation.op, operation.level, operation.phase)
    return row.ulps * min(unit, SINGLE) + (storing(operation) * unit if unit > SINGLE else 0.0)


def _at_length(
    golden: Golden, case: Case, slot: str, truth: Array, distance: Distance, precision: Precision
) -> Judgement:
    output = case.outputs[slot]
    dtype, shape = str(output.dtype).removeprefix("torch."), tuple(output.shape)
    if not output.dtype.is_floating_point and not output.dtype.is_complex:
        state, reason = _of_integers(case, slot, distance, truth)
        share = distance.differing / max(distance.counted, 1)
        return Judgement(slot, dtype, shape, state, share, 0.0, math.inf if state == "wrong" else 0.0, "integers", reason)
    allowed = _allowed(case, slot, distance, dtype, precision)
    found = judge(case.operation, dtype, distance, rounding=allowed)
    if found.verdict in ("wrong", "suspicious") and case.foreign:
        found = _with_second_opinion(golden, case, slot, truth, distance, allowed, dtype, found)
    if found.verdict in ("wrong", "suspicious"):
        found = _with_perturbed(golden, case, slot, truth, distance, allowed, dtype, found)
    state, reason = found.verdict, found.sentence
    if state in ("wrong", "suspicious") and _unordered(case):
        state, reason = "could not tell", "several values go to one place, and which of them stays is open"
    excess = found.excess if state in ("wrong", "suspicious") else min(found.excess, 1.0)
    reason = "" if state == "accurate" else reason
    return Judgement(slot, dtype, shape, state, found.error, found.explained, excess, found.rule, reason)


def _allowed(case: Case, slot: str, distance: Distance, dtype: str, precision: Precision) -> float:
    inputs = [_operand(name, kind, tensor) for name, kind, tensor in case.inputs if kind.is_floating_point or kind.is_complex]
    shape = tuple(case.outputs[slot].shape)
    norm = distance.truth_rms * math.sqrt(max(distance.counted, 0))
    output = Operand(slot, dtype, shape, norm, distance.truth_largest)
    tiny = _tiny(dtype) / distance.truth_rms if distance.truth_rms > 0 else _tiny(dtype)
    return rounding(case.operation, inputs, [output], precision)[slot] + tiny


def _tiny(dtype: str) -> float:
    """Return what an element may lose where a device has no subnormal numbers."""
    return float(torch.finfo(getattr(torch, dtype)).tiny)


def _operand(slot: str, dtype: torch.dtype, tensor: torch.Tensor) -> Operand:
    array = to_numpy(_host(tensor)).reshape(-1)
    magnitudes = np.abs(array)
    limit = float(torch.finfo(dtype).max) * (1 - 2.0**-7)
    kept = magnitudes if not array.size or magnitudes.max() < limit else magnitudes[magnitudes < limit]  # NaN: the second
    largest = float(kept.max()) if kept.size else 0.0
    norm = largest * math.sqrt(float(np.sum((kept / largest) ** 2))) if largest > 0 else 0.0
    return Operand(slot, str(dtype).removeprefix("torch."), tuple(tensor.shape), norm, largest)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    with alone():
        return tensor if tensor.device.type == "cpu" else tensor.cpu()


# ------------------------------------------------------------------------------------------------ calls that look wrong
def _with_perturbed(
    golden: Golden, case: Case, slot: str, truth: Array, distance: Distance, allowed: float, dtype: str, found: LocalError
) -> LocalError:
    """Ask how far one unit in the last place of the inputs moves the result: an ill-conditioned call is not a wrong one."""
    for draw in range(DRAWS):
        try:
            other = golden.run(case.call, case.outputs, _one_unit(case.call.dtypes, draw)).get(slot)
        except NoReference:
            return found
        if other is None or tuple(other.shape) != truth.shape:
            return found
        moved = Distance.of(truth, to_numpy(_host(other)))
        found = judge(case.operation, dtype, distance, rounding=allowed, perturbed=moved)
        if found.verdict == "ill-conditioned":
            break
    return found


def _one_unit(dtypes: tuple[torch.dtype, ...], draw: int) -> Change:
    """Return what moves each floating element by one unit in the last place of its dtype, up or down as a seed says."""
    remaining = iter(dtypes)
    seeds = iter(range(1 << 20))

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            return tensor.clone()
        unit = torch.finfo(next(remaining)).eps
        own = torch.Generator(device="cpu").manual_seed(1 + draw + DRAWS * next(seeds))
        signs = torch.randint(0, 2, tensor.shape, generator=own).mul_(2).sub_(1).to(tensor.device)
        return tensor * (1 + unit * signs)

    return change


def _with_second_opinion(
    golden: Golden, case: Case, slot: str, truth: Array, distance: Distance, allowed: float, dtype: str, found: LocalError
) -> LocalError:
    """Compute the call in the training's own dtypes on the reference: what its rounding makes is no fault of the device."""
    if any(isinstance(v, torch.dtype) for v in (*case.call.args, *case.call.kwargs.values())):
        return found
    try:
        narrow = golden.run(case.call, case.outputs, _narrowed(case.call.dtypes)).get(slot)
    except NoReference:
        return found
    if narrow is None or tuple(narrow.shape) != truth.shape or narrow.dtype != case.outputs[slot].dtype:
        return found
    with alone():
        baseline = Distance.of(truth, to_numpy(_host(narrow)))
    return judge(case.operation, dtype, distance, baseline, rounding=allowed)


def _narrowed(dtypes: tuple[torch.dtype, ...]) -> Change:
    remaining = iter(dtypes)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return tensor.to(next(remaining), copy=True)
        return tensor.clone()

    return change


# -------------------------------------------------------------------------------------------------------------- integers
def _of_integers(case: Case, slot: str, distance: Distance, truth: Array) -> tuple[str, str]:
    """Judge indices, masks and counts: computed from the very same numbers, they are the same, but for a choice left open."""
    share = f"{distance.differing:,} of {distance.counted:,} elements are not the reference's"
    op = case.operation.op
    if has(op, "ties") and slot == "output.1" and _same_values(case, slot, truth):
        return "accurate", ""
    if has(op, "ties") or has(op, "unordered"):
        return "could not tell", f"{share}, and ties leave the choice open"
    if has(op, "rounds-whole"):
        return "could not tell", f"{share}, and what is rounded before decides them"
    if _unordered(case):
        return "could not tell", f"{share}, and several values go to one place"
    return "wrong", share


def _same_values(case: Case, slot: str, truth: Array) -> bool:
    """Tell whether the indices of a sort pick the values that the reference's pick."""
    given = next((tensor for _, _, tensor in case.inputs), None)
    indices = case.outputs[slot]
    if given is None or indices.dim() != given.dim() or not indices.dim():
        return False
    dim = case.call.named().get("dim", -1)
    inside = bool(((indices >= 0) & (indices < given.size(dim))).all())
    if not inside:
        return False
    with alone():
        expected = torch.from_numpy(np.array(truth)).to(given.device)
        return bool(torch.equal(given.gather(dim, indices), given.gather(dim, expected)))


def _unordered(case: Case) -> bool:
    """Tell whether a call writes several values to one place without adding them."""
    if not has(case.operation.op, "last-write"):
        return False
    named = case.call.named()
    if named.get("accumulate") or named.get("reduce"):
        return False
    indices = named.get("indices", named.get("index"))
    of = [i for i in indices if i is not None] if isinstance(indices, (list, tuple)) else [indices]
    if len(of) != 1 or not isinstance(of[0], torch.Tensor) or of[0].dtype == torch.bool:
        return len(of) > 1 or normalised(case.operation.op) == "scatter"
    return bool(of[0].unique().numel() < of[0].numel())


def row_of(operation: Operation) -> str:
    """Return the criterion's row of an operator."""
    return criterion().row(operation.op, operation.level, operation.phase).name
