"""Causes before calls: which settings that differ explain which culprits, and what the calls show where no setting does.

Which calls a setting reaches, `reaching` tells. A call that was given the same and returned something else stays a culprit of its
own, whatever is set differently around it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trueup.comparison.normalise.updates import STEP
from trueup.comparison.result.reaching import (
    FLOAT32,
    ROUNDINGS,
    SIZES,
    changed_axes,
    changed_numbers,
    draws,
    is_of_order,
    is_seed,
    lacks_tensor,
    rank,
    reaching_of,
    values_of,
)  # fmt: skip
from trueup.foundation.facts.operators import normalised
from trueup.foundation.facts.slots import UNIT_ROUNDOFF, is_output
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.frameworks.trees import AUTOCAST, TIED
from trueup.foundation.model import Finding, TensorStats
from trueup.foundation.settings import ABSENT, OF_PARAMETERS, Setting, differing, modules_of
from trueup.foundation.words.reasons import in_words
from trueup.foundation.words.sentence import changed_arguments, given_number, named_argument
from trueup.foundation.words.setup_sentence import settings_text
from trueup.foundation.words.wording import one_line

SCALES = 2.0**-20
"""How far a loss may be from a multiple of another one, relative to it: a few roundings in float32."""

WHOLE = 0.25
"""How far a multiple may be from a whole number at most: any number is within half of one."""

NEAR = 0.01
"""How much further it may be where the loss is already off by that much for another reason; a multiple is a whole number still."""

LOSS = "the loss "
"""How causes begin that say what became of a loss."""

CASTING = ("dtype", AUTOCAST)
"""Settings that say in which dtype a model computes."""
CASTS = ("to", "_to_copy", "cast", "Cast", "convert_element_type")


LESS = (Why.RUNS_ALONE, Why.RUNS_INSTEAD, Why.MADE_ALONE, Why.READS, Why.READS_OTHER, Why.NO_GRADIENT, Why.NOT_UPDATED)
"""What a culprit shows that says less of its cause than all else that may be known."""

Place = tuple[int, int, tuple[int, int]]  # rank, step, and execution numbers of a call in the two runs


def place(finding: Finding) -> Place:
    """Return where the call of a finding stands."""
    return finding.rank, finding.step, finding.seq


@dataclass(frozen=True)
class Seen:
    """What the runs show that no setting tells."""

    shown: Mapping[Place, Reason] = field(default_factory=dict)  # what culprits show of their cause by themselves
    begun: Callable[[Finding], str] = lambda _: ""  # says of a culprit which initial weights and batches differ
    weights: str = ""  # which initial weights differ
    dtypes: Reason | None = None  # dtype in which the candidate computes and the baseline does not
    casting: str = ""  # which settings make it do so
    passes: str = ""  # that one run goes backward more often in a step
    counts: tuple[int, int] | None = None  # how often each does, in the first step in which they differ
    last: int | None = None  # the last step of both
    factors: frozenset[float] = frozenset()  # these numbers
    scaled: str = ""  # by which numbers the loss is multiplied or divided in one run only
    reduced: str = ""  # that the loss is a mean in one run, a sum in the other
    losses: frozenset[str] = frozenset()  # operators that make the loss in one run alone
    times: float = 1.0  # how many times as large the candidate's loss is by these
    grown: Mapping[int, float] = field(default_factory=dict)  # by step, how many times as large the recorded one is
    unlike: frozenset[str] = frozenset()  # names of the initial weights that differ
    lacking: str = ""  # which tensor one run alone gives a call of both
    defined: str = ""  # what two frameworks define in other ways in the optimizers


@dataclasses.dataclass(frozen=True, slots=True)
class _Whole:
    """What holds for all culprits of a comparison together."""

    seen: Seen
    settings: list[Setting]
    told: list[Setting]  # to the scripts
    own_names: list[Setting]  # attributes as their user named them
    named: Mapping[str, str]  # arguments that differ, by operator
    varying: set[tuple[Any, ...]]
    classes: Mapping[str, Mapping[str, Any]]
    drawn: Reason | None  # why other numbers were drawn
    loading: Finding | None  # the first draw of an order of samples
    disturbed: bool  # whether something draws outside of models
    batches: list[Any]

    @classmethod
    def of(
        cls, culprits: Sequence[Finding], baseline: Mapping[str, Any], candidate: Mapping[str, Any], seen: Seen
    ) -> _Whole:  # fmt: skip
        """Gather it."""
        found = differing(baseline, candidate, seen.last)
        told = [one for one in found if one.group == "argument" and one.severity != "cannot"]
        own_names = [one for one in found if (one.group, one.severity) == ("module", "may")]
        settings = [one for one in found if one.severity == "changes" and one.name not in CASTING]  # dtypes: `Seen` has them
        settings += told + own_names
        drawn = next((reason for one in culprits if _is_drawn(reason := seen.shown.get(place(one)))), None)
        return cls(
            seen, settings, told, own_names, {one.op: said for one in culprits if (said := named_argument(one))},
            _varying(culprits), modules_of(candidate), drawn,
            next((one for one in culprits if draws(one) and any(map(_shuffles, reaching_of(settings, one)))), None),
            drawn is not None and any(draws(one) and not one.scope for one in culprits),
            [_batches(manifest) for manifest in (baseline, candidate)],
        )  # fmt: skip

    def reaching(self, finding: Finding, own: Reason | None, shown: Sequence[Setting]) -> list[Setting]:
        """Return the settings that explain a culprit; ``own``: what shows of its cause, ``shown``: those of culprits before it."""
        seen, settings = self.seen, self.settings
        reaching = reaching_of(settings, finding)
        if _is_before(finding, self.loading):  # no order of samples matters yet
            reaching = [one for one in reaching if not is_of_order(one)]
        if not reaching and _counts(finding, self.batches):
            reaching = [one for one in settings if one.group == "data" and not is_of_order(one)]
        if own is not None and finding.op != STEP:  # gradients, before the optimizer has them
            reaching = [one for one in reaching if one.group != "optimizer"]
        if own is not None and own.why is Why.CLIPPED_ALONE:  # by a function that is known, or by hand
            reaching = [one for one in settings if (one.group, one.name) == ("optimizer", "clipping")] or reaching
        if not reaching and seen.factors and finding.kind == "region" and not finding.scope:
            scaling = [one for one in self.told if not seen.factors.isdisjoint(_shares(one))]
            reaching = scaling if len(scaling) == 1 else []
        if any(one.step is not None for one in reaching):  # a schedule may go by the number of batches
            reaching += [one for one in settings if one.group == "data" and not is_of_order(one)]
        built = [one for one in settings if _builds(one)] if own is not None and _is_initial(own) else []
        reaching = built or reaching
        if not (reaching or own) and _begins(finding, seen):
            reaching = _tying(settings, seen)
        if not (reaching or own or named_argument(finding)) and (seen.begun(finding) or _given_by(finding) in self.varying):
            drew = [one for one in self.told if is_seed(one) and one in shown]  # an order of samples
            reaching = [one for one in settings if one.group == "seed"] or drew  # what draws may be given its seed as a tensor
        other = reaching or own or named_argument(finding) or _dtype(finding, seen) or _begins(finding, seen)
        if not other and seen.passes:
            reaching = [one for one in settings if one.group == "data" and not is_of_order(one)]  # and makes more batches, or fewer
        return reaching

    def passed_to(self, region: Finding) -> str:
        """Return what says that another call is passed to a region: it is made by a call of one run, in the first step alone."""
        alone = self.seen.shown.get(place(region)) is not None  # a module around it may lack a tensor, as another of its class does
        around = self.named.get(str(self.classes.get(region.scope, {}).get("class")), "") if alone else ""
        lacking = self.seen.lacking if f" of {one_line(region.op)}: " in self.seen.lacking else ""
        return self.named.get(region.op) or around or lacking


def with_causes(
    culprits: Sequence[Finding], baseline: Mapping[str, Any], candidate: Mapping[str, Any], seen: Seen = Seen()
) -> tuple[list[Finding], list[Setting]]:
    """Say of culprits, in their order, which settings explain them or what shows of their cause; those with one cause become one.
    ``baseline`` and ``candidate`` are manifests of a rank, ``seen`` is what both runs as a whole show. Return the culprits that
    are left, and the settings that change numbers and that no culprit shows."""
    whole = _Whole.of(culprits, baseline, candidate, seen)
    settings, drawn = whole.settings, whole.drawn
    kept: list[Finding] = []
    by_cause: dict[str, int] = {}
    shown: list[Setting] = []
    for finding in culprits:
        own = seen.shown.get(place(finding)) or (drawn if draws(finding) else None)
        own = None if own is not None and own.why in LESS else own  # less than all else that may be known
        reaching = whole.reaching(finding, own, shown)
        shown += [one for one in reaching if one not in shown]
        known = reaching or own or named_argument(finding) or finding.kind == "region"  # which may be what draws
        begun = seen.begun(finding) if whole.disturbed and not known else ""
        follows = "" if begun in by_cause else begun
        cause = f"{in_words(drawn)}; {follows}" if follows else _cause(reaching, finding, own, seen)
        making = [] if reaching else _of_loss(settings, finding, cause, seen)
        if len(making) == 1:  # how a loss is made, its own setting tells
            reaching, cause = making, settings_text(making)
            shown += making
        if not cause and finding.kind == "region":
            cause = whole.passed_to(finding)
        seeds = bool(reaching) and is_seed(reaching[0])  # then what begins otherwise follows from them
        key = settings_text(reaching) if seeds else in_words(drawn) if follows else cause
        same = by_cause.get(key, _follows(kept, finding, own, cause))
        if seen.passes and reaching and reaching[0].group == "argument" and values_of(reaching[0]) == seen.counts:
            cause = f"{seen.passes}; {cause}"  # that many micro-batches were asked for
            same = next((at for at, one in enumerate(kept) if one.cause.startswith(seen.passes)), same)
        if same is None:
            by_cause |= {key: len(kept)} if cause else {}
            kept.append(dataclasses.replace(finding, cause=cause))
        else:
            longer = cause if key != cause and len(cause) > len(kept[same].cause) else kept[same].cause
            kept[same] = dataclasses.replace(_alike(kept[same], finding), cause=longer)
    asked = any(not one.cause for one in kept)  # then what the scripts were told may say more than the call does
    left = [one for one in settings if one not in [*shown, *whole.own_names] and (asked or one.severity == "changes")]
    if len(left) != 1:  # else that stands in the first line
        shows = [one.cause or in_words(seen.shown.get(place(one))) or given_number(one) for one in kept]
        kept = _of_one_line([dataclasses.replace(one, cause=cause) for one, cause in zip(kept, shows, strict=True)])
    return kept, sorted(left, key=lambda one: (one.severity != "changes", rank(one)))


def _of_loss(settings: Sequence[Setting], finding: Finding, cause: str, seen: Seen) -> list[Setting]:
    """Return the settings that may have made a loss another one: which sum it is of one that was multiplied; where one run alone
    makes it so, those of a loss that is no layer, and so known by its class."""
    if cause.startswith(LOSS):
        return [one for one in settings if one.name == "reduction"]
    making = finding.kind == "region" and not finding.scope and one_line(finding.op) in seen.losses
    return [one for one in settings if one.group == "module" and one.places == (one.kind,)] if making else []


def _begins(finding: Finding, seen: Seen) -> bool:
    """Tell whether a culprit stands where weights are made, which differ before anything is trained."""
    return bool(seen.weights) and seen.begun(finding).startswith(seen.weights)


def _alike(first: Finding, finding: Finding) -> Finding:
    """Return a finding with a further one that has the same cause."""
    names = tuple(dict.fromkeys((*first.alike_in, finding.name, *finding.alike_in)))
    return dataclasses.replace(first, alike=first.alike + 1 + finding.alike, alike_in=names)


def _of_one_line(kept: Sequence[Finding]) -> list[Finding]:
    """Join calls of one line of the user's that were given other arguments: ``ema.mul_(decay).add_(new, alpha=1 - decay)``. What
    one run alone executes is one finding with its backward."""
    found: dict[object, Finding] = {}
    for one in kept:
        joins = one.kind == "argument" and one.source and (given_number(one) or one.because)
        key: object = (one.rank, one.source) if joins else id(one)
        key = one.cause if one.kind == "region" and one.cause else key
        back = next((known for known, first in found.items() if _is_backward_of(one, first)), None)
        key = key if back is None else back
        first = found.get(key)
        causes = () if first is None else dict.fromkeys((first.cause, one.cause if back is None else ""))
        found[key] = one if first is None else dataclasses.replace(_alike(first, one), cause="; ".join(filter(None, causes)))
    return list(found.values())


def _shares(setting: Setting) -> set[float]:
    """Return what a loss may be multiplied or divided by for a setting's sake: its numbers, and what they leave of one."""
    held = [float(one) for one in values_of(setting) if isinstance(one, (int, float)) and not isinstance(one, bool)]
    return {n for one in held for n in (one, 1 - one)} - {0.0, 1.0}


def _is_before(finding: Finding, loading: Finding | None) -> bool:
    """Tell whether a call reads numbers of the host's before a data loader has drawn an order of samples (``loading``)."""
    if loading is None or finding.kind not in ("input", "argument") or (finding.rank, finding.step) != (loading.rank, loading.step):
        return False
    return all(0 <= seq < drawn for seq, drawn in zip(finding.seq, loading.seq, strict=True))


def _batches(manifest: Mapping[str, Any]) -> set[int]:
    """Return how many batches the data loaders of a run have."""
    found = set()
    held = manifest.get("settings")
    for loader in held.get("data", ()) if isinstance(held, Mapping) else ():
        samples, size = loader.get("samples"), loader.get("batch_size")
        if isinstance(samples, int) and isinstance(size, int) and size > 0:
            found.add(samples // size if loader.get("drop_last") else -(-samples // size))
    return found


def _counts(finding: Finding, batches: Sequence[set[int]]) -> bool:
    """Tell whether a call reads, in each run, the number of its batches."""
    slot = finding.slots[0] if finding.kind == "input" and finding.slots else None
    sides = () if slot is None else zip((slot.baseline, slot.candidate), batches, strict=True)
    read = [isinstance(side, TensorStats) and side.numel == 1 and side.mean in counted for side, counted in sides]
    return bool(read) and all(read)


def _given_by(finding: Finding) -> tuple[Any, ...]:
    return finding.rank, finding.source, finding.op


def _varying(culprits: Sequence[Finding]) -> set[tuple[Any, ...]]:
    """Return the lines of the user's that give an operator another number from call to call in the baseline: no constant of the
    script, but drawn on the host."""
    found: dict[tuple[Any, ...], set[str]] = {}
    for one in culprits:
        if given_number(one):
            given = [before for slot in one.slots if slot.slot == "arguments" for _, before, _ in changed_arguments(slot)]
            found.setdefault(_given_by(one), set()).add(str(given))
    return {place for place, given in found.items() if len(given) > 1}


def _is_initial(reason: Reason) -> bool:
    """Tell whether one run alone draws into a tensor outside of modules, as weights are drawn where a module is built."""
    return _is_drawn(reason) and not reason.facts[0].scope and reason.facts[0].op.endswith("_")


def _builds(setting: Setting) -> bool:
    """Tell whether a setting decides which parameters a module has, and so what is drawn where it is built."""
    there = setting.name.endswith(OF_PARAMETERS[0]) and ABSENT in (setting.baseline, setting.candidate)
    return setting.group == "module" and (there or setting.name == "class" or setting.name in SIZES)


def _tying(settings: Sequence[Setting], seen: Seen) -> list[Setting]:
    """Return the settings that tie all weights which begin otherwise, in one run alone; none where one is not tied."""
    ties = [one for one in settings if one.name.endswith(TIED)]
    tied = {f"{scope}.{one.name.removesuffix(TIED)}".removeprefix("."): one for one in ties for scope in one.places}
    return list(dict.fromkeys(tied[name] for name in sorted(seen.unlike))) if seen.unlike <= tied.keys() else []


def _is_drawn(reason: Reason | None) -> bool:
    return reason is not None and reason.why is Why.DRAWN_ALONE


def _cause(reaching: Sequence[Setting], finding: Finding, own: Reason | None, seen: Seen) -> str:
    """Return the cause in words: settings, and where none explains the culprit what shows; ``own``: by itself."""
    group = reaching[0].group if reaching else ""
    said = [settings_text(reaching)]
    if group == "data":
        said = [seen.passes, _in_another_order(reaching, finding) + said[0]]
    elif group in ("seed", "argument") and is_seed(reaching[0]) and not draws(finding):
        said.append(seen.begun(finding))
    elif group == "optimizer" and finding.op == STEP and all(one.name not in ("class", "clipping") for one in reaching):
        said.append(in_words(own))  # what was done to gradients before it was done beside
    elif not group:
        found = in_words(own) or _dtype(finding, seen) or named_argument(finding)
        found = found or (seen.weights if seen.passes and _begins(finding, seen) else "")
        found = found or (f"look at how it is defined: {seen.defined}" if seen.defined and finding.op == STEP else "")
        said = [found or seen.passes or _scaled(finding, seen) or ("" if given_number(finding) else seen.begun(finding))]
        if _is_drawn(own):  # what drew them may have been the first weights
            said.insert(0, seen.weights)
    return "; ".join(filter(None, said))


def _in_another_order(reaching: Sequence[Setting], finding: Finding) -> str:
    if any(map(is_of_order, reaching)):
        return f"batches in another order from step {finding.step}: "
    return ""


def _shuffles(setting: Setting) -> bool:
    return setting.group == "data" and is_of_order(setting)


def _follows(kept: Sequence[Finding], finding: Finding, own: Reason | None, cause: str) -> int | None:
    """Return the culprit with a cause that a further one only follows. What draws random numbers follows from what drew some in
    one run alone; another argument of an operator from that of the function around it, or of another operator inside that, and
    the same one as the operator has it (1 for ``mean``); a module, in a later step, from one inside that lacks a tensor; a
    number from the lengths of axes of which it is computed."""
    drawer = normalised(own.facts[0].op) if own is not None and _is_drawn(own) and draws(finding) else None
    for at, one in enumerate(kept):
        drawn = drawer == normalised(one.op)
        beside = finding.api == one.api is not None and finding.source == one.source
        inside = finding.kind == "argument" and (finding.api == one.op or beside)
        inside = inside and (not cause or cause.partition(": ")[0] == one.cause.partition(": ")[0])
        told = own is not None or cause != ""
        inside = inside or _is_backward_of(finding, one)
        follows = _is_around(finding, one) or _is_computed(finding, one) or _is_of_other_weights(finding, one)
        follows = follows or _is_resized_before(finding, one)
        if one.cause and (drawn or inside or (not told and follows)):
            return at
    return None


def _is_backward_of(finding: Finding, one: Finding) -> bool:
    """Tell whether a call goes back through another one of the same line, and was given another argument as that was, or is run by
    one side alone as that is; or through the very function that was given another argument, which nothing but that tells it."""
    if finding.phase != "backward" or one.phase != "forward" or finding.source is None or finding.source != one.source:
        return False
    if finding.kind == "operator" and one.kind == "argument":
        return not {finding.op, finding.api}.isdisjoint({one.op, one.api} - {None})
    if (finding.rank, finding.kind) != (one.rank, one.kind):
        return False
    if finding.kind == "argument":
        return bool(changed_numbers(finding)) and changed_numbers(finding) == changed_numbers(one)
    return finding.kind == "region" and [seq < 0 for seq in finding.seq] == [seq < 0 for seq in one.seq]


def _is_around(finding: Finding, inner: Finding) -> bool:
    """Tell whether a module gives something else in a later step and a module inside it is given a tensor in one run alone."""
    within = inner.scope != finding.scope and f"{inner.scope}.".startswith(f"{finding.scope}." if finding.scope else "")
    later = finding.step > inner.step and (finding.rank, finding.phase) == (inner.rank, inner.phase)
    return finding.kind == "operator" and finding.level == "module" and later and within and lacks_tensor(inner)


def _is_of_other_weights(finding: Finding, drawn: Finding) -> bool:
    """Tell whether a model as a whole returns something else and weights were drawn before in another shape: it holds them."""
    outermost = finding.kind == "operator" and finding.level == "module" and not finding.scope and finding.rank == drawn.rank
    return outermost and draws(drawn) and not drawn.scope and any(slot.shape[0] != slot.shape[1] for slot in drawn.slots)


def _is_resized_before(finding: Finding, one: Finding) -> bool:
    """Tell whether a call draws other random numbers after another one of the step made another shape: what drew in that shape in
    between took more of the generator's numbers, or fewer."""
    resized = any(is_output(slot.slot) and slot.shape[0] != slot.shape[1] for slot in one.slots)
    before = (one.rank, one.step) == (finding.rank, finding.step) and one.seq < finding.seq
    return finding.kind == "random" and resized and before


FORMS: tuple[Callable[[float], float], ...] = (lambda n: 1 / n, lambda n: n**0.5, lambda n: n**-0.5)
"""What is computed of the length of an axis: a mean's factor, and what attention divides its scores by."""


def _is_computed(finding: Finding, other: Finding) -> bool:
    """Tell whether the numbers that a call was given are computed, in both runs by one formula, of lengths that another call of the
    same module was given or made."""
    if finding.kind != "argument" or (finding.rank, finding.scope, finding.phase) != (other.rank, other.scope, other.phase):
        return False
    numbers = changed_numbers(finding)
    lengths = [pair for pair in changed_numbers(other) + changed_axes(other.slots) if min(pair) >= 1]
    made = [[form(n) for n in pair] for form in FORMS for pair in lengths]
    return bool(numbers) and all(any(map(partial(_agree, pair), made)) for pair in numbers)


def _agree(numbers: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(one, other, rel_tol=FLOAT32) for one, other in zip(numbers, others, strict=True))


def _dtype(finding: Finding, seen: Seen) -> str:
    """Return in which dtype the candidate computes, of a culprit that has another one or casts, and is off by rounding to it."""
    if seen.dtypes is None:
        return ""
    pairs = [slot.dtype for slot in finding.slots if all(slot.dtype) and slot.slot != "arguments"]
    casts = normalised(finding.op).rpartition(".")[2] in CASTS
    if not casts and all(first == second for first, second in pairs):
        return ""
    coarsest = max((UNIT_ROUNDOFF.get(name, 0.0) for pair in pairs for name in pair), default=0.0)
    coarsest = max([coarsest, *(UNIT_ROUNDOFF[seen.dtypes.facts[n]] for n in (0, -1))])
    drawn = finding.kind == "random" or _only_casts(seen.shown.get(place(finding)))  # in another dtype other numbers are drawn
    near = finding.error_out <= ROUNDINGS * coarsest or (finding.kind == "argument" and _rounded(finding, coarsest))
    return "; ".join(filter(None, (in_words(seen.dtypes), seen.casting))) if drawn or near else ""


def _only_casts(reason: Reason | None) -> bool:
    """Tell whether all that one run does beside the other is casting."""
    ops = reason.facts[1] if reason is not None and reason.why is Why.RUNS_ALONE else ()
    return bool(ops) and all(normalised(str(op)).rpartition(".")[2] in CASTS for op in ops)


def _rounded(finding: Finding, roundoff: float) -> bool:
    """Tell whether a call was given the same numbers, one of them rounded."""
    given = [sides for slot in finding.slots if slot.slot == "arguments" for _, *sides in changed_arguments(slot)]
    try:
        pairs = [(float(before), float(after)) for before, after in given]
    except ValueError:
        return False
    return bool(pairs) and all(abs(before - after) <= roundoff * abs(before) for before, after in pairs)


def _scaled(finding: Finding, seen: Seen) -> str:
    """Say of a single number that a call outside of modules makes, and that grew as the loss did, whether it is a multiple of the
    baseline's."""
    if finding.scope or finding.kind != "region":  # an operator of both runs that doubles a number is at fault itself
        return ""
    if seen.reduced and one_line(finding.op) in seen.reduced:
        return seen.reduced
    for slot in finding.slots:
        first, second = slot.baseline, slot.candidate
        if (
            is_output(slot.slot)
            and isinstance(first, TensorStats)
            and isinstance(second, TensorStats)
            and first.numel == 1 == second.numel
        ):
            what = "gradient of the loss" if slot.slot.startswith("grad") else "loss"
            times = second.mean / first.mean if first.mean and second.mean else 0.0
            off = SCALES + min(finding.error_in, NEAR)
            if seen.scaled and abs(times - seen.times) <= off * seen.times:
                return seen.scaled
            other = what == "loss" and abs(seen.grown.get(finding.step, times) - times) > NEAR * abs(times)
            for ratio, said in ((times, "{:,.0f} times"), (1 / times if times else 0.0, "1/{:,.0f} of")):
                if not other and round(ratio) > 1 and abs(ratio - round(ratio)) <= off * ratio < WHOLE:
                    return f"the {what} is {said.format(round(ratio))} the baseline's: {one_line(finding.op)}"
    return ""
