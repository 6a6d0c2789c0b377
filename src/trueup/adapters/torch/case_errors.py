"""How wrong a device is in one call, and what of it rounding explains: for a reproducer, and each step of its shrinking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from trueup.adapters.torch.chain_running import ChainReplayer
from trueup.adapters.torch.recorded_call import Place
from trueup.adapters.torch.replay_memory import NotReplayable
from trueup.adapters.torch.replaying import Arrays, Replayer, Result
from trueup.adapters.torch.source import Source
from trueup.adapters.torch.source_names import function_name, plain_name
from trueup.adapters.torch.source_paths import paths_of
from trueup.rerun.cases import Case
from trueup.rerun.chains import Chain
from trueup.rerun.local_error import Distance, thresholds
from trueup.rerun.outcomes import Outcome
from trueup.rerun.recorded import RecordedCall, RecordedTensor
from trueup.rerun.results import parallel
from trueup.rerun.rounding import Operation, criterion, rounding


def settled(chain: Chain, against: str) -> Chain:
    """Return a chain whose last call has the results of a device, computed now; a random call without a state is given one.

    What calls before it draw at random is not handed on: it is loaded as it was recorded.

    Raises:
        NotReplayable: it is not executed there, and why.
    """
    case = chain.target
    if not case.made.random:
        seeded = torch.Generator().manual_seed(0).get_state().numpy().tobytes()
        chain = chain.with_target(case.with_random({case.home: seeded}))
    result, random = _execute(chain, against)
    if any(link.maker in random for links in chain.links for link in links.values()):
        chain = chain.without_links_of(random)
        result, _ = _execute(chain, against)
    return chain.with_target(chain.target.with_outputs(result.arrays))


def judged(chain: Chain, device: str, against: str) -> tuple[Chain, Outcome]:
    """Return a chain whose last call has the results of one device as its baseline, and the verdict on another.

    Raises:
        NotReplayable: the baseline's device does not execute it.
    """
    chain = settled(chain, against)
    replayer = ChainReplayer(chain, device)
    with replayer.undisturbed():
        return chain, replayer.replay(chain.target.call)


def written(chain: Chain, device: str | None, against: str, recorded: Arrays) -> dict[str, Any]:
    """Return what a reproducer says: source, limits, errors.

    Args:
        chain: its results are those of ``against``.
        device: where it is expected to fail; None: it is not here.
        against: the device that it is compared with.
        recorded: the results in the capture, by slot.

    Raises:
        NotReplayable: it cannot be written, and why.
    """
    replayer, case = ChainReplayer(chain, device or against), chain.target
    with replayer.undisturbed():
        own, random = _execute(chain, against)
        limits = _limits(replayer, case, own)
        try:
            found_at = [paths_of(each, Place(against, each.home), results=_read_of(chain, k)) for k, each in enumerate(chain.cases)]
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises
            raise NotReplayable(f"{against} does not execute it: {error}") from None
        last = len(chain.cases) - 1
        source = Source.of(chain, found_at, random=random | ({last} if own.random else set()))
        found: dict[str, Any] = {}
        if device is not None:
            found = _found(replayer, case)
    results = {s: t.array() for s, t in case.call.outputs.items() if s in limits}
    return {
        "source": source, "limits": limits, "random": own.random, "name": plain_name(case.call),
        "function": function_name(case.made), "calls": len(chain.cases),
        "device": _errors(results, found) if not isinstance(found, str) else found, "recorded": _errors(results, recorded),
    }  # fmt: skip


def _read_of(chain: Chain, k: int) -> tuple[str, ...]:
    """Return the results of a call that later ones read."""
    return tuple({link.slot: 0 for links in chain.links for link in links.values() if link.maker == k})


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


def _execute(chain: Chain, device: str) -> tuple[Result, frozenset[int]]:
    replayer = ChainReplayer(chain, device)
    with replayer.undisturbed():
        return replayer.execute(chain.target.call, replayer.target), frozenset(replayer.random)


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

