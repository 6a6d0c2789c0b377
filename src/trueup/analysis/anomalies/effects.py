"""What is said of a bad call: its place and slots as frozen facts, the policy.toml row for a wider dtype (docs: policy.md), and
whether it matters. The capture's own answer, and the command to run for the rest:

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

From step to step: the weights and buffers that a step read, the bad numbers that it wrote into them, a GradScaler's history. A
scale that keeps falling is a finding of its own. One that starts too large is halved in the first steps, as intended (PyTorch's
documentation of GradScaler: "the first few iterations may be skipped"). After the first step that was not skipped, a healthy
scale falls about once in ``growth_interval`` (2000) steps.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.anomalies.flow import maker
from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream
from trueup.foundation.facts.anomaly import Anomaly, Led, Matters, Place, ScaleStep, SlotNumbers, StepAnomalies
from trueup.foundation.facts.arguments import decoded
from trueup.foundation.facts.operators import has, having
from trueup.foundation.facts.slots import is_input
from trueup.foundation.kernels.sketch import splitmix64
from trueup.foundation.store.columns import Vocabulary
from trueup.foundation.words.wording import one_line
from trueup.recording.policy_file import exactly, in_toml

Sites = Mapping[int, tuple[tuple[str, ...], "str | None"]]

LED = 8  # calls shown of those that led to a bad one
STEPS_BACK = 64  # calls that are followed to find those

FOLLOWED = ("nan", "overflow", "saturated")  # kinds that `effects_rerun` can tell more of

JUMP = 1e3
"""Growth of a weight's root mean square in one step that makes the step bad; zero weights count as 1. Adam moves a weight by
about its learning rate (Kingma and Ba 2015, section 2.1), SGD by lr times gradient: no converging training grows a thousandfold."""


def place_of(stream: Stream, call: int, sites: Sites) -> Place:
    """Say where a call stands, with the stack of the nearest call around it that has one."""
    row = stream.row(call)
    api: str | None = None
    frames: tuple[str, ...] = ()
    text: str | None = None
    for outer in (row, *map(stream.row, stream.around(call))):
        if outer.site is not None and outer.site in sites and not frames:
            frames, text = sites[outer.site]
        if outer.level == "api" and api is None and row.level == "aten":
            api = outer.op
    if not frames and row.forward_seq is not None:
        forward = stream.find(row.forward_seq)
        site = None if forward < 0 else stream.row(forward).site
        frames, text = sites.get(site, ((), None)) if site is not None else ((), None)
    return Place(
        row.rank, row.step, row.seq, row.phase, row.level, row.scope, row.op, row.ordinal, api,
        frames[0] if frames else None, text, tuple(frames),
    )  # fmt: skip


def step_of(stream: Stream) -> int:
    """Return the step of a stream, which here holds one; 0 if it holds no call."""
    return int(stream.step[0]) if len(stream.step) else 0


def slots_of(stream: Stream, call: int, bits: Array) -> tuple[SlotNumbers, ...]:
    """Give the slots of a call in numbers."""
    return tuple(slot_of(stream, k, int(bits[k])) for k in range(*stream.starts[call : call + 2].tolist()))


def slot_of(stream: Stream, k: int, bits: int) -> SlotNumbers:
    """Give one slot in numbers."""
    name = stream.names.name(int(stream.slot[k])) or ""
    return SlotNumbers(name, stream.dtype_of(k) or "", shape_of(stream, k), stream.stats(k), bits)


def shape_of(stream: Stream, k: int) -> str:
    """Write a shape as ``[8, 16]``."""
    shape = stream.shapes[k]
    return "" if shape is None else f"[{', '.join(map(str, shape))}]"


def led_to(stream: Stream, call: int, bits: Array, sites: Sites) -> tuple[Led, ...]:
    """Follow, from a call back, the largest of what each call read; views are passed over."""
    found: list[Led] = []
    for _ in range(STEPS_BACK):
        k = _maker_of_largest(stream, call, bits)
        if k == NONE or len(found) == LED:
            break
        call = int(stream.call[k])
        if not has(stream.names.name(int(stream.op[call])) or "", "view"):
            one = slot_of(stream, k, int(bits[k]))
            found.append(Led(place_of(stream, call, sites), one.slot, one.dtype, one.shape, one.largest, one.bad))
    return tuple(found)


def _maker_of_largest(stream: Stream, call: int, bits: Array) -> int:
    """Return the slot of an earlier call that made the worst, else the largest, input of a call; `NONE` where there is none."""
    best, size = NONE, -1.0
    for k in range(*stream.starts[call : call + 2].tolist()):
        made = maker(stream, k)
        if made == NONE or stream.call[made] >= call or (math.isnan(stream.l2[k]) and not bits[k]):
            continue
        rms = math.inf if bits[k] else float(stream.l2[k]) / math.sqrt(max(float(stream.numel[k]), 1.0))
        if rms > size:
            best, size = made, rms
    return best


NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
ELSEWHERE = ("input", "parameters", "loss_scale", "collective")  # kinds for which no call is to blame


def policy_row(one: Anomaly) -> str:
    """Return the row, or nothing where a wider dtype is no remedy: already wide, a gradient, or not the call's fault."""
    place = one.place
    op = place.api if place.level == "aten" else place.op
    dtypes = {slot.dtype for slot in one.slots if slot.dtype}
    narrow = bool(dtypes & set(NARROW))
    if one.kind in ELSEWHERE or op is None or "::" in op or (not narrow and "float64" in dtypes):
        return ""
    if not narrow and one.kind == "nan":
        return ""  # NaN in float32 is mathematics (log of a negative number, 0/0), not range
    wide = "float32" if narrow else "float64"
    if place.phase not in ("forward", "recompute", "backward"):
        return ""
    if place.phase == "backward" and not narrow:
        return ""  # a gradient has the dtype of its tensor, however it was computed: a smaller loss scale is the remedy
    if place.scope:  # the result itself does not fit
        return wider_module(place.scope, wide)
    if place.phase == "backward":
        return wider_function("", op, wide)
    return "\n".join(["[[rule]]", f"op = {in_toml(exactly(op))}", f'dtype = "{wide}"']) + "\n"


def wider_module(scope: str, dtype: str = "float32") -> str:
    """Return the row for a module that goes on in a wider dtype and gives it."""
    keys = ['level = "module"', f"scope = {in_toml(exactly(scope))}", f'dtype = "{dtype}"', f'returns = "{dtype}"']
    return "\n".join(["[[rule]]", *keys]) + "\n"


def wider_function(scope: str, op: str, dtype: str = "float32") -> str:
    """Return the row for the calls of a function in a scope that go on in a wider dtype and give it."""
    keys = [f"scope = {in_toml(exactly(scope))}", f"op = {in_toml(exactly(op))}", f'dtype = "{dtype}"', f'returns = "{dtype}"']
    return "\n".join(["[[rule]]", *keys]) + "\n"


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


@dataclass(slots=True)
class Lasting:
    """Tensors that a step's forward calls read. All of them, as the first step of a model made inside a capture makes weights."""

    keys: NDArray[np.uint64]  # sorted: level, scope, operator, ordinal and slot, as one number
    rms: Array
    numel: Array

    def before(self, keys: NDArray[np.uint64], numel: Array) -> Array:
        """Return the root mean square that each of these had, NaN where it was not read or had another size."""
        if not len(self.keys):
            return np.full(len(keys), np.nan)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where((self.keys[at] == keys) & (self.numel[at] == numel), self.rms[at], np.nan)


@dataclass(slots=True)
class Memory:
    """Of one rank, from step to step; give it to `classify` with each step in turn."""

    names: Vocabulary = field(default_factory=Vocabulary)
    values: Vocabulary = field(default_factory=Vocabulary)
    lasting: Lasting | None = None
    stream: Stream | None = None  # the step before
    # Bad ``(seq, slot)`` of an optimizer -> step and place of its anomaly
    written: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    pending: list[tuple[int, int]] = field(default_factory=list)  # anomalies whose bad numbers reached gradients or weights


def read_slots(stream: Stream) -> Numbers:
    """Return the floating slots that forward calls read."""
    forward = (stream.phase == stream.names.number("forward"))[stream.call]
    floating = stream.names.table(_is_float)[stream.dtype]
    read = stream.names.table(is_input)[stream.slot] & forward & floating & stream.measured
    return np.asarray(np.flatnonzero(read), np.int64)


def lasting_slots(stream: Stream, slots: Numbers) -> Numbers:
    """Return the slots, of those given, that no call of the step made."""
    return slots[stream.producers[slots] < 0]


def keys_of(stream: Stream, slots: Numbers) -> NDArray[np.uint64]:
    """Return a number for the name of each slot, the same in every step."""
    calls = stream.call[slots]
    found = np.zeros(len(slots), np.uint64)
    for column in (stream.level[calls], stream.scope[calls], stream.op[calls], stream.ordinal[calls], stream.slot[slots]):
        found = splitmix64(found ^ column.astype(np.uint64))
    return found


def rms_of(stream: Stream, slots: Numbers) -> Array:
    """Return the root mean square of slots."""
    return np.asarray(stream.l2[slots] / np.sqrt(np.maximum(stream.numel[slots], 1)))


def remember(stream: Stream, slots: Numbers) -> Lasting:
    """Keep what the forward calls of a step read."""
    keys = keys_of(stream, slots)
    order = np.argsort(keys, kind="stable")
    return Lasting(keys[order], rms_of(stream, slots)[order], stream.numel[slots][order])


def grown(stream: Stream, slots: Numbers, before: Lasting | None) -> dict[int, float]:
    """Return how many times larger lasting tensors are than in the step before, of those that grew `JUMP` times."""
    if before is None or not len(slots):
        return {}
    now, was = rms_of(stream, slots), before.before(keys_of(stream, slots), stream.numel[slots])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = now / np.where(was > 0, was, 1.0)
    found = np.flatnonzero(~np.isnan(was) & (ratio >= JUMP))
    return dict(zip(slots[found].tolist(), ratio[found].tolist(), strict=True))


def _is_float(dtype: str) -> bool:
    return "float" in dtype


OFTEN = 3
SHARE = 0.05
"""After the first good step, `OFTEN` or more skipped steps and more than this share are often: a hundred times the healthy rate."""
LEAST = 1.0  # a scale at or below which the smallest gradients of float16 are lost: no scale at all


def scale_steps(stream: Stream) -> tuple[ScaleStep, ...]:
    """Return what a GradScaler did in a step, one entry an optimizer: its scale, and whether the step was skipped."""
    found = []
    for call in np.flatnonzero(stream.names.table(having("scaler"))[stream.op]).tolist():
        scale, overflow = None, False
        for k in range(*stream.starts[call : call + 2].tolist()):
            name = stream.names.name(int(stream.slot[k])) or ""
            if name == "input.scale" and stream.numel[k]:
                scale = float(stream.l2[k])  # of one element, which is positive
            elif name.startswith("input.found_inf"):
                overflow = overflow or bool(stream.l2[k] > 0)
        said = decoded(stream.value(int(stream.arguments[call])))
        known = said.get("scale", scale)
        skipped = bool(said.get("skipped", overflow))
        if isinstance(known, (int, float)):
            op = stream.names.name(int(stream.op[call])) or ""
            found.append(ScaleStep(step_of(stream), stream.rank, float(known), skipped, op))
    return tuple(found)


def scale_findings(history: Sequence[ScaleStep], found: Sequence[Anomaly]) -> list[Anomaly]:
    """Return an anomaly if the scale, of all ranks and steps, fell often or to 1, with the calls in ``found`` that caused it."""
    ranks = sorted({one.rank for one in history})
    if not ranks:
        return []
    mine = [one for one in history if one.rank == ranks[0]]  # all ranks agree on the scale, or they would train apart
    skipped = [one for one in mine if one.skipped]
    first_good = next((k for k, one in enumerate(mine) if not one.skipped), len(mine))
    late = [one for one in mine[first_good:] if one.skipped]
    lowest = min(one.scale for one in mine)
    often = len(late) >= OFTEN and len(late) > SHARE * len(mine[first_good:])
    fallen = lowest <= LEAST and bool(skipped)
    if not often and not fallen:
        return []
    steps = {one.step for one in skipped}
    causes = [one for one in found if {one.place.step, *one.again} & steps]
    return [_finding(mine, skipped, lowest, causes, fallen)]


def _finding(
    mine: Sequence[ScaleStep], skipped: Sequence[ScaleStep], lowest: float, causes: Sequence[Anomaly], fallen: bool
) -> Anomaly:
    first = (skipped or mine)[0]
    place = Place(first.rank, first.step, -1, "optimizer", "api", "", first.op, 0)
    many = f"skipped {len(skipped)} of {len(mine)} steps"
    what = f"the loss scale keeps falling (it is {mine[-1].scale:g} now)"
    if fallen:
        what = f"the loss scale fell from {mine[0].scale:g} to {lowest:g}"
    named = "; ".join(
        f"{', '.join(f'step {s}' for s in (one.place.step, *one.again)[:4])}: {one.place.scope or one.place.op} ({one.place.op})"
        for one in causes[:4]
    )
    told = f"; what overflowed: {named}" if named else "; which call overflowed was not recorded in those steps"
    return Anomaly(
        "loss_scale", place, "high", f"{what} and {many}{told}", reached=("gradients",), matters="accuracy-relevant",
        because="steps that are skipped train nothing, and a scale of 1 or less loses the small gradients of float16",
        again=tuple(one.step for one in skipped[1:]), policy=next((one.policy for one in causes if one.policy), ""),
    )  # fmt: skip
