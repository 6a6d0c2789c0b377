"""Which settings that differ reach which calls, and show in them.

A setting explains a call that it reaches and that shows it: an optimizer's, the calls of an update that were given other numbers or
that only one run makes; a module's, such calls inside that module, its own forward where no argument was recorded, and, of a
length, calls of its own two values anywhere; a loader's or a seed's, what no module computed and what was drawn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trueup.comparison.normalise.updates import STEP
from trueup.foundation.facts.criteria import is_product
from trueup.foundation.facts.slots import UNIT_ROUNDOFF, is_input, is_output
from trueup.foundation.frameworks.trees import TIED
from trueup.foundation.model import Finding, SlotComparison, TensorStats
from trueup.foundation.settings import OF_PARAMETERS, Setting, differing
from trueup.foundation.words.sentence import changed_arguments, given_number, named_argument

FLOAT32 = 2.0**-24
"""Unit roundoff of float32 (IEEE 754)."""

ROUNDINGS = 8.0
"""Units of roundoff of the coarser dtype up to which another dtype explains an error: a few roundings in a row."""

ORDERING = ("seed", "shuffle", "sampler")
"""Settings of a data loader that say in which order samples come; the others say how many batches there are, and how large."""

SIZES = frozenset(
    ("in_channels", "out_channels", "in_features", "out_features", "num_features", "num_embeddings", "embedding_dim", "hidden_size")
)
"""Settings of layers that are lengths of axes of their weights."""

LENGTHS = SIZES | {"batch_size"}
"""Settings that are lengths of axes of what is computed, wherever that is."""

PRECISIONS = re.compile(r"float32_matmul_precision|tensor_float_32|.*allow_(tf32|hf32|.*_reduction)|NVIDIA_TF32_OVERRIDE")
"""Switches that say how exactly products of float32 are computed: some processors obey, others do not."""

DECAYING = ("SGD", "Momentum", "AdamW")
"""Optimizers whose weight decay moves a weight by lr times decay times weight, and no more often than momentum repeats it; the
others divide what it adds by a running root."""

LARGEST_RATE = 10.0
"""Learning rate over one minus momentum, beyond what trains anything: 0.1 and 0.9 make 1."""

ORDER = ("data", "seed", "module", "optimizer", "argument", "switch")
"""Groups that explain calls, the surest first: what a script was told does where a call was given these very values."""


def is_set_otherwise(finding: Finding, baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> bool:
    """Tell whether a call that is off by little computes with a setting that changes numbers and differs; another class may do the
    same, and a batch what it is read for. ``baseline`` and ``candidate`` are manifests of its rank."""
    settings = [one for one in differing(baseline, candidate, finding.step) if one.severity == "changes" and one.name != "class"]
    return any(one.group in ("optimizer", "module") for one in reaching_of(settings, finding))


def reaching_of(settings: Sequence[Setting], finding: Finding) -> list[Setting]:
    """Return the settings of the surest group that explains a culprit."""
    found = [one for one in settings if one.group in ORDER and _explains(one, finding)]
    first = min(found, key=lambda one: (not (draws(finding) and one.group == "seed"), rank(one)), default=None)
    found = [one for one in found if first is not None and one.group == first.group]
    found = [one for one in found if one.severity == "changes"] or found  # what a user's own module calls it is the same
    if found and found[0].group == "argument":
        return _became(settings, found[0]) if len(found) == 1 else []  # which of them it was nobody knows
    return found


def _became(settings: Sequence[Setting], told: Setting) -> list[Setting]:
    """Return the settings that what a script was told became: of the same two values, and of a name that the argument's ends with;
    the argument itself where there are none."""
    values = told.baseline, told.candidate
    same = [one for one in settings if one.group != "argument" and (one.baseline, one.candidate) == values]
    return [one for one in same if told.name.endswith(one.name.rpartition(".")[2])] or [told]


def rank(setting: Setting) -> int:
    """Return how sure a setting of its group is, the surest first."""
    return ORDER.index(setting.group) if setting.group in ORDER else len(ORDER)


def _explains(setting: Setting, finding: Finding) -> bool:
    """Tell whether a setting reaches a call, and shows in it."""
    otherwise = finding.kind in ("argument", "unmatched", "region") or any(
        slot.slot == "arguments" and slot.state == "deviates" for slot in finding.slots
    )
    drawn = draws(finding)
    if setting.group == "switch":
        close = finding.error_out <= ROUNDINGS * UNIT_ROUNDOFF["bfloat16"]
        return bool(PRECISIONS.fullmatch(setting.name)) and is_product(finding.op, finding.level) and close
    if setting.group == "argument":
        seeds = drawn and not finding.scope and is_seed(setting)
        if drawn and _sized(setting, finding):  # weights are drawn where their module is built
            return True
        return _given(setting, finding) or (seeds and not named_argument(finding))
    if setting.group == "optimizer":
        if setting.name == "weight_decay" and finding.op == STEP and not _decays_as_far(setting, finding):
            return False
        rewritten = finding.op == STEP  # written in other operators, so that no argument of one is another's
        return (finding.phase == "optimizer" and (otherwise or rewritten)) or _holds(setting, finding) or _moved(finding)
    if setting.name in LENGTHS and not lacks_tensor(finding) and (_given(setting, finding) or _shaped(setting, finding)):
        return True
    if setting.group == "module" and setting.name.endswith((*OF_PARAMETERS, "trainable")) and _is_of_parameter(setting, finding):
        return True
    if setting.name.endswith(OF_PARAMETERS):
        return finding.op == STEP
    if setting.group == "module":
        if drawn and not finding.scope and _sized(setting, finding):  # weights are drawn where their module is built
            return True
        inside = any(finding.scope == place or finding.scope.startswith(f"{place}.") for place in setting.places)
        if setting.name == "training" and lacks_tensor(finding):  # no mode decides which tensors a call is given
            return False
        drawn = drawn if setting.name == "training" else _is_resized(finding)
        itself = (finding.level, finding.phase) == ("module", "forward") and finding.scope in setting.places
        if setting.severity == "may":
            return inside and (itself or _given(setting, finding))
        itself = itself and setting.name not in (SIZES | {"class"})  # as layouts have them, too
        return inside and finding.phase != "optimizer" and (otherwise or drawn or itself)
    if setting.group == "seed":
        return drawn and not named_argument(finding)  # which no seed changes
    if lacks_tensor(finding):  # no loader decides that either
        return False
    if setting.name.endswith(("drop_last", "drop_remainder")) and all(slot.shape[0] == slot.shape[1] for slot in finding.slots):
        return False  # it is the last batch's size, or that there is none
    if drawn and finding.step > 0 and not is_of_order(setting):  # batches of another size took other numbers before
        return True
    where = not finding.scope and finding.phase in ("forward", "data") and not named_argument(finding)
    return where and (otherwise or drawn or finding.kind == "input")


def _decays_as_far(setting: Setting, finding: Finding) -> bool:
    """Tell whether another weight decay may have moved each weight as far as it is off: a small bias that is 10 % off was not."""
    decays = [one for one in values_of(setting) if isinstance(one, (int, float))]
    if setting.kind not in DECAYING or len(decays) != 2:
        return True
    slots = {slot.slot: slot for slot in finding.slots}
    for slot in finding.slots:
        before = slots.get(slot.slot.replace("output.", "input.", 1))
        if slot.state != "deviates" or before is None or before is slot:
            continue
        held, written = before.baseline, slot.baseline
        if isinstance(held, TensorStats) and isinstance(written, TensorStats):
            farthest = LARGEST_RATE * abs(decays[0] - decays[1]) * held.l2
            if slot.relative_l2 * written.l2 > farthest:
                return False
    return True


def _is_of_parameter(setting: Setting, finding: Finding) -> bool:
    """Tell whether a call was given other parameters: one of the module's own, or, between ranks, another number of them."""
    if finding.phase == "collective" and any(slot.shape[0] != slot.shape[1] for slot in finding.slots):
        return True
    ties = [str(one).rpartition(".")[0] for one in (setting.baseline, setting.candidate) if setting.name.endswith(TIED)]
    if any(slot.slot.startswith("grad_input.") and None in (slot.baseline, slot.candidate) for slot in finding.slots):
        # A gradient that one run lacks: behind it, in the module around both, is a layer that the other run trains.
        return not finding.scope or any(f"{place}.".startswith(f"{finding.scope}.") for place in setting.places)
    return finding.scope in (*setting.places, *ties) and (
        finding.kind in ("unmatched", "region")
        or any(slot.slot.startswith("param.") and slot.state != "equal" for slot in finding.slots)
        or (bool(ties) and finding.kind == "argument" and not given_number(finding))  # it reads what another call drew
    )


def lacks_tensor(finding: Finding) -> bool:
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
    return setting.baseline != setting.candidate and (setting.baseline, setting.candidate) in changed_axes(made)


def _given(setting: Setting, finding: Finding) -> bool:
    """Tell whether a call was given a setting's own two values, alone or among others, or both less than nothing: what moves a
    weight against its gradient (``alpha=-lr``)."""
    given = [values for slot in finding.slots if slot.slot == "arguments" for values in changed_arguments(slot)]
    if any(_same(setting, before, after) for _, before, after in given):
        return True
    return values_of(setting) in [(-before, -after) for before, after in changed_numbers(finding)]


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


def is_seed(setting: Setting) -> bool:
    """Tell whether a setting is a seed, or what a script was told of one."""
    return setting.group == "seed" or (setting.group == "argument" and "seed" in setting.name)


def is_of_order(setting: Setting) -> bool:
    """Tell whether a setting of a loader says in which order samples come."""
    return setting.name.rpartition(".")[2] in ORDERING


def draws(finding: Finding) -> bool:
    """Tell whether a call draws random numbers."""
    return finding.kind == "random" or finding.rule.startswith("random")


def values_of(setting: Setting) -> tuple[Any, Any]:
    """Return both values of a setting."""
    return setting.baseline, setting.candidate


def changed_numbers(finding: Finding) -> list[tuple[float, float]]:
    """Return the numbers that a call was given and that differ; none where something else does, too."""
    given = [sides for slot in finding.slots if slot.slot == "arguments" for _, *sides in changed_arguments(slot)]
    try:
        return [(float(before), float(after)) for before, after in given]
    except ValueError:
        return []


def changed_axes(slots: Iterable[SlotComparison]) -> list[tuple[float, float]]:
    """Return the lengths of axes that differ."""
    shapes = [[[*map(float, re.findall(r"\d+", side))] for side in slot.shape] for slot in slots]
    same = [(before, after) for before, after in shapes if len(before) == len(after)]
    return [pair for sides in same for pair in zip(*sides, strict=True) if pair[0] != pair[1]]
