"""Culprits before victims: which suspected calls are where a difference starts, and which only pass one on.

A call is suspected when its outputs differ by more than rounding and its inputs explain. Of the suspected calls at several levels
the finest speaks. Of all ranks and steps, culprits are those that no earlier one explains, in order of execution: a later one is
another culprit only if its own inputs are clean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trueup.comparison.graph.readers import Readers
from trueup.comparison.graph.streams import NONE, Stream
from trueup.comparison.measures.measure import same_shapes
from trueup.comparison.measures.thresholds import CHANCE, GONE, HALF, SMALL
from trueup.comparison.verdict import optimizer_updates, siblings
from trueup.comparison.verdict.draws import alone_before, begins_elsewhere, explain_draws
from trueup.comparison.verdict.exchange import Use, from_root, receives, use_of
from trueup.comparison.verdict.facts import Facts
from trueup.comparison.verdict.independent import Laws, are_chosen, denormalised, key_of
from trueup.comparison.verdict.judged import LASTING, SIDES, Judged, Kind, OwnErrors, Part, Suspect, Tree, loose_calls
from trueup.comparison.verdict.one_sided import Lasting, dead_ends, parted, unaccounted
from trueup.comparison.verdict.origins import Origins, arising_inside, came_in, comes_from_between, may_have_grown
from trueup.comparison.verdict.overwritten import exchanged, overwritten, rewired, stale
from trueup.comparison.verdict.parts import Parts, coarsest
from trueup.comparison.verdict.regions import Call, Region, Regions, added, chooses, is_part_of, judge_region
from trueup.comparison.verdict.regions import operators as region_operators
from trueup.comparison.verdict.rewritten import Reconvergence
from trueup.foundation.facts.arguments import equal_arguments, other_words
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.operators import normalised
from trueup.foundation.facts.slots import SINGLE, STEP, is_input, is_output, is_weight, roundoff
from trueup.foundation.facts.why import AGREES, CARRIED_ON, EQUAL, Reason, Why

OWN: tuple[Kind, ...] = ("operator", "argument", "random")  # kinds of what a call does itself, and not of what it was given
ENTERING = ("forward", "data")  # phases in which data and weights enter a step
MOST_ENTRIES = 1000
"""Tensors that enter a step and differ of which it is asked what becomes of them."""


def locate(
    part: Part, criterion: Criterion, origins: Origins | None = None, *, first_step: bool, from_start: bool, forced: bool = False,
    own_errors: OwnErrors | None = None, alike: bool = True,
) -> None:  # fmt: skip
    """Fill in what a part (one rank and step) leaves open. ``origins``, what is known of the rank's earlier steps, is brought up
    to date. ``first_step``: the first captured step of the rank; ``from_start``: that is the first of the training; ``forced``: it
    computed with another run's inputs; ``own_errors``: which calls are wrong by themselves; ``alike``: kernels are the same."""
    origins = origins or Origins()
    chosen = from_start if first_step else origins.chosen
    verdicts, tree = part.verdicts, Tree(part.verdicts, part.alignment)
    if verdicts.errors.all_same and origins.passes(tree):
        part.elsewhere = begins_elsewhere(part) if first_step else None
        return
    for stream, calls in zip(tree.streams, loose := loose_calls(tree), strict=True):
        stream.name_views(calls)
    regions = Regions(tree, loose, origins)
    parts = _parts(regions.flow, loose, criterion)
    Lasting(regions, criterion, parts).settle()
    excused = Reconvergence(tree, regions, criterion, rewired(tree), forced=forced)
    given = [pair for pair, arguments in verdicts.errors.arguments.items() if not equal_arguments(*arguments)]
    asked = dict.fromkeys([*np.flatnonzero(verdicts.ratio > criterion.suspect).tolist(), *given])
    found = [pair for pair in asked if not excused.pair(pair) and verdicts.ratio[pair] > criterion.suspect]
    lacking, lost = ([], set()) if forced or criterion.limits else parted(tree, excused)
    alone = _unmatched(part, regions, criterion, excused, lost, parts)
    found = [pair for pair in found if not excused.holds(pair)]
    suspects = [*([] if origins.parted else lacking), *_finest(found, alone, criterion, tree, regions.flow[1]), *alone]
    origins.parted |= bool(lacking)  # each step lacks them again
    origins.wrong = origins.wrong or any(suspect.certain for suspect in suspects)
    suspects += _lawless(part, tree, criterion, suspects, origins, own_errors)
    exits = {(judged.call.candidate.seq, error.slot) for region in regions.found for judged, error, _ in region.exits}  # judged
    followed = [found for found in origins.follow(tree, regions.flow) if (found[0].call.candidate.seq, found[1]) not in exits]
    came = [(judged, slot) for judged, slot in followed if not excused.reader(judged, slot)]
    inside, part.unexplained = arising_inside(came, tree, criterion)
    part.rewritten = len(excused.rewritten[0]), len(excused.rewritten[1])
    part.stale = None if forced or criterion.limits else stale(tree, origins.made, excused.holds)
    part.narrowed = None if forced or criterion.limits else siblings.narrowed(tree)
    speaking = {s.place for s in suspects}
    suspects += [s for s in (_suspect(pair, criterion, tree) for pair in inside) if s.place not in speaking]
    suspects += _apart_from_siblings(tree, criterion, suspects, excused, origins.exact) if alike and not forced else []
    unseen = overwritten(tree, criterion)
    suspects += [Suspect(verdicts.at(pair), "overwritten", True, reason=slot) for pair, slot in unseen[:1]]
    part.unexplained = [] if unseen else part.unexplained
    if first_step:
        suspects += _inputs(part, tree, criterion, excused, from_start=from_start)
    else:
        suspects += _later_inputs(part.unexplained, part.streams, origins)
    suspects += _arguments(part, criterion, suspects, excused)
    suspects += [] if forced or criterion.limits else _rewired(tree, excused) + _lone(part, tree, origins)
    suspects += _settings(part, tree, suspects, chosen=chosen)
    suspects = _at_fault(suspects, tree, excused)
    left = map(verdicts.at, excused.unread)
    suspects += [Suspect(judged, "operator", False, because=(Why.UNREAD(judged.call.candidate.key),)) for judged in left]
    _doubt(suspects, part, origins)
    explain_draws(part, suspects, criterion, origins.drew)
    origins.drew = origins.drew or alone_before(part, criterion)
    suspects = suspects if forced or criterion.limits else _of_equal_passes(suspects, part, tree, origins)
    if first_step and not suspects:
        part.elsewhere = begins_elsewhere(part)
    for suspect in suspects:
        _time(suspect, part.streams[1])
    part.suspects = sorted(suspects, key=lambda s: s.place)


def _is_shared(pair: int, tree: Tree, readers: Readers) -> bool:
    """Tell whether what is wrong of a call is a gradient that others have a part in: of which one side lacks theirs (autocast casts
    a weight once, and one call has it for all), or which were given what differs more."""
    verdicts, error = tree.verdicts, tree.verdicts.errors.distance(int(tree.verdicts.worst[pair]))
    others = tree.pairs[1][readers.cast_at_once(error.candidate)]
    lacks = any(error.slot in verdicts.errors.one_sided.get(other, ()) for other in others.tolist())
    return bool(lacks or (others == NONE).any() or (verdicts.error_in[others] > verdicts.error_in[pair]).any())


def _at_fault(suspects: Iterable[Suspect], tree: Tree, excused: Reconvergence) -> list[Suspect]:
    """Leave out suspects that stand in an excused formula, and those of which another one says what they were given."""
    stream = tree.streams[1]
    found = [s for s in suspects if s.kind not in OWN or not excused.holds(int(tree.pairs[1][stream.find(s.place)]))]
    given = {s.place for s in found if s.kind in ("input", "overwritten")}  # what a call was given is not its own error
    told = {s.place for s in found if s.kind == "argument"}
    agree, modules = np.isin(tree.verdicts.role, (EQUAL, AGREES)), stream.of_level("module")[tree.verdicts.errors.calls[1]]
    handed_on = set()
    for place in told:
        call = stream.find(place)
        around = [n for n in tree.covering(call, 1) if not modules[n] and not _is_recast(tree.verdicts.at(n), tree.streams)]
        if not told.isdisjoint(stream.seq[tree.around(call)].tolist()) or agree[around].any():
            handed_on.add(place)  # the function returns the same of the same: how it computes is its own choice
    dropped: dict[Kind, set[int]] = {"operator": given, "argument": handed_on}
    return [s for s in found if s.place not in dropped.get(s.kind, set())]


def _doubt(suspects: Iterable[Suspect], part: Part, origins: Origins) -> None:
    """Make uncertain what may only show a difference that came in unseen."""
    stream = part.streams[1]
    if part.unexplained and any(stream.imported for stream in part.streams):
        # What came in, a weight that another optimizer wrote, may be what all later calls show: statistics tell inputs roughly.
        origins.lost = min([judged.call.candidate.seq for judged, _ in part.unexplained])
    passing_on = came_in(part.unexplained, stream)
    for suspect in suspects:
        lost = origins.lost is not None and suspect.place >= origins.lost
        lost = lost or (suspect.kind == "operator" and passing_on(suspect.judged))
        # What was computed again was so from inputs that are its own, seen or not.
        suspect.certain &= not lost or any(reason.why is Why.RECOMPUTED for reason in suspect.because)


def _of_equal_passes(suspects: list[Suspect], part: Part, tree: Tree, origins: Origins) -> list[Suspect]:
    """Return the suspects that remain where the runs go backward another number of times; the part keeps how often."""
    part.passes = optimizer_updates.passes(tree, origins.accumulated)
    if part.passes is None:
        return suspects
    origins.accumulated, part.stale = part.passes.worst, None
    if part.passes.sure:  # of the calls before the optimizer none is another's counterpart, and what they make was compared
        part.uncovered = [(side, row) for side, row in part.uncovered if row.phase in LASTING]
        for left, seq in [(p, n) for p in origins.pending for n, r in p.items() if r.step == part.step and r.phase not in LASTING]:
            del left[seq]
        part.unexplained = [found for found in part.unexplained if found[0].call.candidate.phase != "backward"]
    return [s for s in suspects if s.kind in ("input", "random")]


def _time(suspect: Suspect, stream: Stream) -> None:
    """Say when a suspect began, and when its difference was there."""
    call = min(int(np.searchsorted(stream.seq, suspect.place)), len(stream) - 1)
    suspect.began = suspect.ready = int(stream.began[call])
    worst = suspect.judged.call.slots.get(suspect.judged.worst or "")
    if suspect.kind == "operator" and worst is not None:
        suspect.ready = int(stream.ready[worst.candidate])


def is_quiet(part: Part, criterion: Criterion, origins: Origins) -> bool:
    """Tell whether nothing in some later steps needs a closer look; if so, their errors are remembered as `locate` does it."""
    verdicts, alignment = part.verdicts, part.alignment
    if len(alignment.only_baseline) or len(alignment.only_candidate) or verdicts.errors.arguments:
        return False
    tree = Tree(verdicts, alignment)
    if verdicts.errors.all_same:
        return origins.passes(tree)
    quiet = not bool((verdicts.ratio > criterion.suspect).any()) and not siblings.unlike(tree, exact=origins.exact is not None)
    quiet = quiet and not denormalised(tree, criterion) and siblings.narrowed(tree) is None
    return quiet and not (stale(tree, lambda _: 0.0, lambda _: False) or overwritten(tree, criterion)) and origins.passes(tree)


def _unmatched(
    part: Part, regions: Regions, criterion: Criterion, excused: Reconvergence, lost: set[Call], parts: tuple[Parts, Parts]
) -> list[Suspect]:
    """Account for calls without counterpart: return regions where a difference starts; the part keeps what nothing shows. Where
    calls read gradients that the other side has ``lost``, it starts there."""
    tree, origins, loose = regions.tree, regions.origins, regions.given
    dead = dead_ends(regions, criterion)
    uncovered = regions.unread() | set(regions.untold()) | set(_phases_of_one(tree)) | unaccounted(regions, criterion)
    uncovered |= {(side, call) for side, call in dead if tree.streams[side].during(*LASTING)[call]}
    uncovered |= {(s, call) for s, call in regions.states if call in regions.readers[s] and call not in regions.settled[s]}
    suspects: list[Suspect] = []
    judged_regions = [(region, judge_region(region, criterion, parts)) for region in regions.found]
    wrong = [(region, judged) for region, judged in judged_regions if judged.ratio > criterion.suspect]
    wrong = [(region, judged) for region, judged in wrong if judged.incomparable or not excused.region(region, parts)]
    wrong = [(its, judged) for its, judged in wrong if not (_goes_on(its, wrong, criterion) and excused.forward.region(its, parts))]
    for region, judged in wrong:
        if any(call in region.calls[side] for side, call in lost):
            continue
        if any(is_part_of(region, other) for other, _ in wrong if other is not region):
            continue
        if judged.incomparable or chooses(region):
            uncovered |= {(side, call) for side in (0, 1) for call in region.calls[side]}
            continue
        its = (one for other, one in wrong if other is region or is_part_of(other, region))  # its backward may leave no doubt
        certain = any(one.is_certain(criterion) for one in its)
        suspects.append(Suspect(judged, "region", certain, region_operators(region), sides=region.sides, added=added(region)))
    uncovered = {(side, call) for side, call in uncovered if call not in excused.rewritten[side]}
    part.uncovered = [(SIDES[side], tree.streams[side].row(call)) for side, call in sorted(uncovered)]
    left = [sorted(set(calls) - settled.keys()) for calls, settled in zip(loose, regions.settled, strict=True)]
    waiting = (one for one in sorted({*dead} - uncovered) if one[1] not in excused.rewritten[one[0]])
    origins.leave([*regions.lasting(), *((side, tree.streams[side].row(call)) for side, call in waiting)], tree.streams, left)
    if agreed := sorted(regions.settled[1].items()):  # of these a later step may read
        origins.errors.append((tree.streams[1].seq[[call for call, _ in agreed]], np.array([error for _, error in agreed])))
    return suspects


def _goes_on(region: Region, wrong: list[tuple[Region, Judged]], criterion: Criterion) -> bool:
    """Tell whether a run of calls is a forward, and what is certainly wrong is in its backward, too."""
    later = (other for other, one in wrong if not one.incomparable and one.is_certain(criterion))
    phases = {its.exits[0][0].call.candidate.phase for its in (region, *(one for one in later if is_part_of(one, region)))}
    return phases == {"forward", "backward"} and region.exits[0][0].call.candidate.phase == "forward"


def _phases_of_one(tree: Tree) -> list[tuple[int, int]]:
    """Return the unmatched calls of a forward or a backward that the other side has nothing of."""
    if tree.is_foreign:
        return []
    found = []
    for phase in ("forward", "backward"):
        calls = [stream.during(phase) for stream in tree.streams]
        found += [(s, c) for s in (0, 1) if not calls[1 - s].any() for c in tree.unmatched[s].tolist() if calls[s][c]]
    return found


def _parts(flow: tuple[Readers, Readers], loose: tuple[list[int], list[int]], criterion: Criterion) -> tuple[Parts, Parts]:
    unit = min(coarsest(side.stream) for side in flow)
    first, second = (Parts(side, np.array(calls, np.int64), criterion, unit) for side, calls in zip(flow, loose, strict=True))
    return first, second


def _finest(found: list[int], alone: Iterable[Suspect], criterion: Criterion, tree: Tree, readers: Readers) -> list[Suspect]:
    """Suspect calls, but those of which a finer level accounts for the error, or a region inside. A function that is certainly
    wrong is so by the one suspect inside that it has, though less is known of it. What shares its gradient is left open."""
    calls = tree.verdicts.errors.calls[1]
    certain = [int(calls[pair]) for pair in found if tree.verdicts.at(pair).is_certain(criterion)]
    speaking = {around for call in certain for around in tree.around(call)}
    for suspect in alone:
        rows = (suspect.judged.call.baseline, suspect.judged.call.candidate)
        for side in (0, 1) if suspect.certain else ():
            pairs = tree.pairs[side][tree.around(tree.streams[side].find(rows[side].seq), side)] if suspect.sides[side] else ()
            speaking |= {int(calls[pair]) for pair in pairs if pair != NONE}
    finest = [pair for pair in found if calls[pair] not in speaking and not tree.resolved(pair)]
    shared = [pair for pair in finest if _is_shared(pair, tree, readers)]
    tree.verdicts.leave_open(shared, Reason(Why.INPUTS))
    finest = [pair for pair in finest if pair not in shared]
    functions = {call for call in certain if tree.streams[1].of_level("api")[call]}
    inside = Counter(around for pair in finest for around in tree.around(int(calls[pair])) if around in functions)
    suspects = [_suspect(pair, criterion, tree) for pair in finest]
    for pair, suspect in zip(finest, suspects, strict=True):
        suspect.certain = suspect.certain or any(inside[around] == 1 for around in tree.around(int(calls[pair])))
    return [_reshaping(suspect, tree) for suspect in suspects]


def _reshaping(suspect: Suspect, tree: Tree) -> Suspect:
    """Return in place of a suspect the first call inside it that makes another number of elements of inputs that agree."""
    verdicts, errors = tree.verdicts, tree.verdicts.errors
    asked = suspect.kind == "operator" and not tree.is_foreign
    for call in sorted(tree.inside(tree.streams[1].find(suspect.place))) if asked else ():
        pair = int(tree.pairs[1][call])
        its = errors.entries(pair) if pair in verdicts.incomparable and verdicts.error_in[pair] < HALF else ()
        numel = [[stream.numel[slots[n]] for n in its] for stream, slots in zip(tree.streams, errors.slots, strict=True)]
        other = [n for n, first, second in zip(its, *numel, strict=True) if first != second]
        if other and errors.outputs[other].all():  # what it was given has as many
            verdicts.set_apart(pair)
            because = (errors.reasons[other[0]],)
            found = Suspect(verdicts.at(pair), "operator", suspect.certain, tree.operators(call), because=because, independent=True)
            return _reshaping(found, tree)
    return suspect


def _suspect(pair: int, criterion: Criterion, tree: Tree) -> Suspect:
    judged = tree.verdicts.at(pair)
    call, (baseline, candidate) = judged.call, tree.streams
    kind: Kind = "operator"
    if (call.arguments is not None and not equal_arguments(*call.arguments)) or any(map(is_input, call.one_sided)):
        kind = "argument"
    elif judged.row.random and not _same_draw(judged, baseline, candidate):
        kind = "random"
    index = int(tree.verdicts.errors.calls[1][pair])
    around = tree.around(index)
    parent = candidate.row(around[0]) if around else None
    api = parent.op if parent is not None and parent.level == "api" else None
    certain = judged.is_certain(criterion) or (kind == "argument" and judged.error_in == 0)
    worst = call.slots.get(judged.worst or "")
    unit = roundoff(baseline.dtype_of(worst.baseline)) if worst is not None else 0.0
    return Suspect(judged, kind, certain, tree.operators(index), api, unit=unit or 2.0**-24)


def _same_draw(judged: Judged, baseline: Stream, candidate: Stream) -> bool:
    """Tell whether a random operator drew the same numbers on both sides, so that only its arithmetic can differ. Different masks
    have as many zeros only by chance; the same draw with another scale has a cosine of sketches of 1, as any two numbers have."""
    error = judged.call.slots.get(judged.worst or "")
    if error is None or baseline.numel[error.baseline] == 1:
        return False
    b, c = baseline.sketch[error.baseline], candidate.sketch[error.candidate]
    norms = float(np.linalg.norm(b) * np.linalg.norm(c))
    return norms > 0 and float(np.dot(b, c)) / norms > 0.999


def _inputs(part: Part, tree: Tree, criterion: Criterion, excused: Reconvergence, *, from_start: bool) -> list[Suspect]:
    """Find the first tensor that no recorded call produced and that differs: the data, the weights, a state. Where a call without
    counterpart produced it on the candidate (a weight is cast there first), that call is suspected, unless it is excused."""
    verdicts = tree.verdicts
    tolerance = criterion.input_units * SINGLE if from_start else SMALL
    errors, candidate = verdicts.errors, verdicts.errors.streams[1]
    phases = np.isin(candidate.phase, [candidate.names.number(phase) for phase in ENTERING])
    unmade = errors.streams[0].producer[errors.slots[0]]
    handing = from_root(candidate)[errors.calls[1][errors.pair]]
    unmade = np.where(handing, errors.streams[0].index(unmade), unmade) == NONE  # what copied it there may be of another level
    enters = errors.inputs & (phases[errors.calls[1][errors.pair]] | handing) & unmade
    limit = np.maximum.reduce([np.full(len(errors.pair), tolerance), verdicts.tolerated, may_have_grown(tree)])
    differ = enters & ((errors.relative > limit) | ~same_shapes(errors))
    producers = candidate.producers[errors.slots[1]]
    alone = tree.pairs[1][producers] == NONE
    entries = [
        n for n in np.flatnonzero(differ & alone).tolist() if not excused.holds(int(errors.pair[n]))
        and not excused.readers[1].parts(int(errors.slots[1][n]))
        and not comes_from_between(candidate, int(errors.calls[1][errors.pair[n]]), candidate.names.names[int(errors.names[n])])
    ]  # fmt: skip
    first, use = _first_used(entries, tree, part)
    if first == NONE:
        return []
    error, judged, producer = errors.distance(first), verdicts.at(int(errors.pair[first])), int(producers[first])
    if candidate.producer[error.candidate] == NONE or (use == "handed out" and producer == NONE):
        because = (Why.HANDED_OUT(candidate.rank),) if use == "handed out" else ()
        return [Suspect(judged, "input", not error.unsized, reason=error.slot, because=because)]
    calls = {producer} - {NONE}
    region = Region(tree, [(judged, error, [(1, call) for call in calls])], (set(), calls))
    made = judge_region(region, criterion, _parts(excused.readers, ([], sorted(calls)), criterion))
    certain = made.is_certain(criterion)
    if made.ratio <= criterion.suspect:
        return []
    return [Suspect(made, "region", certain, region_operators(region), sides=region.sides)]


def _first_used(entries: list[int], tree: Tree, part: Part) -> tuple[int, Use]:
    """Return the first of some entries that no call made which is used, and for what; what is replaced unused goes to the part."""
    errors, stream = tree.verdicts.errors, tree.streams[1]
    if not from_root(stream).any():
        return entries[0] if entries else NONE, "read"
    for n in entries[:MOST_ENTRIES]:
        use = use_of(stream, int(errors.calls[1][errors.pair[n]]))
        if use != "moved":
            return n, use
    if entries and len(entries) <= MOST_ENTRIES and receives(stream):
        part.replaced = entries[0]
        part.unexplained = [found for found in part.unexplained if not _is_only_moved(*found, tree)]
        return NONE, "moved"
    return entries[0] if entries else NONE, "moved"


def _is_only_moved(judged: Judged, slot: str, tree: Tree) -> bool:
    stream, k = tree.streams[1], judged.call.slots[slot].candidate
    return stream.producer_of(k) is None and use_of(stream, stream.find(judged.call.candidate.seq)) == "moved"


def _later_inputs(unexplained: Iterable[tuple[Judged, str]], streams: tuple[Stream, Stream], origins: Origins) -> list[Suspect]:
    """Find the first tensor of a later step that no recorded call produced and that differs: the batch, or a weight."""
    for judged, slot in unexplained:
        if _enters(judged, slot, streams):
            weight = is_weight(slot)
            if weight and (origins.told or not (origins.updated is None or origins.updated.sure)):
                continue  # it is left unexplained
            origins.told = origins.told or weight
            return [Suspect(judged, "input", True, reason=slot, because=optimizer_updates.why(slot, origins.updated))]
    return []


def _enters(judged: Judged, slot: str, streams: tuple[Stream, Stream]) -> bool:
    """Tell whether a slot reads, in the forward, a tensor that no recorded call produced."""
    if judged.call.candidate.phase not in ENTERING:
        return False
    error = judged.call.slots[slot]
    if is_weight(slot) and all(map(optimizer_updates.is_unseen, streams)):
        return True
    if comes_from_between(streams[1], streams[1].find(judged.call.candidate.seq), slot):
        return False
    return streams[0].producer_of(error.baseline) is None and streams[1].producer_of(error.candidate) is None


def _arguments(part: Part, criterion: Criterion, known: Sequence[Suspect], excused: Reconvergence) -> list[Suspect]:
    """Find calls given other scalars, whose results show it, and which are not suspects yet. If results agree within rounding the
    part notes it. What an optimizer is given acts again in every step, so there any effect counts; and where limits decide. Where
    inputs differ, another word (a mode, a switch) is shown by results that are further off than chance makes of them."""
    verdicts, optimizer = part.verdicts, part.streams[1].names.number("optimizer")
    suspected = {id(s.judged) for s in known}
    found = []
    for pair, arguments in verdicts.errors.arguments.items():
        if excused.holds(pair):
            continue
        lost, judged = pair in verdicts.incomparable, verdicts.at(pair)  # of another shape, it is not measured
        error, given = judged.error_out, judged.error_in
        if (error == 0 and not lost) or id(judged) in suspected or equal_arguments(*arguments):
            continue
        if given > 0 and not (other_words(*arguments) and error > CHANCE * max(given, judged.own)):
            continue
        lasts = part.streams[1].phase[verdicts.errors.calls[1][pair]] == optimizer
        shows = judged.ratio > criterion.suspect or _is_recast(judged, part.streams)
        if lost or lasts or shows or criterion.limits or given > 0:
            found.append(Suspect(judged, "argument", True))
        else:
            part.harmless.append(judged)
    return found


def _rewired(tree: Tree, excused: Reconvergence) -> list[Suspect]:
    """Find calls that were given the result of another call than their counterparts."""
    found, errors = [], tree.verdicts.errors
    for pair, entry in dict(reversed(excused.rewired)).items():  # the first of each call
        if not excused.pair(pair, errors.distance(entry).slot):
            sides, judged = zip(tree.streams, errors.slots, strict=True), tree.verdicts.at(pair)
            makers = [stream.row(int(stream.producers[slots[entry]])).key for stream, slots in sides]
            alike = len({(maker.op, maker.scope) for maker in makers}) == 1
            why = Why.READS(judged.call.candidate.key, *makers, *(maker.ordinal if alike else None for maker in makers))
            found.append(Suspect(judged, "argument", True, because=(why,), independent=True))
    for pair, entry, why in exchanged(tree):
        if not excused.pair(pair, errors.distance(entry).slot):
            found.append(Suspect(tree.verdicts.at(pair), "argument", True, because=(why,), independent=True))
    return found


def _lone(part: Part, tree: Tree, origins: Origins) -> list[Suspect]:
    """Find the first call that was given what one run alone made, or the optimizer's step of a run that did not go backward."""
    for judged, slot in part.unexplained:
        lone = origins.lone_maker(tree, judged.call.slots[slot])
        if lone is not None and judged.call.candidate.phase in (*ENTERING, "optimizer"):
            return [Suspect(judged, "argument", True, because=(lone,), independent=True)]
    steps = np.flatnonzero(tree.streams[1].during("optimizer")[tree.verdicts.errors.calls[1]])[:1].tolist()
    idle = [side for side, of in zip(SIDES, tree.streams, strict=True) if not (of.during("backward") | of.of_level("module")).any()]
    if len(idle) != 1 or tree.is_foreign or not all("backward" in seen for seen in origins.seen):
        return []
    return [Suspect(tree.verdicts.at(pair), "argument", True, because=(Why.STEPS_AGAIN(*idle),)) for pair in steps]


def _lawless(
    part: Part, tree: Tree, criterion: Criterion, known: Sequence[Suspect], origins: Origins, own_errors: OwnErrors | None
) -> list[Suspect]:
    """Find calls that break by themselves what they keep in the baseline; what is known of them is that no input is a reason."""
    origins.wrong = origins.wrong or denormalised(tree, criterion)
    if criterion.limits or not origins.wrong:
        return []
    suspects = {id(s.judged): s for s in known}
    found = []
    facts = Facts(tree, criterion)
    broken = facts.shifted(origins.shifts) | facts.broken() | Laws(tree, criterion).broken()
    broken |= _wrong_by_themselves(part, tree, own_errors) if own_errors is not None else {}
    for pair, why in broken.items():
        suspect = suspects.get(id(tree.verdicts.at(pair)))
        if suspect is None:
            suspect = _suspect(pair, criterion, tree)
            found.append(suspect)
        if suspect.kind == "operator":
            suspect.certain, suspect.independent, suspect.because = True, True, (why,)
    calls = {id(s): tree.streams[1].find(s.judged.call.candidate.seq) for s in (*known, *found) if s.certain}
    speaking = {around for call in calls.values() for around in tree.around(call)}  # the call inside says it
    return [suspect for suspect in found if suspect.independent and calls[id(suspect)] not in speaking]


def _wrong_by_themselves(part: Part, tree: Tree, own_errors: OwnErrors) -> dict[int, Reason]:
    """Ask of each call whose inputs differ, and with them its results, whether it computed well what it was given."""
    verdicts, errors = tree.verdicts, tree.verdicts.errors
    computes = np.bincount(errors.pair[errors.outputs], minlength=len(verdicts)) > 0
    asked = np.flatnonzero((verdicts.role >= CARRIED_ON) & (verdicts.error_in > 0) & computes & tree.leaves)
    seqs = [stream.seq[calls[asked]].tolist() for stream, calls in zip(tree.streams, errors.calls, strict=True)]
    told = own_errors(part.rank, list(zip(*seqs, strict=True)))
    part.own_errors = len(asked), len(told), sum(why is None for why in told.values())
    return {pair: why for pair, seq in zip(asked.tolist(), seqs[1], strict=True) if (why := told.get(seq)) is not None}


def _apart_from_siblings(
    tree: Tree, criterion: Criterion, known: Sequence[Suspect], excused: Reconvergence, exact: int | None
) -> list[Suspect]:
    """Find calls that differ of equal inputs within what rounding explains, and no other that does the same differs at all."""
    speaking, found = {s.place for s in known}, []
    for pair, sibling in siblings.unlike(tree, exact=exact is not None).items():
        suspect = _suspect(pair, criterion, tree)
        if suspect.place not in speaking and not excused.holds(pair):
            other = tree.verdicts.at(pair if sibling == NONE else sibling).call.candidate
            suspect.because = (Why.ALONE(f"{other.scope or other.op}{f' of step {exact}' if sibling == NONE else ''}"),)
            found.append(suspect)
    return found


def _settings(part: Part, tree: Tree, known: Sequence[Suspect], *, chosen: bool) -> list[Suspect]:
    """Find calls given other scalars whatever their inputs; make known ones certain. A backward is given what its forward was."""
    verdicts, stream = part.verdicts, part.streams[1]
    backward = stream.phase[verdicts.errors.calls[1]] == stream.names.number("backward")
    shown = {key_of(s.judged) for s in known if s.kind == "argument" and s.certain and s.judged.error_in == 0}
    suspects = {id(s.judged): s for s in known if s.kind == "argument"}
    found = []
    for pair, arguments in verdicts.errors.arguments.items():
        clean = verdicts.error_in[pair] == 0 or verdicts.error_out[pair] == 0
        if clean or backward[pair] or equal_arguments(*arguments):
            continue
        judged = verdicts.at(pair)
        if key_of(judged) in shown or (chosen and are_chosen(judged, tree)):
            suspect = suspects.get(id(judged)) or Suspect(judged, "argument", True)
            suspect.certain = suspect.independent = True
            if id(judged) not in suspects:
                found.append(suspect)
    return found


def _is_recast(judged: Judged, streams: tuple[Stream, Stream]) -> bool:
    """Tell whether an output has a coarser dtype for it: its rounding is then what was asked for. A finer one rounds less."""
    outputs = (error for name, error in judged.call.slots.items() if is_output(name))
    return any(roundoff(streams[1].dtype_of(error.candidate)) > roundoff(streams[0].dtype_of(error.baseline)) for error in outputs)


def rank_culprits(suspects: Iterable[Suspect], tainted: Mapping[int, tuple[int, int]] | None = None) -> list[Suspect]:
    """Put the culprits first, in the order in which their results were there, and leave out what an earlier one explains.

    A later one is a culprit of its own where its error stays when those of its inputs are accounted for, with what its forward
    saved; an input that no recorded call made may come from a difference unseen. Certain ones go first. Within a step, what
    happens on a rank after another one's difference reached it (``tainted``: by rank, the step and place) comes last."""
    reached, culprits, known = tainted or {}, list[Suspect](), set[tuple[int, int, int | None]]()

    def order(s: Suspect) -> tuple[int, bool, int, int, int]:
        return s.step, s.rank in reached and (s.step, s.place) > reached[s.rank], s.ready, s.place, s.rank

    ordered = _first_of_a_kind(_innermost(sorted(suspects, key=order)))
    for suspect in sorted(ordered, key=lambda s: not s.certain):
        if not suspect.certain and culprits:
            continue
        together = suspect.phase == "collective" and any(c.rank != suspect.rank for c in culprits)  # it shows on all ranks
        whys, call = {reason.why for reason in suspect.because}, suspect.judged.call.candidate
        saved = (suspect.rank, suspect.step, call.forward_seq) in known
        if {Why.LAW, Why.RECOMPUTED} & whys:  # what an operator saved is an input of the one that reads it, and so accounted for
            saved &= call.level != "aten"
        if Why.LAW in whys:  # what a wrong function saved keeps no law in its gradient
            saved |= any(c.phase != suspect.phase and _function(c) == _function(suspect) for c in culprits)
        carried = suspect.kind == "input" or suspect.judged.error_in >= GONE  # an input no call made may hold it unseen
        if suspect.kind == "random":  # an earlier one, or its lack, left the generator elsewhere
            carried |= any(c.judged.row.random for c in culprits) or Why.DREW_BEFORE in whys
        if not culprits or not (saved or ((together or carried) and not suspect.independent)):
            culprits.append(suspect)
            known |= {(suspect.rank, suspect.step, seq) for seq in (suspect.place, call.parent) if seq is not None}
    return culprits


def _innermost(ordered: Iterable[Suspect]) -> list[Suspect]:
    """Leave out calls that began before another suspect and ended after it: they may have computed with its results, as a
    backward that recomputes its forward. A communication computes with nothing that runs meanwhile."""
    latest: dict[tuple[int, int], int] = {}
    found = []
    for suspect in ordered:
        at = suspect.step, suspect.rank
        if suspect.phase == "collective" or suspect.began >= latest.get(at, NONE):
            found.append(suspect)
        latest[at] = max(latest.get(at, NONE), suspect.began)
    return found


def _first_of_a_kind(ordered: list[Suspect]) -> list[Suspect]:
    """Make certain the earliest suspect of the operator that is the first certain one. A broken operator shows wherever it runs,
    and in its gradient; where its error is small it could be rounding, were it not for the others. Not what optimizers made of all
    weights: each step shows by itself."""
    certain = next((s for s in ordered if s.certain), None)
    if certain is None or certain.kind != "operator" or certain.judged.call.candidate.op == STEP:
        return ordered
    first = next(s for s in ordered if s.kind == "operator" and _function(s) == _function(certain))
    first.certain = True
    return ordered


def _function(suspect: Suspect) -> tuple[str, ...]:
    """Return what tells functions from one another, a function's own backward from no forward of it."""
    call = suspect.judged.call.candidate
    name, of, _ = normalised(call.op).partition("_backward")
    backward = call.phase == "backward" and (call.level != "aten" or of != "")
    return call.level, "forward" if backward else call.phase, name
