"""Gradients that one run alone makes: behind ``detach()``, ``no_grad()`` or a frozen weight the other's backward ends early.

What is not there is a gradient of zero to whoever would read it. So the call that makes it on one side alone is where the runs
part, whatever its inputs' errors, and all that lies behind has no counterpart. Likewise the optimizer's step that updates a
weight on one side alone, though both sides make its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trueup.comparison.graph.streams import NONE
from trueup.comparison.normalise.updates import STEP
from trueup.comparison.verdict.judged import SIDES, Suspect, Tree
from trueup.comparison.verdict.regions import Call
from trueup.comparison.verdict.rewritten import Reconvergence
from trueup.foundation.facts.slots import is_gradient_of_input, is_gradient_of_step
from trueup.foundation.facts.why import Why


def parted(tree: Tree, excused: Reconvergence) -> tuple[list[Suspect], set[Call]]:
    """Return the innermost calls that make a gradient, or update a weight, on one side alone, the first of those that autograd
    adds up for one reader; and the calls that read what is lost."""
    verdicts, calls = tree.verdicts, tree.verdicts.errors.calls[1]
    lost = dict(_lost(tree, excused))
    around = {other for pair in lost for other in tree.around(int(calls[pair]))}
    suspects, read = list[Suspect](), set[Call]()
    for pair in sorted(pair for pair in lost if calls[pair] not in around):
        side, names, readers = lost[pair]
        if read.isdisjoint(readers):
            verdicts.set_apart(pair)
            row, more = verdicts.at(pair).call.candidate, max(len(names) - 3, 0) or None
            why = Why.NOT_UPDATED if row.op == STEP else Why.NO_GRADIENT
            because = (why(SIDES[side], ", ".join(sorted(names)[:3]), more, row.scope or row.op),)
            suspects.append(Suspect(verdicts.at(pair), "operator", True, because=because, independent=True))
        read |= readers
    return suspects, read


def _lost(tree: Tree, excused: Reconvergence) -> Iterator[tuple[int, tuple[int, list[str], set[Call]]]]:
    """Yield calls with the side that lacks gradients which the other one uses, of what they are, and who reads them there."""
    errors = tree.verdicts.errors
    for pair in errors.one_sided if not tree.is_foreign else ():
        rows = [stream.slots(int(calls[pair])) for stream, calls in zip(tree.streams, errors.calls, strict=True)]
        for side in (0, 1):  # that has them
            alone = {tree.streams[side].names.names[n]: rows[side][n] for n in rows[side].keys() - rows[1 - side].keys()}
            used = {slot: its for slot, k in alone.items() if (its := _users(tree, excused, side, slot, k))}
            if used and not excused.pair(pair) and not excused.holds(pair):
                names = [slot.removeprefix("grad_").removeprefix("gradient.") for slot in used]
                yield pair, (1 - side, names, set().union(*used.values()))
                break


def _users(tree: Tree, excused: Reconvergence, side: int, slot: str, k: int) -> set[Call]:
    """Return who reads a gradient, by side: nobody if it is one of zeros, or if their counterparts get one from somewhere else (a
    weight that autocast casts). Of a step both sides made what it alone reads."""
    stream, other, made = tree.streams[side], tree.streams[1 - side], int(tree.streams[side].producers[k])
    if not (0 < stream.l2[k] < np.inf):
        return set()
    if is_gradient_of_step(slot):
        if slot.removeprefix("gradient.") not in other.left_alone.get(int(stream.step[stream.call[k]]), ()):
            return set()  # it may have been updated there by what a damaged capture lacks, or be tied to another
        return {(side, int(stream.call[k]))} if made != NONE and tree.pairs[side][made] != NONE else set()
    found = set()
    for reader in excused.read_by[side](k) if is_gradient_of_input(slot) else ():
        pair = int(tree.pairs[side][stream.call[reader]])
        if pair == NONE or int(stream.slot[reader]) not in other.slots(int(tree.verdicts.errors.calls[1 - side][pair])):
            found.add((side, int(stream.call[reader])))
    return found
