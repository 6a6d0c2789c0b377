"""What two runs begin with, as the calls of both show it, and which settings that differ reach which calls, and show in them.

    initial weights of 14 of 31 parameters differ (tokens.weight, places.weight, mix.weight…)
    a constant that model.rotary_emb reads differs from step 0 on
    batches differ from step 0 on

A setting explains a call that it reaches and that shows it: an optimizer's, the calls of an update that were given other numbers or
that only one run makes; a module's, such calls inside that module, its own forward where no argument was recorded, and, of a
length, calls of its own two values anywhere; a loader's or a seed's, what no module computed and what was drawn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trueup.comparison.graph.streams import NONE, Array, Numbers, Stream
from trueup.comparison.measures.measure import Errors
from trueup.comparison.normalise.updates import STEP
from trueup.comparison.result.shown import PARAM, makers
from trueup.comparison.verdict.judged import Part
from trueup.foundation.facts.criteria import Criterion, is_product
from trueup.foundation.facts.slots import SINGLE, UNIT_ROUNDOFF, is_input, is_output
from trueup.foundation.facts.why import Why
from trueup.foundation.frameworks.trees import TIED, path
from trueup.foundation.model import Finding, SlotComparison, TensorStats
from trueup.foundation.settings import OF_PARAMETERS, Setting, differing
from trueup.foundation.words.sentence import changed_arguments, given_number, named_argument
from trueup.foundation.words.setup_sentence import some

OF = "\n"
"""Between a module and the slot in which a call inside reads its weight, where nothing tells what that is called."""
LONGEST_CHAIN = 50
"""Calls that make an initial weight which are looked at."""
ROUNDED = 8 * SINGLE
"""Relative error up to which two devices may draw the same numbers in float32, and nobody would say that weights differ."""

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


class Beginnings:
    """What the runs begin with: initial weights, and batches."""

    def __init__(self) -> None:
        self._weights: dict[str, bool] = {}  # by parameter: whether its first value differs
        self._copied: list[str] = []  # those that differ and were copied from numbers of the host's
        self.batches: dict[int, int] = {}  # by rank: the first step in which a model is given other inputs
        self._first: dict[int, tuple[int, int]] = {}  # by rank: seqs of each side's first call of a module
        self._resized: set[int] = set()  # ranks whose batches have another shape
        self._given: dict[tuple[int, int, str], str | None] = {}
        """What modules read, where no call of one is recorded: who reads a constant, "" for a weight, None for a batch."""
        self._unmade: dict[tuple[int, int, str], tuple[str, int]] = {}
        """Those of step 0 that no recorded call made, batches or constants: who reads them, and their identity in the candidate."""

    def add(self, part: Part) -> None:
        """Look at the modules of a part; of weights at those of the step in which training began."""
        errors = part.verdicts.errors
        candidate = errors.streams[1]
        if not candidate.of_level("module").any():
            self._add_inside(part)
            return
        calls = errors.calls[1][errors.pair]
        runs = candidate.of_level("module") & candidate.during("forward")
        forward = runs[calls]
        if not forward.any():
            self._add_unpaired(part)
            return
        if part.rank not in self._first:
            at = int(np.flatnonzero(runs[errors.calls[1]])[0])
            seqs = [int(stream.seq[side[at]]) for stream, side in zip(errors.streams, errors.calls, strict=True)]
            self._first[part.rank] = seqs[0], seqs[1]
        if part.step == 0:
            of_weights = np.flatnonzero(forward & candidate.names.table(_is_parameter)[errors.names])
            self._look_at_weights(errors, of_weights, part.verdicts.criterion)
        outermost = forward & (candidate.parents[calls] == NONE) & candidate.names.table(is_input)[errors.names]
        shapes = np.isin(np.arange(len(errors.pair)), [n for n, why in errors.reasons.items() if why.why is Why.SHAPES])
        differ = outermost & (_apart(errors) | shapes) & ~candidate.names.table(_is_parameter)[errors.names]
        if (outermost & shapes).any():
            self._resized.add(part.rank)
        if differ.any():
            self.batches.setdefault(part.rank, int(candidate.step[calls[differ]].min()))

    def _add_inside(self, part: Part) -> None:
        """Look at what calls inside modules read and no module made, where no call of a module itself is recorded: what the
        optimizer reads, too, is a weight, known by the module that reads it; the rest are batches."""
        errors = part.verdicts.errors
        firsts = [int(inside.argmax()) if (inside := _inside(stream)).any() else NONE for stream in part.streams]
        if NONE in firsts:
            return
        seqs = [int(stream.seq[at]) for stream, at in zip(part.streams, firsts, strict=True)]
        self._first.setdefault(part.rank, (seqs[0], seqs[1]))
        candidate, slots = errors.streams[1], errors.slots[1]
        made = candidate.producers[slots]
        read = _inside(candidate)[candidate.call[slots]] & candidate.names.table(is_input)[errors.names] & (made < firsts[1])
        weights, updated, apart = _updated(candidate, slots), _updates(candidate), _apart(errors)
        for n in np.flatnonzero(read & ((made != NONE) | (part.step == 0))).tolist():
            call, slot = int(candidate.call[slots[n]]), candidate.names.names[int(errors.names[n])]
            if part.step == 0 and weights[n]:
                name = f"{candidate.names.names[int(candidate.scope[call])]}{OF}{slot}"
                self._weights[name] = bool(apart[n])
                if apart[n] and made[n] != NONE and _is_copied(candidate, int(made[n]), part.verdicts.criterion):
                    self._copied.append(name)
            key = part.rank, int(candidate.seq[call]), slot
            if apart[n] and weights[n]:
                self._given[key] = ""
            elif apart[n] and updated and made[n] == NONE:
                self._unmade[key] = candidate.names.names[int(candidate.scope[call])], int(candidate.identity[slots[n]])
            elif apart[n] and updated:
                self._given[key] = None
                self.batches.setdefault(part.rank, part.step)
        if part.step and self._unmade:
            self._sort(part.rank, {int(one) for one in candidate.identity[slots[read & (made == NONE)]]})

    def _sort(self, rank: int, again: set[int]) -> None:
        """Tell constants, which a later step reads again, from batches."""
        for key, (reader, identity) in list(self._unmade.items()):
            if key[0] == rank:
                del self._unmade[key]
                self._given[key] = reader if identity in again else None
                if identity not in again:
                    self.batches[rank] = 0

    def _add_unpaired(self, part: Part) -> None:
        """Look at weights by their names where no call of a module has a counterpart: one run calls each more often."""
        reads = [_weights_read(stream) for stream in part.streams]
        if part.step or not all(reads):
            return
        baseline, candidate = part.streams
        firsts = [int(stream.seq[stream.call[min(read.values())]]) for stream, read in zip(part.streams, reads, strict=True)]
        self._first.setdefault(part.rank, (firsts[0], firsts[1]))
        for name in reads[0].keys() & reads[1].keys() - self._weights.keys():
            k, j = reads[0][name], reads[1][name]
            same = baseline.identity[k] == candidate.identity[j] or baseline.numel[k] != candidate.numel[j]
            first, second = (stream.sketch[np.array([at])] for stream, at in ((baseline, k), (candidate, j)))
            apart = not same and float(np.linalg.norm(second - first)) > ROUNDED * float(np.linalg.norm(first))
            self._weights[name] = bool(apart and baseline.dtype_of(k) == candidate.dtype_of(j))

    def _look_at_weights(self, errors: Errors, at: Numbers, criterion: Criterion) -> None:
        candidate, apart = errors.streams[1], _apart(errors)
        for n in at.tolist():
            call, names = int(errors.calls[1][errors.pair[n]]), candidate.names.names
            slot = names[int(errors.names[n])].removeprefix(PARAM)
            name = path(names[int(candidate.scope[call])], slot)
            if name in self._weights:
                continue
            self._weights[name] = bool(apart[n])
            if apart[n] and _is_copied(candidate, int(candidate.producers[errors.slots[1][n]]), criterion):
                self._copied.append(name)

    @property
    def weights(self) -> str:
        """Say which initial weights differ; empty where none does."""
        return self._differ([name for name, apart in self._weights.items() if apart])

    @property
    def unlike(self) -> frozenset[str]:
        """Names of the initial weights that differ."""
        return frozenset(name.partition(OF)[0] for name, apart in self._weights.items() if apart)

    @property
    def copied(self) -> str:
        """Say which initial weights differ that no recorded call drew: loaded, or made by NumPy; empty where none does."""
        return self._differ(self._copied)

    def _differ(self, other: Sequence[str]) -> str:
        named = list(dict.fromkeys(name.partition(OF)[0] for name in other))
        return f"initial weights of {len(other):,} of {len(self._weights):,} parameters differ ({some(named)})" if other else ""

    def said(self, finding: Finding) -> str:
        """Say of a culprit that stands where training begins which initial weights and batches differ."""
        if finding.phase not in ("forward", "data") or (finding.kind == "operator" and finding.phase != "data"):
            return ""
        slot = finding.slots[0].slot if finding.kind == "input" and finding.slots else ""
        given = finding.rank, finding.seq[1], slot
        if given in self._unmade:
            return f"a batch, or a constant that {self._unmade[given][0]} reads, differs from step 0 on"
        if given in self._given:
            return self._of(self._given[given], finding.rank)
        before = self._is_before(finding)
        found = [self.weights] if self.weights and (before or slot.startswith(PARAM)) else []
        since = self.batches.get(finding.rank)
        sized = finding.rank in self._resized and bool(slot) and finding.slots[0].shape[0] != finding.slots[0].shape[1]
        follows = since is not None and since <= finding.step and not finding.scope and finding.kind not in ("argument", "region")
        before = before and finding.kind not in ("region", "argument")  # what recorded calls do says more than what it led to
        if since is not None and (before or sized or follows) and not slot.startswith(PARAM):
            found.append(self._of(None, finding.rank))
        return "; ".join(found)

    def _of(self, reader: str | None, rank: int) -> str:
        """Say of what modules read that it differs."""
        if reader is None:
            return f"batches differ from step {self.batches[rank]} on"
        return f"a constant that {reader} reads differs from step 0 on" if reader else self.weights

    def _is_before(self, finding: Finding) -> bool:
        """Tell whether a call was made before any module ran."""
        first = self._first.get(finding.rank)
        if first is None or finding.scope:
            return False
        return any(NONE < seq < of for seq, of in zip(finding.seq, first, strict=True))


def _inside(stream: Stream) -> Array:
    """Tell which calls of a forward stand in a module."""
    return np.asarray(stream.during("forward") & (stream.scope != NONE) & (stream.scope != stream.names.number("")))


def _updates(stream: Stream) -> bool:
    """Tell whether an optimizer was recorded."""
    return bool(stream.during("optimizer").any())


def _updated(stream: Stream, slots: Numbers) -> Array:
    """Tell which slots hold what an optimizer of the step reads, too: of one maker, or where none is known, of the same bytes."""
    read = np.flatnonzero(stream.during("optimizer")[stream.call])
    made, known = stream.producers, stream.is_identified & (stream.numel > 1)
    by = np.isin(made[slots], made[read][made[read] != NONE])
    same = known[slots] & np.isin(stream.identity[slots], stream.identity[read[known[read]]])
    return np.asarray(by | ((made[slots] == NONE) & same))


def _weights_read(stream: Stream) -> dict[str, int]:
    """Return the slot in which modules read each weight first, by its name."""
    read = stream.names.table(_is_parameter)[stream.slot] & (stream.of_level("module") & stream.during("forward"))[stream.call]
    found: dict[str, int] = {}
    for slot in np.flatnonzero(read).tolist():
        names = stream.names.names
        scope = names[int(stream.scope[stream.call[slot]])]
        found.setdefault(path(scope, names[int(stream.slot[slot])].removeprefix(PARAM)), slot)
    return found


def _is_copied(stream: Stream, call: int, criterion: Criterion) -> bool:
    """Tell whether what a call makes comes from numbers that no recorded call made, and none drew what it was made of."""
    seen, pending = set[int](), [call] if call != NONE else []
    while pending and len(seen) < LONGEST_CHAIN:
        row = stream.row(at := pending.pop())
        seen.add(at)
        if criterion.row(row.op, row.level, row.phase).random:
            return False
        pending += set(makers(stream, at).tolist()) - seen - {NONE}
    return bool(seen) and not pending and any((makers(stream, at) == NONE).any() for at in seen)


def _apart(errors: Errors) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Tell of which entries the two sides differ by more than rounding; in another dtype they are rounded."""
    (baseline, candidate), (k, j) = errors.streams, errors.slots
    return np.asarray((np.nan_to_num(errors.relative) > ROUNDED) & (baseline.dtype[k] == candidate.dtype[j]))


def _is_parameter(name: str) -> bool:
    return name.startswith(PARAM)


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
