"""How wrong a device is in one call, and what of it rounding explains: for a reproducer, and each step of its shrinking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from numpy.typing import NDArray

from trueup.adapters.torch.recorded_call import Place
from trueup.adapters.torch.replay_memory import NotReplayable
from trueup.adapters.torch.replaying import Arrays, Replayer, Result
from trueup.adapters.torch.source import Source
from trueup.adapters.torch.source_names import function_name, plain_name
from trueup.adapters.torch.source_paths import paths_of
from trueup.model import TrueupError
from trueup.rerun.cases import Case
from trueup.rerun.local_error import Distance, thresholds
from trueup.rerun.outcomes import Outcome
from trueup.rerun.recorded import RecordedCall, RecordedTensor
from trueup.rerun.results import parallel
from trueup.rerun.rounding import Operation, criterion, rounding


class _OneCall:
    """Stands for a capture that holds a case and nothing else."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.capture = SimpleNamespace(ranks=dict(case.ranks))

    def at(self, rank: int, seq: int) -> RecordedCall:
        """Return the forward call."""
        if self._case.forward is None:
            raise TrueupError(f"no call {seq} on rank {rank}")
        return self._case.forward

    def of_step(self, *_: Any) -> list[RecordedCall]:
        """Return no other calls."""
        return []


def settled(case: Case, against: str) -> Case:
    """Return a case whose results are those of a device, computed now; a random call without a state is given one.

    Raises:
        NotReplayable: it is not executed there, and why.
    """
    if not case.made.random:
        seeded = torch.Generator().manual_seed(0).get_state().numpy().tobytes()
        case = case.with_random({case.home: seeded})
    result = _execute(case, against)
    return case.with_outputs(result.arrays)


def judged(case: Case, device: str, against: str) -> tuple[Case, Outcome]:
    """Return a case with the results of one device as its baseline, and the verdict on another.

    Raises:
        NotReplayable: the baseline's device does not execute it.
    """
    case = settled(case, against)
    replayer = _replayer(case, device)
    with replayer.undisturbed():
        return case, replayer.replay(case.call)


def written(case: Case, device: str | None, against: str, recorded: Arrays) -> dict[str, Any]:
    """Return what a reproducer says: source, limits, errors.

    Args:
        case: its results are those of ``against``.
        device: where it is expected to fail; None: it is not here.
        against: the device that it is compared with.
        recorded: the results in the capture, by slot.

    Raises:
        NotReplayable: it cannot be written, and why.
    """
    replayer = _replayer(case, device or against)
    with replayer.undisturbed():
        own = _execute(case, against)
        limits = _limits(replayer, case, own)
        try:
            paths, written_slots = paths_of(case, Place(against, case.home))
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises
            raise NotReplayable(f"{against} does not execute it: {error}") from None
        source = Source.of(case, paths, written_slots, random=own.random)
        found: dict[str, Any] = {}
        if device is not None:
            found = _found(replayer, case)
    results = {s: t.array() for s, t in case.call.outputs.items() if s in limits}
    return {
        "source": source, "limits": limits, "random": own.random, "name": plain_name(case.call),
        "function": function_name(case.made),
        "device": _errors(results, found) if not isinstance(found, str) else found, "recorded": _errors(results, recorded),
    }  # fmt: skip


def _found(replayer: Replayer, case: Case) -> Any:
    try:
        return replayer.execute(case.call, replayer.target).arrays
    except NotReplayable as reason:
        return str(reason)


def _errors(expected: Arrays, found: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, float]]:
    errors = {}
    for slot, array in found.items():
        if slot not in expected:
            continue
        if array.shape != expected[slot].shape or array.dtype != expected[slot].dtype:
            errors[slot] = {"form": 1.0}
            continue
        d = Distance.of(expected[slot], array)
        errors[slot] = {
            "rms": d.rms, "largest": d.largest, "relative": d.relative, "differing": d.differing, "disagreeing": d.disagreeing,
        }  # fmt: skip
    return errors


def _replayer(case: Case, device: str) -> Replayer:
    made = Replayer(_OneCall(case), device)  # type: ignore[arg-type]
    made.home = case.home
    made.target, made.truth = Place(device, case.home), Place(device, case.home, wide=True)
    made.cpu, made.moved = Place("cpu", case.home), Place(device, case.home, wide=True, perturb=True)
    return made


def _execute(case: Case, device: str) -> Result:
    replayer = _replayer(case, device)
    with replayer.undisturbed():
        return replayer.execute(case.call, replayer.target)


# ---------------------------------------------------------------- limits
def _limits(replayer: Replayer, case: Case, own: Result) -> dict[str, dict[str, Any]]:
    """Return how far each result may be from the baseline's: beyond it `trueup.rerun.local_error.judge` says wrong."""
    call = case.call
    try:
        truth: Result | None = replayer.execute(call, replayer.truth)
    except NotReplayable:
        truth = None
    operation = Operation(call.key.op, call.key.level, call.key.phase)
    read = [replayer._operand(t, None) for t in replayer._read(call)]
    limits = {}
    for slot, recorded in call.outputs.items():
        if slot in own.arrays and recorded.numel:
            exact = None if truth is None else truth.arrays.get(slot)
            random = own.random or criterion().row(operation.op, operation.level, operation.phase).random
            if exact is not None and (exact.shape != recorded.shape or (random and not parallel(exact, own.arrays[slot]))):
                exact = None
            limits[slot] = _limit(replayer, call, operation, recorded, own.arrays[slot], exact, read)
    return limits


def _limit(
    replayer: Replayer, call: RecordedCall, operation: Operation, recorded: RecordedTensor, known: NDArray[Any],
    exact: NDArray[Any] | None, read: list[Any],
) -> dict[str, Any]:  # fmt: skip
    kind, table = thresholds().of(operation), thresholds()
    factor = kind.backward if operation.backward else kind.factor
    truth = known if exact is None else exact
    own = Distance.of(truth, known)
    if recorded.dtype.startswith(("int", "uint", "bool")):
        return {"differing": int((factor + 1) * own.differing), "origin": kind.origin, "rule": f"{kind.name}: integers"}
    explained = rounding(operation, read, [replayer._operand(recorded, own)], replayer.precision, kind.roundings)[recorded.slot]
    if exact is None:
        explained *= 2  # both sides round
    elif kind.exact and own.rms == 0 and own.truth_rms > 0:
        explained = 0.0  # nothing is rounded here
    moved = None if exact is None else replayer._moved(call, recorded.slot, exact)
    beside = (0.0, 0.0) if moved is None else (moved.rms, moved.largest)
    widest = max(own.truth_largest, 4 * own.truth_rms) or 1.0
    pairs = ((own.rms, explained * (own.truth_rms or 1.0), beside[0]), (own.largest, explained * widest, beside[1]))
    rms, largest = (max(table.certain * max(factor * o, r), table.perturbed * m) + o for o, r, m in pairs)
    by = "rounding" if explained * (own.truth_rms or 1.0) > factor * own.rms else f"error of the baseline, {factor:g} times"
    return {
        "rms": rms, "largest": largest, "origin": kind.origin, "rule": f"{kind.name}: {table.certain:g} times the {by}",
        "relative": rms / own.truth_rms if own.truth_rms else math.nan,
    }  # fmt: skip

