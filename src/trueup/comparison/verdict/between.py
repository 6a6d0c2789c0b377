"""Modules that make a difference by themselves, between the modules inside them, where only modules were compared.

A module's own arithmetic, the attention between its projections, a residual addition, is no call of level module. What it gets
wrong comes in at the module that reads it, which only passes it on; so the module around them is the one whose inputs agree and
whose outputs do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from trueup.comparison.graph.streams import NONE, Stream, is_weight
from trueup.comparison.verdict.criteria import Criterion
from trueup.comparison.verdict.judged import Judged
from trueup.comparison.verdict.origins import LEAST
from trueup.comparison.verdict.tree import Tree, only_modules

Unexplained = tuple[Judged, str]
"""A call, and the slot where a difference comes in that no compared call made."""


def arising_inside(
    unexplained: Iterable[Unexplained], tree: Tree, criterion: Criterion
) -> tuple[list[int], list[Unexplained]]:
    """Return the matched modules inside which differences arise that came in unseen, and those that this leaves open.

    The innermost module around the reader that was compared as a whole answers, if its own outputs are certainly wrong. Dumps of
    other tools tell inputs by statistics at best, and modules of two frameworks are not the same: of those nothing is said.
    """
    stream = tree.streams[1]
    module, found, left = stream.names.number("module"), dict[int, None](), []
    known = only_modules(stream) and stream.neutral is None and not any(side.imported for side in tree.streams)
    for judged, slot in unexplained:
        call = stream.find(judged.call.candidate.seq)
        around = tree.covering(call, 1)[:1] if known and stream.level[call] == module and not is_weight(slot) else []
        if around and tree.verdicts.at(around[0]).is_certain(criterion):
            found[around[0]] = None
        else:
            left.append((judged, slot))
    return list(found), left


def came_in(unexplained: Sequence[Unexplained], stream: Stream) -> Callable[[Judged], bool]:
    """Return what tells of a module whether its inputs differ, once a difference came in unseen: it may then only pass that on.

    Weights do not count: one that differs is read by one module. Nor does anything where functions or operators were recorded too.
    """
    if not unexplained or not only_modules(stream):
        return lambda judged: False  # noqa: ARG005
    first = min((judged.call.candidate.seq for judged, slot in unexplained if not is_weight(slot)), default=None)
    return lambda judged: first is not None and judged.call.candidate.seq >= first and judged.error_in > LEAST


def comes_from_between(stream: Stream, call: int, slot: str) -> bool:
    """Tell whether nothing shows who made an input, for only modules were recorded and it is of one inside another."""
    if is_weight(slot) or not only_modules(stream):
        return False
    return bool(stream.level[call] != stream.names.number("module") or stream.parents[call] != NONE)  # or it is the loss
