"""Does it matter? The capture's own answer, and the command to run for the rest.

- reached nothing (healed before any output, loss or gradient): *harmless*; `effects_rerun` tells whether the clean numbers are
  right, if elements were kept.
- reached gradients, and a GradScaler skipped that step: *harmless*, transient; skipping often is a finding of its own. If a
  forward overflows in several steps, all skipped: *accuracy-relevant*, for no loss scale helps a forward (outside of modules a
  single number may be the scaled loss itself).
- reached weights, an optimizer's state, or the next step's weights: *accuracy-relevant*.
- reached gradients, and the next recorded step read clean weights: *harmless*, transient: the run left the step out.
- saturated: *unknown*: the number is finite, and wrong by an unknown amount.
- the loss alone is bad, and no gradient: *harmless*.
- else *unknown*, and why.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from trueup.analysis.anomalies.describing import policy_row
from trueup.foundation.facts.anomaly import Anomaly, Matters, ScaleStep, StepAnomalies
from trueup.foundation.words.wording import one_line

FOLLOWED = ("nan", "overflow", "saturated")  # kinds that `effects_rerun` can tell more of


@dataclass(frozen=True, slots=True)
class Run:
    """What the decision needs to know of the whole run."""

    path: str
    steps: tuple[int, ...]
    scale: tuple[ScaleStep, ...]
    ranks: int
    tensors: bool = False  # whether the capture kept elements


def settle(judged: Sequence[StepAnomalies], run: Run) -> list[Anomaly]:
    """Decide for every anomaly, put repetitions of one call into the first, and put them in order."""
    lasting = {(step.rank, *place) for step in judged for place in step.follows}
    clean = {(step.rank, step.step) for step in judged if step.clean_weights and not step.follows}
    skipped = {one.step for one in run.scale if one.skipped}
    bad_later = {(rank, step) for rank, step, _ in lasting}
    found: list[Anomaly] = []
    for step in judged:
        later = next((s for s in run.steps if s > step.step), None)
        for place, one in enumerate(step.anomalies):
            if one is None:  # another rank explains it
                continue
            harmed = (step.rank, step.step, place) in lasting or ("loss" in one.reached and (step.rank, step.step) in bad_later)
            facts = _Facts(harmed, step.step in skipped, later is not None and (step.rank, later) in clean, step.clean_gradients)
            found.append(_decided(one, facts, run))
    return in_order([_with_every_step(one, run) for one in repetitions(found)])


def _with_every_step(one: Anomaly, run: Run) -> Anomaly:
    """Say that no step trained, where a module's forward overflows in each and a GradScaler skipped all of them."""
    skipped = {step.step for step in run.scale if step.skipped}
    scaling = not one.place.scope and all(_is_single(slot.shape) for slot in one.slots if slot.bad)  # a loss times its scale
    inside = one.transient and one.place.phase == "forward" and not scaling
    if not (inside and len(skipped) > 1 and all(step.skipped for step in run.scale) and skipped <= {one.place.step, *one.again}):
        return one
    why = "a lower loss scale changes no forward, so nothing is learned"
    because = f"a GradScaler skipped all {len(skipped)} steps because of it: {why}"
    return dataclasses.replace(one, matters="accuracy-relevant", because=because, transient=False, severity="critical")


def _is_single(shape: str) -> bool:
    return all(size == "1" for size in re.findall(r"\d+", shape))


@dataclass(frozen=True, slots=True)
class _Facts:
    lasting: bool  # a later step read bad weights because of it
    skipped: bool
    clean: bool  # the next recorded step read clean weights
    clean_gradients: bool


def _decided(one: Anomaly, facts: _Facts, run: Run) -> Anomaly:
    reached = one.reached
    if facts.lasting and "parameters" not in reached:
        reached = (*reached, "parameters")
    if facts.skipped and set(reached) <= {"loss", "gradients", "other ranks"} and reached:
        one = dataclasses.replace(one, transient=True, severity="medium")
    matters, because = _matters(one, reached, facts)
    if matters == "harmless" and reached:
        one = dataclasses.replace(one, transient=True, severity="medium")
    return dataclasses.replace(
        one, reached=reached, matters=matters, because=because, policy=policy_row(one),
        run_next=_next(one, run, matters),
    )  # fmt: skip


def _matters(one: Anomaly, reached: tuple[str, ...], facts: _Facts) -> tuple[Matters, str]:
    harmful = set(reached) & {"loss", "gradients", "other ranks"}
    if facts.lasting:
        return "accuracy-relevant", "the next step reads weights that are bad because of it"
    if one.kind == "parameters":
        return "accuracy-relevant", "the weights themselves are bad"
    if "parameters" in reached and not facts.skipped:
        return "accuracy-relevant", "it is written into weights or an optimizer's state"
    if facts.skipped and reached:
        return "harmless", "a GradScaler saw it in the gradients and skipped the step"
    if one.kind == "saturated":
        return "unknown", "a saturated number is finite, and wrong by an amount that the capture does not tell"
    if not reached:
        healers = f" ({', '.join(one_line(name) for name in one.healed_by)})" if one.healed_by else ""
        return "harmless", f"every call that reads it gives clean numbers{healers}: no loss, gradient or weight got it"
    if harmful and not harmful - {"loss", "gradients"} and facts.clean_gradients:
        return "harmless", "the loss is bad, and no gradient that came of it is"
    if harmful and facts.clean:
        return "harmless", "the weights that the next recorded step reads are clean: the run left this step out"
    if harmful:
        got = " and ".join(name for name in reached if name != "unread")
        return "unknown", f"it reached {got}; what became of the weights was not recorded: record the next step too"
    return "unknown", "no recorded call reads it, so what was done with it is not known"


def _next(one: Anomaly, run: Run, matters: Matters) -> str:
    """Return the command that answers the rest: whether it matters, or whether healed numbers are the right ones."""
    place = one.place
    healed = matters == "harmless" and not one.reached
    if place.seq < 0 or one.kind not in FOLLOWED or not (matters == "unknown" or healed):
        return ""
    if run.tensors:
        return f"trueup overflow {_quoted(run.path)} --replay"
    again = _quoted(f"{run.path}-tensors")
    steps = f"{place.step}:{place.step + 2}"
    return f"trueup capture --detail tensor --steps {steps} --stop -o {again} -- COMMAND; trueup overflow {again} --replay"


def _quoted(word: str) -> str:
    return shlex.quote(one_line(word))


def repetitions(found: list[Anomaly]) -> list[Anomaly]:
    """Keep the first anomaly of a call that is bad in several steps, or the worst one."""
    kept: dict[tuple[object, ...], Anomaly] = {}
    for one in found:
        place = one.place
        name = (one.kind, place.rank, place.phase, place.level, place.scope, place.op, place.ordinal)
        key = (*name, one.matters)
        if one.matters == "unknown" and (*name, "accuracy-relevant") in kept:  # what it does, an earlier step showed
            key = (*name, "accuracy-relevant")
        before = kept.get(key)
        kept[key] = (
            one
            if before is None
            else dataclasses.replace(
                before, again=before.again if place.step in (before.place.step, *before.again) else (*before.again, place.step)
            )
        )
    return list(kept.values())


def in_order(found: list[Anomaly]) -> list[Anomaly]:
    """Order by whether it matters, then by step; within a step by rank and execution."""
    weight = {"accuracy-relevant": 0, "unknown": 0, "harmless": 1}
    return sorted(found, key=lambda one: (weight[one.matters], one.place.step, _phase(one), one.place.rank, one.place.seq))


def _phase(one: Anomaly) -> int:
    """Order phases alike on all ranks, whose numbers of calls differ: forward comes before backward."""
    return {"data": 0, "forward": 0, "recompute": 1, "backward": 1, "collective": 1, "optimizer": 2}.get(one.place.phase, 1)
