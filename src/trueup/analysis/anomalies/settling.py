"""Does it matter, told by executing calls again: what the records leave open, and what they call healed, is followed in float64.

That an infinity was healed means that clean numbers came of it; whether they are the right ones, only this tells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trueup.analysis.anomalies.effects import Effect, Followed
from trueup.analysis.anomalies.mattering import FOLLOWED
from trueup.analysis.anomalies.step_calls import StepCalls
from trueup.foundation.facts.anomaly import Anomaly, Severity
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture

MOST = 20
"""Anomalies that are followed, those first that matter most."""


def is_open(one: Anomaly) -> bool:
    """Tell whether executing calls again can say more of an anomaly than the records do."""
    healed = one.matters == "harmless" and not one.reached
    return one.kind in FOLLOWED and one.place.seq >= 0 and (one.matters == "unknown" or healed)


def settled(found: Sequence[Anomaly], capture: Capture) -> tuple[list[Anomaly], list[str]]:
    """Return the anomalies with what executing their calls again told, and notes.

    Raises:
        TrueupError: PyTorch, which executes them, is not installed, or the capture is of another framework.
    """
    waiting = [one for one in found if is_open(one)]
    if not waiting:
        return list(found), []
    from trueup.analysis.rerun.executing import only_torch

    only_torch(capture, "overflow --replay")
    try:
        from trueup.recording.adapters.torch.effect_execution import executing
    except ImportError:
        raise TrueupError("--replay executes calls with PyTorch, which is not installed\n  next:     pip install torch") from None
    told: dict[int, Anomaly] = {}
    steps: dict[tuple[int, int], StepCalls] = {}
    with executing(capture) as execute:
        for one in waiting[:MOST]:
            place = one.place
            if (place.rank, place.step) not in steps:
                steps = {(place.rank, place.step): StepCalls(capture, place.rank, place.step)}
            effect = Followed(steps[place.rank, place.step], execute).effect(place.seq)
            told[id(one)] = _with(one, effect)
    notes = [f"{len(waiting) - MOST} further findings were not executed again"] if len(waiting) > MOST else []
    return [told.get(id(one), one) for one in found], notes


def _with(one: Anomaly, effect: Effect) -> Anomaly:
    """Put what executing again told in the place of what the records told, where it tells more."""
    told = dataclasses.replace(one, run_next="", policy="" if effect.same else one.policy)
    lasting = set(one.reached) - {"unread"}
    if effect.matters == "harmless" and lasting and one.kind != "saturated":
        got = " and ".join(name for name in one.reached if name in lasting)
        return dataclasses.replace(told, because=f"{one.because}; executed again, it was not met on its way to {got}")
    if effect.matters != "unknown":
        transient = effect.matters == "harmless"
        severity: Severity = "medium" if transient else "critical"
        return dataclasses.replace(told, matters=effect.matters, because=effect.because, transient=transient, severity=severity)
    if one.matters == "unknown":
        return dataclasses.replace(told, because=f"{one.because}; {effect.because}")
    if not effect.differs:
        return dataclasses.replace(told, because=f"{one.because}; whether those are right could not be told: {effect.because}")
    because = f"every call that reads it gives clean numbers, and wrong ones: {effect.because}"
    return dataclasses.replace(told, matters="unknown", because=because, transient=False, severity="high")
