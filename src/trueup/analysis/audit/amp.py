"""Mixed precision of one run: is it on, O1 or O2 by module, how did the loss scale go, and what should be set differently.

    mixed precision is on: O1 in float16; 1 module has to stay wide: block.norm; the loss scale fell from 65,536 to 1

O1 computes products in a narrow dtype and keeps weights wide (autocast), O2 keeps all but norms narrow (NVIDIA apex, opt_level).
What has to stay wide is what made Inf or NaN of clean numbers, and norms, powers, exponentials and sums that compute in float16,
which PyTorch's autocast keeps in float32 (docs.pytorch.org: Autocast Op Reference).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.analysis.anomalies import overflow
from trueup.analysis.anomalies.effects import wider_module
from trueup.analysis.anomalies.flow import family
from trueup.analysis.audit.preflight import scales_loss
from trueup.analysis.audit.reading import FINEST, Census, Counting, Found, Steps, calls, finest, parts, stream_of
from trueup.comparison.result.shown import loss_factors
from trueup.foundation import toml
from trueup.foundation.facts.anomaly import OverflowResult
from trueup.foundation.model import TrueupError
from trueup.foundation.settings import modules_of
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import clean, counted, number
from trueup.recording.policy_file import laid_over, parse

LEVELS = FINEST[1:]  # those whose calls stand in modules
HALF, WIDE, BRAIN = "float16", ("float32", "float64"), "bfloat16"
LARGEST = 65504.0  # of float16
ROOM = 16.0  # a scaled gradient may still grow by this before it overflows
MOST_SCALE = 2.0**24  # torch.amp.GradScaler doubles to there in 500,000 steps; a first one above is none
FLUSHED = 2.0**-24  # the smallest float16: half of it becomes zero
STEADY = 16.0  # times the largest gradient may differ between steps for a static scale
NOT_FINITE = ("n_nan", "n_posinf", "n_neginf")
COLLAPSED = "the loss scale collapsed"
MANY = 3  # modules that leave float16's range from which another dtype costs less than keeping them wide
NORM = re.compile(r"(Batch|Layer|Group|Instance|RMS)Norm|Norm$|Norm\d?d$")
DELICATE = re.compile(
    r"(layer_norm|group_norm|instance_norm|rms_norm|softmax|logsumexp|cross_entropy|nll_loss|cosine_similarity)$"
    r"|torch\.(Tensor\.)?(pow|square|exp|expm1|norm|var|std|cumsum|cumprod|prod|rsqrt)(_|$)|linalg\.\w*norm$"
)

Held = Mapping[str, Mapping[str, Any]]
"""What modules are set to, by scope."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Something that should be set differently: what, why, and the policy that does it, empty where none can."""

    what: str
    why: str
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Module:
    """A module's precision: ``O1``, ``O2`` or ``wide``, the dtypes of its weights and of its products."""

    scope: str
    kind: str
    weights: str
    products: str


@dataclass(frozen=True, slots=True)
class Amp:
    """What `amp` found. ``scale``: step, scale, whether the step was skipped. ``first_scale``: by the gradients, 0: not known."""

    sentence: str
    state: str  # ``off``, ``O1``, ``O2``, ``narrow throughout``; empty: could not tell
    dtype: str
    modules: tuple[Module, ...]
    scale: tuple[tuple[int, float, bool], ...]
    scale_history: str
    first_scale: float
    advice: tuple[Advice, ...]
    faults: int  # advice that mends something that is wrong
    instead: Mapping[str, str]
    """Other policies, by what they are for: ``static`` (the first scale, kept), ``bfloat16`` (autocast's dtype, no scale)."""
    ran: str = ""
    """The policy that the run was made under, of which the policies here keep what they do not replace."""

    @property
    def exit_code(self) -> int:
        """0: off, or nothing is wrong; 1: something is; 2: could not tell."""
        return 1 if self.faults else 0 if self.state else 2

    @property
    def policy(self) -> str:
        """Return the rules of all advice for `trueup heal --policy`, each once, with those that the run was made under; what is an
        alternative is left out. Empty: nothing is advised."""
        return over(_together(self.advice), self.ran)

    @property
    def collapsed(self) -> bool:
        """Tell whether the loss scale did not serve: it fell to 1, or all of three or more steps were skipped."""
        return any(one.what == COLLAPSED for one in self.advice)


def over(rules: str, ran: str) -> str:
    """Return advised rules before those of the policy that a run was made under."""
    return laid_over(rules, ran) if rules and ran else rules


def _together(advice: Iterable[Advice]) -> str:
    return "\n".join(dict.fromkeys(one.policy for one in advice if one.policy and not one.what.startswith(BRAIN)))


def _set(op: str, **values: object) -> str:
    """Return the rule that sets values of GradScaler or autocast."""
    said = ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
    return f'[[rule]]\nlevel = "amp"\nop = "{op}"\nset = {{ {said} }}\n'


def amp(capture: str | Path | Capture, *, step: Steps = None, rank: Steps = None) -> Amp:
    """Judge the mixed precision of a run, at level ``api`` or ``module`` with statistics.

    Raises:
        TrueupError: there is no such capture, step or rank.
    """
    given = open_capture(capture)
    found = overflow(given, step=step, rank=rank)
    manifest = next(iter(given.ranks.values()), {})
    held = modules_of(manifest)
    scales = {one.step: one.scale for one in found.scale}
    by_hand = 1.0 if scales else _by_hand(given, step, rank)
    ranges = _Ranges(given, step, rank, held, scales, by_hand)
    counts = ranges.counts
    modules = _modules(held, counts)
    narrow = next((dtype for dtype in counts.counts() if dtype in (HALF, BRAIN)), "")
    state = _state(counts, modules, narrow)
    scale = tuple((one.step, one.scale, one.skipped) for one in found.scale)
    wide = _stay_wide(found, ranges)
    advice = [*wide, *_scaling(manifest, found, ranges, narrow, scaled=by_hand > 1)]
    faults = len(advice)
    rules = {one.policy for one in advice if one.policy}
    advice += [one for one in _other(found, ranges, narrow) if one.policy not in rules]
    history = found.scale_history or (f"{by_hand:,g}, by which the training multiplies its loss itself" if by_hand > 1 else "")
    sentence = _sentence(counts, state, narrow, advice[:faults], history)
    instead = {}
    if narrow == HALF and state == "O1":
        off = _set("GradScaler", enabled=False) if scale else ""
        instead[BRAIN] = "\n".join(filter(None, (_set("autocast", dtype=BRAIN), off)))
    if ranges.first_scale and scale:
        kept = _set("GradScaler", init_scale=ranges.first_scale, growth_factor=1.0, backoff_factor=1.0)
        instead["static"] = "\n".join(filter(None, (_together(wide), kept)))
    ran = ran_under(given)
    instead = {name: over(rules, ran) for name, rules in instead.items()}
    return Amp(sentence, state, narrow, modules, scale, history, ranges.first_scale, tuple(advice), faults, instead, ran)


def ran_under(capture: Capture) -> str:
    """Return the text of the policy that a run was made under; empty: none, or none that can be read (a manifest is foreign)."""
    said = capture.root.get("policy")
    text = said.get("text") if isinstance(said, dict) else None
    try:
        return parse(text, "policy").text if isinstance(text, str) and len(text) <= toml.LARGEST else ""
    except TrueupError:
        return ""


def _modules(held: Held, counts: Census) -> tuple[Module, ...]:
    """Return modules that hold weights or make products, in order of their names."""
    products: dict[str, Counter[str]] = defaultdict(Counter)
    for one in counts.products:
        products[one.scope][one.dtype] += one.calls
    found = []
    for scope in sorted({*products, *held}):
        weights = sorted({str(value) for name, value in held.get(scope, {}).items() if name.endswith(".dtype")})
        computes = [dtype for dtype, _ in products[scope].most_common()]
        if not weights and not computes:
            continue
        half = [dtype for dtype in computes if dtype in (HALF, BRAIN)]
        kind = "O2" if {HALF, BRAIN} & set(weights) else "O1" if half else "wide"
        found.append(Module(scope, kind, ", ".join(weights), ", ".join(computes)))
    return tuple(found)


def _state(counts: Census, modules: tuple[Module, ...], narrow: str) -> str:
    if not counts.products:
        return ""
    if not narrow:
        return "off"
    kinds = {one.kind for one in modules if one.weights}
    if "O2" not in kinds:
        return "O1"
    return "O2" if "wide" in kinds else "narrow throughout"


class _Ranges:
    """Magnitudes of a run: modules that compute delicate functions in float16, and the largest gradient without the scale; beside
    them, ``counts`` of its products."""

    def __init__(
        self, capture: Capture, step: Steps, rank: Steps, held: Held, scales: dict[int, float], by_hand: float
    ) -> None:  # fmt: skip
        self.delicate: dict[str, tuple[str, float]] = {}  # module -> function and largest input
        self.beyond: dict[str, float] = {}  # module -> largest result in a wide dtype that float16 does not hold
        self.narrow_gradients: dict[int, float] = {}  # step -> largest finite gradient of a call, without the scale
        self.wide_gradients: dict[int, float] = {}  # likewise of calls without half precision
        self.unknown: set[int] = set()  # steps in which a gradient in half precision is not finite
        classes = {scope: str(module.get("class", "")) for scope, module in held.items()}
        asked = list(parts(capture, step, rank))
        counting, weights = Counting(capture, finest(capture, asked, LEVELS)), Counter[str]()
        for of, at in asked:
            every = calls(capture, of, at, lambda _, __: True, ("max", "min", *NOT_FINITE), LEVELS)
            counting.add(of, at, every)
            for call in every:
                if (of, at) == asked[0]:
                    kinds = [row["dtype"] for name, row in call.slots.items() if name.startswith("param.") and row["dtype"]]
                    weights.update(dtype for dtype in kinds if family(dtype) == "float")
                if call.phase in ("forward", "recompute"):
                    self._forward(call, classes)
                elif call.phase == "backward":
                    self._backward(call, at, scales.get(at, by_hand))
        self.counts = counting.census(weights)

    def _forward(self, call: Found, classes: dict[str, str]) -> None:
        made = [row for row in call.made if row["dtype"] in (HALF, *WIDE)]
        if not made:
            return
        in_half = made[0]["dtype"] == HALF
        wide_weights = any(name.startswith(("param.", "input.")) and row["dtype"] in WIDE for name, row in call.slots.items())
        if in_half and not wide_weights and call.scope and call.level == "api" and DELICATE.search(call.op):
            self.delicate.setdefault(call.scope, (call.op, _largest_of(call)))
        elif in_half and not wide_weights and call.level == "module" and NORM.search(classes.get(call.scope, "")):
            self.delicate.setdefault(call.scope, (classes[call.scope], _largest_of(call)))
        elif not in_half and call.level == "module" and call.scope:
            largest = max(map(_largest, made))
            if math.isfinite(largest) and largest > LARGEST:
                self.beyond[call.scope] = max(self.beyond.get(call.scope, 0.0), largest)

    def _backward(self, call: Found, step: int, scale: float) -> None:
        """Keep the largest gradient of a step: of those in half precision, or where one of them is not finite, of all."""
        half = any(row["dtype"] in (HALF, BRAIN) for row in call.slots.values())
        for row in call.made:
            if row["dtype"] not in (HALF, BRAIN, *WIDE):
                continue
            largest = _largest(row) / (scale or 1.0)
            if half and (not math.isfinite(largest) or any(row[name] for name in NOT_FINITE)):
                self.unknown.add(step)
            if math.isfinite(largest):
                into = self.narrow_gradients if half else self.wide_gradients
                into[step] = max(into.get(step, 0.0), largest)

    @property
    def gradients(self) -> dict[int, float]:
        """Return the largest finite gradient of each step that the loss scale has to keep in range. What is wide throughout, as in
        a module that a policy keeps wide, is none; it tells of a step whose gradients in half precision are not finite."""
        steps = self.narrow_gradients.keys() | (self.wide_gradients.keys() & self.unknown)
        every = self.narrow_gradients, {step: size for step, size in self.wide_gradients.items() if step in self.unknown}
        return {step: max(of.get(step, 0.0) for of in every) for step in sorted(steps)}

    @property
    def first_scale(self) -> float:
        """Return the largest power of two that leaves room for growth above the largest gradient; 0 where none is known."""
        largest = max(self.gradients.values(), default=0.0)
        return min(2.0 ** math.floor(math.log2(LARGEST / ROOM / largest)), MOST_SCALE) if largest > 0 else 0.0

    @property
    def steady(self) -> bool:
        """Tell whether gradients are of one size in all steps, of which there are several."""
        some = [one for one in self.gradients.values() if one > 0]
        return len(some) > 2 and max(some) <= STEADY * min(some)


def _largest_of(call: Found) -> float:
    return max((_largest(row) for row in call.given), default=math.nan)


def _largest(row: dict[str, Any]) -> float:
    """Return the largest finite magnitude of a slot, NaN where it has no statistics."""
    known = [abs(float(row[name])) for name in ("min", "max") if row[name] is not None]
    return max(known, default=math.nan)


def _stay_wide(found: OverflowResult, ranges: _Ranges) -> list[Advice]:
    """Advise on modules that made Inf or NaN in a narrow dtype, and on delicate functions in float16."""
    advice: dict[str, Advice] = {}
    for one in found.anomalies:
        if one.policy and one.matters != "harmless" and one.place.seq >= 0:
            name = one.place.scope or one.place.op
            rule = wider_module(one.place.scope) if one.place.scope in ranges.delicate else one.policy
            advice.setdefault(name, Advice(f"{name} has to stay wide", one.sentence.splitlines()[0], rule))
    for scope, (op, largest) in ranges.delicate.items():
        reaches = "" if math.isnan(largest) else f", and its input reaches {number(largest)}"
        why = f"{op} computes in float16, which autocast keeps in float32{reaches}"
        advice.setdefault(scope, Advice(f"{scope} has to stay wide", why, wider_module(scope)))
    return list(advice.values())


def _by_hand(capture: Capture, step: Steps, rank: Steps) -> float:
    """Return by which number a run multiplies its loss itself, as apex and scripts of old do; 1 where it does not."""
    of, at = next(parts(capture, step, rank))
    return max((times for done, times in loss_factors(stream_of(capture, of, at)) if done == "multiplied"), default=1.0)


def _scaling(manifest: Mapping[str, Any], found: OverflowResult, ranges: _Ranges, narrow: str, *, scaled: bool) -> list[Advice]:
    """Advise on a loss scale that is not there (``scaled``: by hand it is), that collapsed, or that no gradient needs."""
    trains = bool(ranges.gradients)
    kind = "static will do, for gradients are of one size in all steps" if ranges.steady else "dynamic (torch.amp.GradScaler)"
    if narrow == HALF and trains and not scales_loss(manifest) and not found.scale and not scaled:
        first = f"first scale {number(ranges.first_scale)}" if ranges.first_scale else "first scale 65536"
        return [Advice("a loss scale is missing", f"gradients in float16 below {FLUSHED:.1e} become zero; {first}, {kind}")]
    collapsed = any(one.kind == "loss_scale" for one in found.anomalies) or _collapsed([one.scale for one in found.scale], found)
    if collapsed:
        first = f"after that start at {number(ranges.first_scale)}, {kind}" if ranges.first_scale else "then start anew"
        why = f"{found.scale_history}: a smaller scale does not help what overflows by itself; {first}"
        rule = _set("GradScaler", init_scale=ranges.first_scale) if ranges.first_scale and found.scale else ""
        return [Advice(COLLAPSED, why, rule)]
    return []


def _collapsed(scales: list[float], found: OverflowResult) -> bool:
    """Tell whether every step of three or more was skipped, or a scale fell to 1."""
    skipped = [one.skipped for one in found.scale]
    return len(scales) > 2 and (all(skipped) or (scales[-1] <= 1.0 < scales[0]))


def _other(found: OverflowResult, ranges: _Ranges, narrow: str) -> list[Advice]:
    """Name what may be better, and is no fault: another dtype, and the scale that the gradients allow."""
    advice = []
    origins = {one.place.scope for one in found.anomalies if one.policy and one.place.scope} | set(ranges.beyond)
    if narrow == HALF and len(origins) >= MANY:
        rules = "\n".join(wider_module(scope, BRAIN) for scope in sorted(origins))
        left = f"{counted(len(origins), 'module')} leave float16's range ({LARGEST:,.0f})"
        why = f"{left}; bfloat16 has float32's, and needs no loss scale"
        advice.append(Advice("bfloat16 in place of float16", why, rules))
    if narrow == HALF and ranges.first_scale and found.scale:
        kind = "static or dynamic" if ranges.steady else "dynamic"
        why = f"{ROOM:.0f} times below what the largest gradient allows; {kind}"
        rule = _set("GradScaler", init_scale=ranges.first_scale)
        advice.append(Advice(f"a first scale of {number(ranges.first_scale)}", why, rule))
    return advice


def _sentence(counts: Census, state: str, narrow: str, faults: list[Advice], history: str) -> str:
    if not state or state == "off":
        return counts.sentence
    wide = [one.what.removesuffix(" has to stay wide") for one in faults if one.what.endswith("stay wide")]
    said = [f"mixed precision is on: {state} in {narrow}"]
    if wide:
        more = f" and {len(wide) - 3} more" if len(wide) > 3 else ""
        verb = "has" if len(wide) == 1 else "have"
        said.append(f"{counted(len(wide), 'module')} {verb} to stay wide: {', '.join(wide[:3])}{more}")
    said += [one.what for one in faults if not one.what.endswith("stay wide")]
    if history:
        said.append(f"loss scale {history}")
    if not faults:
        said.append("nothing is wrong with it")
    return clean("; ".join(said))
