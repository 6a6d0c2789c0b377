"""Causes before calls: which settings that differ explain which culprits, and what the calls show where no setting does.

A setting explains a call that it reaches and that shows it: an optimizer's, the calls of an update that were given other numbers or
that only one run makes; a module's, such calls inside that module; a loader's or a seed's, what no module computed and what was
drawn. A call that was given the same and returned something else stays a culprit of its own, whatever is set differently around it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trueup.comparison.normalise.updates import STEP
from trueup.foundation.facts.criteria import is_product
from trueup.foundation.facts.operators import normalised
from trueup.foundation.facts.roundoff import UNIT_ROUNDOFF
from trueup.foundation.facts.slots import is_input, is_output
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.model import Finding, SlotComparison, TensorStats
from trueup.foundation.settings import ABSENT, OF_PARAMETERS, TIED, Setting, differing, modules_of
from trueup.foundation.words.reasons import in_words
from trueup.foundation.words.sentence import changed_arguments, given_number, named_argument
from trueup.foundation.words.setting_sentence import settings_text
from trueup.foundation.words.wording import one_line

FLOAT32 = 2.0**-24
"""Unit roundoff of float32 (IEEE 754)."""

ROUNDINGS = 8.0
"""Units of roundoff of the coarser dtype up to which another dtype explains an error: a few roundings in a row."""

SCALES = 2.0**-20
"""How far a loss may be from a multiple of another one, relative to it: a few roundings in float32."""

WHOLE = 0.25
"""How far a multiple may be from a whole number at most: any number is within half of one."""

NEAR = 0.01
"""How much further it may be where the loss is already off by that much for another reason; a multiple is a whole number still."""

LOSS = "the loss "
"""How causes begin that say what became of a loss."""

CASTS = ("to", "_to_copy", "cast", "Cast", "convert_element_type")
ORDERING = ("seed", "shuffle", "sampler")
"""Settings of a data loader that say in which order samples come; the others say how many batches there are, and how large."""
SIZES = frozenset(
    ("in_channels", "out_channels", "in_features", "out_features", "num_features", "num_embeddings", "embedding_dim", "hidden_size")
)
"""Settings of layers that are lengths of axes of their weights."""
PRECISIONS = re.compile(r"float32_matmul_precision|tensor_float_32|.*allow_(tf32|hf32|.*_reduction)|NVIDIA_TF32_OVERRIDE")
"""Switches that say how exactly products of float32 are computed: some processors obey, others do not."""

ORDER = ("data", "seed", "module", "optimizer", "argument", "switch")
"""Groups that explain calls, the surest first: what a script was told does where a call was given these very values."""


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
    passes: str = ""  # that one run goes backward more often in a step
    counts: tuple[int, int] | None = None  # how often each does, in the first step in which they differ
    last: int | None = None  # the last step of both
    factors: frozenset[float] = frozenset()  # these numbers
    scaled: str = ""  # by which numbers the loss is multiplied or divided in one run only
    reduced: str = ""  # that the loss is a mean in one run, a sum in the other
    losses: frozenset[str] = frozenset()  # operators that make the loss in one run alone
    times: float = 1.0  # how many times as large the candidate's loss is by these
    unlike: frozenset[str] = frozenset()  # names of the initial weights that differ


def with_causes(
    culprits: Sequence[Finding], baseline: Mapping[str, Any], candidate: Mapping[str, Any], seen: Seen = Seen()
) -> tuple[list[Finding], list[Setting]]:
    """Say of culprits, in their order, which settings explain them or what shows of their cause; those with one cause become one.
    ``baseline`` and ``candidate`` are manifests of a rank, ``seen`` is what both runs as a whole show. Return the culprits that
    are left, and the settings that change numbers and that no culprit shows."""
    found = differing(baseline, candidate, seen.last)
    told = [one for one in found if one.group == "argument" and one.severity != "cannot"]
    settings = [one for one in found if one.severity == "changes" and one.name != "dtype"] + told  # dtypes: `Seen` has them
    kept: list[Finding] = []
    by_cause: dict[str, int] = {}
    shown: list[Setting] = []
    named = {one.op: said for one in culprits if (said := named_argument(one))}
    varying, classes = _varying(culprits), modules_of(candidate)
    drawn = next((reason for one in culprits if _is_drawn(reason := seen.shown.get(place(one)))), None)
    loading = next((one for one in culprits if _draws(one) and any(map(_shuffles, _reaching(settings, one)))), None)
    batches = [_batches(manifest) for manifest in (baseline, candidate)]
    for finding in culprits:
        own = seen.shown.get(place(finding)) or (drawn if _draws(finding) else None)
        own = None if own is not None and own.why is Why.RUNS_ALONE else own  # less than all else that may be known
        reaching = _reaching(settings, finding)
        if _is_before(finding, loading):  # no order of samples matters yet
            reaching = [one for one in reaching if not _orders(one)]
        if not reaching and _counts(finding, batches):
            reaching = [one for one in settings if one.group == "data" and not _orders(one)]
        if own is not None and finding.op != STEP:  # gradients, before the optimizer has them
            reaching = [one for one in reaching if one.group != "optimizer"]
        if own is not None and own.why is Why.CLIPPED_ALONE:  # by a function that is known, or by hand
            reaching = [one for one in settings if (one.group, one.name) == ("optimizer", "clipping")] or reaching
        if not reaching and seen.factors and finding.kind == "region" and not finding.scope:
            scaling = [one for one in told if not seen.factors.isdisjoint(_shares(one))]
            reaching = scaling if len(scaling) == 1 else []
        if any(one.step is not None for one in reaching):  # a schedule may go by the number of batches
            reaching += [one for one in settings if one.group == "data" and not _orders(one)]
        built = [one for one in settings if _builds(one)] if own is not None and _is_initial(own) else []
        reaching = built or reaching
        if not (reaching or own) and _begins(finding, seen):
            reaching = _tying(settings, seen)
        if not (reaching or own or named_argument(finding)) and (seen.begun(finding) or _given_by(finding) in varying):
            reaching = [one for one in settings if one.group == "seed"]  # what draws may be given its seed as a tensor
        other = reaching or own or named_argument(finding) or _dtype(finding, seen) or _begins(finding, seen)
        if not other and seen.passes:
            reaching = [one for one in settings if one.group == "data" and not _orders(one)]  # which make another number of batches
        shown += [one for one in reaching if one not in shown]
        cause = _cause(reaching, finding, own, seen)
        making = [] if reaching else _of_loss(settings, finding, cause, seen)
        if len(making) == 1:  # how a loss is made, its own setting tells
            reaching, cause = making, settings_text(making)
            shown += making
        if not cause and finding.kind == "region":  # what is passed to it is made by a call of one run, in the first step alone
            alone = seen.shown.get(place(finding)) is not None  # a module around it may lack a tensor, as another of its class does
            around = named.get(str(classes.get(finding.scope, {}).get("class")), "") if alone else ""
            cause = named.get(finding.op) or around
        seeds = bool(reaching) and reaching[0].group == "seed"  # then what begins otherwise follows from them
        key = settings_text(reaching) if seeds else cause
        same = by_cause.get(key, _follows(kept, finding, own, cause))
        if seen.passes and reaching and reaching[0].group == "argument" and _values(reaching[0]) == seen.counts:
            cause = f"{seen.passes}; {cause}"  # that many micro-batches were asked for
            same = next((at for at, one in enumerate(kept) if one.cause.startswith(seen.passes)), same)
        if same is None:
            by_cause |= {key: len(kept)} if cause else {}
            kept.append(dataclasses.replace(finding, cause=cause))
        else:
            longer = cause if key != cause and len(cause) > len(kept[same].cause) else kept[same].cause
            kept[same] = dataclasses.replace(_alike(kept[same], finding), cause=longer)
    asked = any(not one.cause for one in kept)  # then what the scripts were told may say more than the call does
    left = [one for one in settings if one not in shown and (asked or one.severity == "changes")]
    if len(left) != 1:  # else that stands in the first line
        shows = [one.cause or in_words(seen.shown.get(place(one))) or given_number(one) for one in kept]
        kept = _of_one_line([dataclasses.replace(one, cause=cause) for one, cause in zip(kept, shows, strict=True)])
    return kept, sorted(left, key=lambda one: (one.severity != "changes", _rank(one)))


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
        key: object = (one.rank, one.source) if one.kind == "argument" and one.source and given_number(one) else id(one)
        key = one.cause if one.kind == "region" and one.cause else key
        back = next((known for known, first in found.items() if _is_backward_of(one, first)), None)
        key = key if back is None else back
        first = found.get(key)
        causes = () if first is None else dict.fromkeys((first.cause, one.cause if back is None else ""))
        found[key] = one if first is None else dataclasses.replace(_alike(first, one), cause="; ".join(filter(None, causes)))
    return list(found.values())


def _shares(setting: Setting) -> set[float]:
    """Return what a loss may be multiplied or divided by for a setting's sake: its numbers, and what they leave of one."""
    held = [float(one) for one in _values(setting) if isinstance(one, (int, float)) and not isinstance(one, bool)]
    return {n for one in held for n in (one, 1 - one)} - {0.0, 1.0}


def _values(setting: Setting) -> tuple[Any, Any]:
    return setting.baseline, setting.candidate


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


def _draws(finding: Finding) -> bool:
    return finding.kind == "random" or finding.rule.startswith("random")


def _is_drawn(reason: Reason | None) -> bool:
    return reason is not None and reason.why is Why.DRAWN_ALONE


def _rank(setting: Setting) -> int:
    return ORDER.index(setting.group) if setting.group in ORDER else len(ORDER)


def _reaching(settings: Sequence[Setting], finding: Finding) -> list[Setting]:
    """Return the settings of the surest group that explains a culprit."""
    found = [one for one in settings if one.group in ORDER and _explains(one, finding)]
    first = min(found, key=lambda one: (not (_draws(finding) and one.group == "seed"), _rank(one)), default=None)
    found = [one for one in found if first is not None and one.group == first.group]
    if found and found[0].group == "argument":
        return _became(settings, found[0]) if len(found) == 1 else []  # which of them it was nobody knows
    return found


def _became(settings: Sequence[Setting], told: Setting) -> list[Setting]:
    """Return the settings that what a script was told became: of the same two values, and of a name that the argument's ends with;
    the argument itself where there are none."""
    values = told.baseline, told.candidate
    same = [one for one in settings if one.group != "argument" and (one.baseline, one.candidate) == values]
    return [one for one in same if told.name.endswith(one.name.rpartition(".")[2])] or [told]


def _cause(reaching: Sequence[Setting], finding: Finding, own: Reason | None, seen: Seen) -> str:
    """Return the cause in words: settings, and where none explains the culprit what shows; ``own``: by itself."""
    group = reaching[0].group if reaching else ""
    said = [settings_text(reaching)]
    if group == "data":
        said = [seen.passes, _in_another_order(reaching, finding) + said[0]]
    elif group == "seed" and not _draws(finding):
        said.append(seen.begun(finding))
    elif group == "optimizer" and finding.op == STEP and all(one.name not in ("class", "clipping") for one in reaching):
        said.append(in_words(own))  # what was done to gradients before it was done beside
    elif not group:
        found = in_words(own) or _dtype(finding, seen) or named_argument(finding)
        found = found or (seen.weights if seen.passes and _begins(finding, seen) else "")
        said = [found or seen.passes or _scaled(finding, seen) or ("" if given_number(finding) else seen.begun(finding))]
        if _is_drawn(own):  # what drew them may have been the first weights
            said.insert(0, seen.weights)
    return "; ".join(filter(None, said))


def _in_another_order(reaching: Sequence[Setting], finding: Finding) -> str:
    if any(map(_orders, reaching)):
        return f"batches in another order from step {finding.step}: "
    return ""


def _shuffles(setting: Setting) -> bool:
    return setting.group == "data" and _orders(setting)


def _orders(setting: Setting) -> bool:
    return setting.name.rpartition(".")[2] in ORDERING


def _follows(kept: Sequence[Finding], finding: Finding, own: Reason | None, cause: str) -> int | None:
    """Return the culprit with a cause that a further one only follows. What draws random numbers follows from what drew some in
    one run alone; another argument of an operator from that of the function around it, or of another operator inside that, and
    the same one as the operator has it (1 for ``mean``); a module, in a later step, from one inside that lacks a tensor; a
    number from the lengths of axes of which it is computed."""
    drawer = normalised(own.facts[0].op) if own is not None and _is_drawn(own) and _draws(finding) else None
    for at, one in enumerate(kept):
        drawn = drawer == normalised(one.op)
        beside = finding.api == one.api is not None and finding.source == one.source
        inside = finding.kind == "argument" and (finding.api == one.op or beside)
        inside = inside and (not cause or cause.partition(": ")[0] == one.cause.partition(": ")[0])
        told = own is not None or cause != ""
        inside = inside or _is_backward_of(finding, one)
        follows = _is_around(finding, one) or _is_computed(finding, one) or _is_of_other_weights(finding, one)
        if one.cause and (drawn or inside or (not told and follows)):
            return at
    return None


def _is_backward_of(finding: Finding, one: Finding) -> bool:
    """Tell whether a call goes back through another one of the same line, and was given another argument as that was, or is run by
    one side alone as that is."""
    if finding.phase != "backward" or one.phase != "forward" or finding.source is None:
        return False
    if (finding.rank, finding.source, finding.kind) != (one.rank, one.source, one.kind):
        return False
    if finding.kind == "argument":
        return bool(_changed(finding)) and _changed(finding) == _changed(one)
    return finding.kind == "region" and [seq < 0 for seq in finding.seq] == [seq < 0 for seq in one.seq] != [False, False]


def _is_around(finding: Finding, inner: Finding) -> bool:
    """Tell whether a module gives something else in a later step and a module inside it is given a tensor in one run alone."""
    within = inner.scope != finding.scope and f"{inner.scope}.".startswith(f"{finding.scope}." if finding.scope else "")
    later = finding.step > inner.step and (finding.rank, finding.phase) == (inner.rank, inner.phase)
    return finding.kind == "operator" and finding.level == "module" and later and within and _lacks_tensor(inner)


def _is_of_other_weights(finding: Finding, drawn: Finding) -> bool:
    """Tell whether a model as a whole returns something else and weights were drawn before in another shape: it holds them."""
    outermost = finding.kind == "operator" and finding.level == "module" and not finding.scope and finding.rank == drawn.rank
    return outermost and _draws(drawn) and not drawn.scope and any(slot.shape[0] != slot.shape[1] for slot in drawn.slots)


FORMS: tuple[Callable[[float], float], ...] = (lambda n: 1 / n, lambda n: n**0.5, lambda n: n**-0.5)
"""What is computed of the length of an axis: a mean's factor, and what attention divides its scores by."""


def _is_computed(finding: Finding, other: Finding) -> bool:
    """Tell whether the numbers that a call was given are computed, in both runs by one formula, of lengths that another call of the
    same module was given or made."""
    if finding.kind != "argument" or (finding.rank, finding.scope, finding.phase) != (other.rank, other.scope, other.phase):
        return False
    numbers, lengths = _changed(finding), [pair for pair in _changed(other) + _axes(other.slots) if min(pair) >= 1]
    made = [[form(n) for n in pair] for form in FORMS for pair in lengths]
    return bool(numbers) and all(any(map(partial(_agree, pair), made)) for pair in numbers)


def _agree(numbers: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(one, other, rel_tol=FLOAT32) for one, other in zip(numbers, others, strict=True))


def _changed(finding: Finding) -> list[tuple[float, float]]:
    """Return the numbers that a call was given and that differ; none where something else does, too."""
    given = [sides for slot in finding.slots if slot.slot == "arguments" for _, *sides in changed_arguments(slot)]
    try:
        return [(float(before), float(after)) for before, after in given]
    except ValueError:
        return []


def _axes(slots: Iterable[SlotComparison]) -> list[tuple[float, float]]:
    """Return the lengths of axes that differ."""
    shapes = [[[*map(float, re.findall(r"\d+", side))] for side in slot.shape] for slot in slots]
    same = [(before, after) for before, after in shapes if len(before) == len(after)]
    return [pair for sides in same for pair in zip(*sides, strict=True) if pair[0] != pair[1]]


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
    return in_words(seen.dtypes) if drawn or near else ""


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
    """Say of a single number that a call outside of modules makes whether it is a multiple of the baseline's."""
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
            for ratio, said in ((times, "{:,.0f} times"), (1 / times if times else 0.0, "1/{:,.0f} of")):
                if round(ratio) > 1 and abs(ratio - round(ratio)) <= off * ratio < WHOLE:
                    return f"the {what} is {said.format(round(ratio))} the baseline's: {one_line(finding.op)}"
    return ""


def _explains(setting: Setting, finding: Finding) -> bool:
    otherwise = finding.kind in ("argument", "unmatched", "region") or any(
        slot.slot == "arguments" and slot.state == "deviates" for slot in finding.slots
    )
    drawn = _draws(finding)
    if setting.group == "switch":
        close = finding.error_out <= ROUNDINGS * UNIT_ROUNDOFF["bfloat16"]
        return bool(PRECISIONS.fullmatch(setting.name)) and is_product(finding.op, finding.level) and close
    if setting.group == "argument":
        seeds = drawn and not finding.scope and "seed" in setting.name
        if drawn and _sized(setting, finding):  # weights are drawn where their module is built
            return True
        return _given(setting, finding) or (seeds and not named_argument(finding))
    if setting.group == "optimizer":
        rewritten = finding.op == STEP  # written in other operators, so that no argument of one is another's
        return (finding.phase == "optimizer" and (otherwise or rewritten)) or _holds(setting, finding) or _moved(finding)
    if setting.group == "module" and setting.name.endswith((*OF_PARAMETERS, "trainable")) and _is_of_parameter(setting, finding):
        return True
    if setting.name.endswith(OF_PARAMETERS):
        return finding.op == STEP
    if setting.group == "module":
        if drawn and not finding.scope and _sized(setting, finding):  # weights are drawn where their module is built
            return True
        inside = any(finding.scope == place or finding.scope.startswith(f"{place}.") for place in setting.places)
        if setting.name == "training" and _lacks_tensor(finding):  # no mode decides which tensors a call is given
            return False
        drawn = drawn if setting.name == "training" else _is_resized(finding)
        return inside and finding.phase != "optimizer" and (otherwise or drawn)
    if setting.group == "seed":
        return drawn and not named_argument(finding)  # which no seed changes
    if _lacks_tensor(finding):  # no loader decides that either
        return False
    if setting.name == "batch_size" and (_given(setting, finding) or _shaped(setting, finding)):
        return True
    if setting.name.endswith(("drop_last", "drop_remainder")) and all(slot.shape[0] == slot.shape[1] for slot in finding.slots):
        return False  # it is the last batch's size, or that there is none
    if drawn and finding.step > 0 and not _orders(setting):  # batches of another size took other numbers from the generator before
        return True
    where = not finding.scope and finding.phase in ("forward", "data") and not named_argument(finding)
    return where and (otherwise or drawn or finding.kind == "input")


def _is_of_parameter(setting: Setting, finding: Finding) -> bool:
    """Tell whether a call was given other parameters: one of the module's own, or, between ranks, another number of them."""
    if finding.phase == "collective" and any(slot.shape[0] != slot.shape[1] for slot in finding.slots):
        return True
    ties = [str(one).rpartition(".")[0] for one in (setting.baseline, setting.candidate) if setting.name.endswith(TIED)]
    return finding.scope in (*setting.places, *ties) and (
        finding.kind in ("unmatched", "region")
        or any(slot.slot.startswith("param.") and slot.state != "equal" for slot in finding.slots)
        or (bool(ties) and finding.kind == "argument" and not given_number(finding))  # it reads what another call drew
    )


def _lacks_tensor(finding: Finding) -> bool:
    """Tell whether a call is given a tensor in one run alone."""
    given = [slot for slot in finding.slots if is_input(slot.slot)] if finding.kind == "argument" else []
    return any((slot.baseline is None) != (slot.candidate is None) for slot in given)


def _moved(finding: Finding) -> bool:
    """Tell whether a weight that an optimizer wrote is read otherwise, and no recorded call shows why."""
    return finding.kind == "input" and finding.step > 0 and any(slot.slot.startswith("param.") for slot in finding.slots[:1])


def _is_resized(finding: Finding) -> bool:
    """Tell whether a call reads a parameter of another shape."""
    slot = finding.slots[0] if finding.kind == "input" and finding.slots else None
    return slot is not None and slot.slot.startswith("param.") and slot.shape[0] != slot.shape[1]


def _shaped(setting: Setting, finding: Finding) -> bool:
    """Tell whether what a call reads differs in shape by a setting's own two values."""
    shapes = [tuple(side.strip("()") for side in slot.shape) for slot in finding.slots if slot.shape[0] != slot.shape[1]]
    return any(_same(setting, f"[{before.strip(', ')}]", f"[{after.strip(', ')}]") for before, after in shapes)


def _sized(setting: Setting, finding: Finding) -> bool:
    """Tell whether what a call makes has an axis that is as long as a setting's own two values."""
    made = [slot for slot in finding.slots if is_output(slot.slot)]
    return setting.baseline != setting.candidate and (setting.baseline, setting.candidate) in _axes(made)


def _given(setting: Setting, finding: Finding) -> bool:
    """Tell whether a call was given a setting's own two values, alone or among others, or both less than nothing: what moves a
    weight against its gradient (``alpha=-lr``)."""
    given = [values for slot in finding.slots if slot.slot == "arguments" for values in changed_arguments(slot)]
    if any(_same(setting, before, after) for _, before, after in given):
        return True
    return _values(setting) in [(-before, -after) for before, after in _changed(finding)]


def _holds(setting: Setting, finding: Finding) -> bool:
    """Tell whether a call was given the setting's own two values as tensors: Keras keeps a learning rate in a variable."""
    wanted = setting.baseline, setting.candidate
    if finding.kind != "input" or not all(isinstance(one, (int, float)) for one in wanted):
        return False
    for slot in finding.slots:
        sides = slot.baseline, slot.candidate
        if all(isinstance(side, TensorStats) and _is(side, value) for side, value in zip(sides, wanted, strict=True)):
            return True
    return False


def _same(setting: Setting, before: str, after: str) -> bool:
    """Tell whether two arguments, written as JSON, differ by a setting's own two values."""
    wanted = setting.baseline, setting.candidate
    if not all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in wanted):
        return False
    try:
        held = [one if isinstance(one, list) else [one] for one in map(_number, (before, after))]
    except ValueError:
        return False
    differ = [pair for pair in zip(*held, strict=False) if pair[0] != pair[1]]
    return len(held[0]) == len(held[1]) and bool(differ) and all(pair == wanted for pair in differ)


def _number(text: str) -> Any:
    """Read an argument; Paddle writes some numbers as texts."""
    held = json.loads(text)
    return float(held) if isinstance(held, str) else held


def _is(stats: TensorStats, value: float) -> bool:
    """Tell whether all elements are a number, rounded to float32 or finer."""
    least, largest = stats.min, stats.max
    return least == largest and abs(least - value) <= FLOAT32 * abs(value)
