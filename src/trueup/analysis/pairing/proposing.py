"""Which layer of one model is which of another: by names, by order and structure, by classes and shapes, then by statistics.

Two layers may only be a pair where they are the same row of `frameworks` and their tensors have the same neutral shapes. A
square matrix is told by its layer's class alone: of a class that no table has it is not known whether it is transposed, and the
pair is unsure. Pairs come, in this order, from

1. equal names, and names that are equal but for what separates their parts (``layer1_0_bn2`` of a functional model);
2. order: what is left is aligned as two sequences, so that kinds and shapes agree and names are as alike as can be;
3. statistics: where several layers could be the pair, those whose weights have the same norms are it.

What surrounds paired layers is paired by what it contains, and what has no tensors by its class and place there.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from trueup.analysis.pairing.weights import inside_recurrent, is_ambiguous
from trueup.comparison.verdict.align import best_pairs
from trueup.foundation.frameworks.trees import Node, Tree, path

SAME = 1e-4
"""Relative difference of norms up to which two weights are taken for the same; float32 norms of large tensors."""

MOST = 2000
"""Layers of a side beyond which only equal names are looked for: sequences are aligned in quadratic time."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A module of the baseline and one of the candidate."""

    baseline: str
    candidate: str
    kind: str = ""
    """Row of `trueup.foundation.frameworks`, empty where the tables have none."""
    by: str = "name"
    """``name``, ``order``, ``statistics`` or ``structure``."""
    unsure: str = ""
    """Why it may be another one."""


@dataclass(frozen=True)
class Proposal:
    """How two models line up."""

    baseline: Tree
    candidate: Tree
    pairs: tuple[Pair, ...]
    only_baseline: tuple[str, ...] = ()
    """Modules with tensors that have no counterpart."""
    only_candidate: tuple[str, ...] = ()

    @property
    def unsure(self) -> tuple[Pair, ...]:
        """Pairs that somebody should look at."""
        return tuple(pair for pair in self.pairs if pair.unsure)

    def alone(self, side: str) -> list[str]:
        """Return the modules of a side that have tensors and no counterpart, those included that the other framework packs."""
        tree = self.baseline if side == "baseline" else self.candidate
        taken = {getattr(pair, side) for pair in self.pairs}
        free = [scope for scope, node in tree.nodes.items() if node.tensors and scope not in taken]
        return [scope for scope in free if not inside_recurrent(tree, scope)]

    @property
    def modules(self) -> dict[str, str]:
        """The candidate's modules with their names in the baseline."""
        return {pair.candidate: pair.baseline for pair in self.pairs}

    def __str__(self) -> str:
        layers = sum(bool(pair.kind) for pair in self.pairs)
        lines = [f"{layers:,} layers paired, {len(self.pairs) - layers:,} other modules, {len(self.unsure):,} unsure"]
        lines += [f"  unsure: {pair.candidate or 'all'} as {pair.baseline or 'all'}: {pair.unsure}" for pair in self.unsure]
        for side, names in (("baseline", self.only_baseline), ("candidate", self.only_candidate)):
            lines += [f"  only in the {side}: {name}" for name in names]
        return "\n".join(lines)


Signature = tuple[object, ...]

_PARTS = re.compile(r"[._/]+")
"""What separates the parts of a name."""


@dataclass(slots=True)
class _Side:
    tree: Tree
    layers: dict[str, Signature] = field(default_factory=dict)
    """Modules with tensors or a known kind, in order, with what must agree."""


def propose(baseline: Tree, candidate: Tree) -> Proposal:
    """Pair the modules of two models."""
    sides = _side(baseline, candidate), _side(candidate, baseline)
    found: dict[str, Pair] = {}
    for scope, signature in sides[0].layers.items():
        if sides[1].layers.get(scope) == signature:
            found[scope] = _pair(baseline, scope, scope, "name")
    _by_spelling(sides, found)
    _by_order(sides, found)
    _by_statistics(sides, found)
    _around(baseline, candidate, found)
    left = [
        tuple(
            scope for scope in side.layers
            if scope not in taken and side.tree.nodes[scope].tensors and not _is_packed(side.tree, scope, taken)
        )
        for side, taken in zip(sides, (set(found), {pair.candidate for pair in found.values()}), strict=True)
    ]
    order = [scope for scope in baseline.nodes if scope in found]
    return Proposal(baseline, candidate, tuple(found[scope] for scope in order), left[0], left[1])


def _is_packed(tree: Tree, scope: str, taken: set[str]) -> bool:
    """Tell whether the other framework packs a layer's tensors into those of the layer around it, which has a counterpart."""
    outer, _, name = scope.rpartition(".")
    layer = tree.layer(outer) if outer in taken else None
    own = () if layer is None else layer.own.values()
    packed = {part for column in own for parts in column.packed.values() for part in parts}
    return all(path(name, tensor) in packed for tensor in tree.nodes[scope].tensors)


def _side(tree: Tree, other: Tree) -> _Side:
    side = _Side(tree)
    inside: list[str] = []
    for scope, node in tree.nodes.items():
        if any(scope.startswith(f"{one}.") for one in inside):
            continue
        layer = tree.layer(scope)
        if layer is not None and layer.tensors == ("*",):
            inside.append(scope)
        if layer is None and not node.tensors:
            continue
        side.layers[scope] = _signature(tree, node, other)
    return side


def _signature(tree: Tree, node: Node, other: Tree) -> Signature:
    """Return what must agree: the kind, and the neutral shapes of tensors that neither framework packs with others."""
    layer = tree.layer(node.scope)
    if layer is None:
        return ("", *sorted((name, shape) for name, shape in node.tensors.items()))
    own = layer.own[tree.framework]
    columns = [layer.own[side.framework] for side in (tree, other) if side.framework in layer.own]
    packed = {part for column in columns for parts in column.packed.values() for part in parts}
    found = []
    for name, held in node.tensors.items():
        shape = held or ()
        neutral = own.tensors.get(name, name)
        if name in own.ignored or name in own.packed or neutral in packed or (layer.tensors == ("*",) and "." in name):
            continue
        axes = own.axes.get(neutral)
        turned = tuple(shape[n] for n in axes) if axes is not None and len(axes) == len(shape) else shape
        found.append((neutral, (math.prod(turned),) if neutral in own.reshaped else turned))
    return (layer.name, *sorted(found))


def _pair(tree: Tree, baseline: str, candidate: str, by: str, unsure: str = "") -> Pair:
    layer = tree.layer(baseline)
    node = tree.nodes[baseline]
    square = [n for n, shape in node.tensors.items() if is_ambiguous(shape or ())]
    if layer is None and square and not unsure:
        unsure = f"{node.kind} is in no table, and {square[0]} has equal sizes: nothing tells whether it is transposed"
    return Pair(baseline, candidate, "" if layer is None else layer.name, by, unsure)


def _by_spelling(sides: tuple[_Side, _Side], found: dict[str, Pair]) -> None:
    """Pair layers whose names are equal but for dots, underscores and slashes, where no other on its side has that name."""
    taken = {pair.candidate for pair in found.values()}
    spelled: tuple[dict[str, list[str]], dict[str, list[str]]] = {}, {}
    for names, side, known in zip(spelled, sides, (set(found), taken), strict=True):
        for scope in side.layers:
            if scope not in known:
                names.setdefault(_PARTS.sub("_", scope), []).append(scope)
    for name, scopes in spelled[0].items():
        others = spelled[1].get(name, [])
        if len(scopes) == len(others) == 1 and sides[0].layers[scopes[0]] == sides[1].layers[others[0]]:
            found[scopes[0]] = _pair(sides[0].tree, scopes[0], others[0], "name")


# ---------------------------------------------------------------- order
def _by_order(sides: tuple[_Side, _Side], found: dict[str, Pair]) -> None:
    taken = {pair.candidate for pair in found.values()}
    left = [[s for s in sides[0].layers if s not in found], [s for s in sides[1].layers if s not in taken]]
    if not all(0 < len(one) <= MOST for one in left):
        return
    kinds = [[side.layers[scope] for scope in scopes] for side, scopes in zip(sides, left, strict=True)]
    counts = [Counter(one) for one in kinds]
    for i, j in _aligned(left, kinds):
        kind, number = kinds[0][i], (counts[0][kinds[0][i]], counts[1][kinds[0][i]])
        unsure = ""
        if number[0] != number[1]:
            unsure = f"chosen by order among {number[0]} layers of its kind and shape here and {number[1]} there"
        tree = sides[0].tree
        found[left[0][i]] = _pair(tree, left[0][i], left[1][j], "order", unsure if len(kind) > 1 else "")


def _aligned(names: list[list[str]], kinds: list[list[Signature]]) -> list[tuple[int, int]]:
    """Align two sequences so that as many kinds agree as can, and of those alignments the names most."""
    n, m = len(names[0]), len(names[1])
    score = np.zeros((n, m))
    for i in range(n):
        for j in range(m):
            if kinds[0][i] == kinds[1][j]:
                score[i, j] = 1.0 + 0.1 * _alike(names[0][i], names[1][j])
    return best_pairs(score)


def _alike(first: str, second: str) -> float:
    """Return how much of two names is the same, 0 to 1: parts in common, the last of them counting double."""
    one, two = _PARTS.split(first), _PARTS.split(second)
    shared = sum((Counter(one) & Counter(two)).values()) + (one[-1] == two[-1])
    return 2.0 * shared / (len(one) + len(two) + 2)


# ---------------------------------------------------------------- statistics
def _by_statistics(sides: tuple[_Side, _Side], found: dict[str, Pair]) -> None:
    """Put layers right that several could be, where weights of equal norms tell which; say where they contradict."""
    groups: dict[Signature, list[str]] = {}
    for scope in found:
        groups.setdefault(sides[0].layers[scope], []).append(scope)
    for signature, scopes in groups.items():
        others = [s for s, kind in sides[1].layers.items() if kind == signature]
        norms = [_norms(side, one) for side, one in zip(sides, (scopes, others), strict=True)]
        told = {b: [c for c in others if _equal(norms[0][b], norms[1][c])] for b in scopes}
        once = {b: cs[0] for b, cs in told.items() if len(cs) == 1}
        if len(set(once.values())) != len(once) or not once:
            continue
        if len(once) == len(scopes):
            for b, c in once.items():
                if found[b].candidate != c or found[b].unsure:
                    found[b] = _pair(sides[0].tree, b, c, "statistics")


def _norms(side: _Side, scopes: Iterable[str]) -> dict[str, tuple[float, ...]]:
    found = {}
    for scope in scopes:
        layer, node = side.tree.layer(scope), side.tree.nodes[scope]
        own = layer.own[side.tree.framework] if layer is not None else None
        names = [
            (own.tensors.get(name, name) if own else name, norm) for name, norm in node.norms.items()
            if own is None or (name not in own.ignored and name not in own.packed and "." not in name)
        ]  # fmt: skip
        found[scope] = tuple(norm for _, norm in sorted(names))
    return found


def _equal(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Tell whether norms agree and say something: not those of tensors that are zero or unknown on both sides."""
    if len(first) != len(second) or not any(norm > 0 for norm in first):
        return False
    known = [(a, b) for a, b in zip(first, second, strict=True) if not (math.isnan(a) or math.isnan(b))]
    return all(abs(a - b) <= SAME * max(abs(a), abs(b)) for a, b in known)


# ---------------------------------------------------------------- what surrounds
def _around(baseline: Tree, candidate: Tree, found: dict[str, Pair]) -> None:
    """Pair modules by what they contain, then those without tensors by class and place inside pairs."""
    contains = [_contained(tree) for tree in (baseline, candidate)]
    partner = {pair.baseline: pair.candidate for pair in found.values()}
    held = set(partner.values())
    for scope in reversed([s for s in baseline.nodes if s not in partner]):
        inner = {partner[one] for one in contains[0][scope] if one in partner}
        if not inner:
            continue
        fits = [s for s in candidate.nodes if s not in held and inner <= contains[1][s]]
        fit = min(fits, key=lambda s: (len(contains[1][s] & held - inner), -s.count("."), len(s)), default=None)
        if scope == "":
            fit = "" if "" not in held else None
        if fit is not None and not (contains[1][fit] & held - inner):
            partner[scope] = fit
            held.add(fit)
            found[scope] = Pair(scope, fit, "", "name" if scope == fit else "structure")
    for outer, other in list(partner.items()):
        below = [[s for s in tree.nodes if _parent(s) == one and s] for tree, one in ((baseline, outer), (candidate, other))]
        free = [[s for s in below[0] if s not in partner], [s for s in below[1] if s not in held]]
        for b in free[0]:
            alike = [c for c in free[1] if c not in held and _class(baseline, b) == _class(candidate, c)]
            same = [c for c in alike if c.rpartition(".")[2] == b.rpartition(".")[2]] or alike
            if same:
                partner[b] = same[0]
                held.add(same[0])
                found[b] = Pair(b, same[0], "", "name" if b == same[0] else "structure")


def _contained(tree: Tree) -> dict[str, set[str]]:
    """Return what is below each module, at any depth."""
    found: dict[str, set[str]] = {scope: set() for scope in tree.nodes}
    for scope in tree.nodes:
        outer = scope
        while outer:
            outer = _parent(outer)
            found.setdefault(outer, set()).add(scope)
    return found


def _parent(scope: str) -> str:
    return scope.rpartition(".")[0]


def _class(tree: Tree, scope: str) -> str:
    layer = tree.layer(scope)
    return tree.nodes[scope].kind.lower() if layer is None else layer.name
