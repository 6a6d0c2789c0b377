"""Which layer of one model is which of another: by names, by order and structure, by classes and shapes, then by statistics.

Two layers may only be a pair if they are the same row of `frameworks` and their tensors have the same neutral shapes. Only the
layer's class tells whether a square matrix is transposed; if no table has the class, the pair is unsure. Pairs come, in this
order, from

1. equal names, and names that differ only in what separates their parts (``layer1_0_bn2`` of a functional model);
2. order: the rest is aligned as two sequences, so that kinds and shapes agree and names are as alike as can be;
3. statistics: where several layers could be the pair, those whose weights have the same norms are it.

Modules around paired layers are paired by their contents, modules without tensors by class and place there. `trueup map` writes
every pair on a line of `map.toml`, the unsure ones with the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trueup.analysis.pairing.weights import inside_recurrent, is_ambiguous
from trueup.comparison.verdict.align import best_pairs
from trueup.foundation.frameworks.trees import Node, Tree, path
from trueup.foundation.model import TrueupError

SAME = 1e-4  # relative difference of norms up to which two weights are taken for the same; float32 norms of large tensors

MOST = 2000  # layers of a side beyond which only equal names are looked for: sequences are aligned in quadratic time


@dataclass(frozen=True, slots=True)
class Pair:
    """A module of the baseline and one of the candidate."""

    baseline: str
    candidate: str
    kind: str = ""  # row of `trueup.foundation.frameworks`, empty where the tables have none
    by: str = "name"  # ``name``, ``order``, ``statistics`` or ``structure``
    unsure: str = ""  # why it may be another one


@dataclass(frozen=True)
class Proposal:
    """How two models line up."""

    baseline: Tree
    candidate: Tree
    pairs: tuple[Pair, ...]
    only_baseline: tuple[str, ...] = ()  # modules with tensors that have no counterpart
    only_candidate: tuple[str, ...] = ()

    @property
    def unsure(self) -> tuple[Pair, ...]:
        """Pairs that somebody should look at."""
        return tuple(pair for pair in self.pairs if pair.unsure)

    def alone(self, side: str) -> list[str]:
        """Return a side's modules with tensors and no counterpart, also those that the other framework packs."""
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

_PARTS = re.compile(r"[._/]+")  # what separates the parts of a name


@dataclass(slots=True)
class _Side:
    tree: Tree
    layers: dict[str, Signature] = field(default_factory=dict)  # modules with tensors or a known kind, in order


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
            scope
            for scope in side.layers
            if scope not in taken and side.tree.nodes[scope].tensors and not _is_packed(side.tree, scope, taken)
        )
        for side, taken in zip(sides, (set(found), {pair.candidate for pair in found.values()}), strict=True)
    ]
    order = [scope for scope in baseline.nodes if scope in found]
    return Proposal(baseline, candidate, tuple(found[scope] for scope in order), left[0], left[1])


def _is_packed(tree: Tree, scope: str, taken: set[str]) -> bool:
    """Tell whether the other framework packs a layer's tensors into the layer around it, which has a counterpart."""
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
    """Return what must agree: the kind, and the neutral shapes of tensors that neither framework packs."""
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
    """Pair layers whose names differ only in dots, underscores and slashes, if no other on its side has that name."""
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
    """Align two sequences so that most kinds agree, and of those alignments most names."""
    n, m = len(names[0]), len(names[1])
    score = np.zeros((n, m))
    for i in range(n):
        for j in range(m):
            if kinds[0][i] == kinds[1][j]:
                score[i, j] = 1.0 + 0.1 * _alike(names[0][i], names[1][j])
    return best_pairs(score)


def _alike(first: str, second: str) -> float:
    """Return how alike two names are, 0 to 1: common parts, the last one counting double."""
    one, two = _PARTS.split(first), _PARTS.split(second)
    shared = sum((Counter(one) & Counter(two)).values()) + (one[-1] == two[-1])
    return 2.0 * shared / (len(one) + len(two) + 2)


def _by_statistics(sides: tuple[_Side, _Side], found: dict[str, Pair]) -> None:
    """Correct layers that several could be, if weights of equal norms tell which; say where they contradict."""
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
    """Tell whether norms agree and say something: norms that are zero or unknown on both sides do not."""
    if len(first) != len(second) or not any(norm > 0 for norm in first):
        return False
    known = [(a, b) for a, b in zip(first, second, strict=True) if not (math.isnan(a) or math.isnan(b))]
    return all(abs(a - b) <= SAME * max(abs(a), abs(b)) for a, b in known)


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


HEAD = """\
# Which module of the candidate is which of the baseline: proposed by `trueup map`, to be read before it is believed.
# Pairs with `unsure` want a look; correct a name, or delete the line. docs/alignment.md says what else may stand here.

made = {{ baseline = {baseline}, candidate = {candidate} }}   # frameworks
"""


def text(proposal: Proposal) -> str:
    """Return the file."""
    names = (json.dumps(tree.framework) for tree in (proposal.baseline, proposal.candidate))
    lines = [HEAD.format(**dict(zip(("baseline", "candidate"), names, strict=True)))]
    sides = (("baseline", proposal.baseline, proposal.only_baseline), ("candidate", proposal.candidate, proposal.only_candidate))
    for side, _, only in sides:
        lines += [f"# only in the {side}: {name}" for name in only]
    alone = [_alone(side, tree, scope) for side, tree, _ in sides for scope in proposal.alone(side) if tree.layer(scope)]
    lines += ["layer = [", *(f"    {_line(pair)}," for pair in proposal.pairs), *(f"    {one}," for one in alone), "]", ""]
    return "\n".join(lines)


def _line(pair: Pair) -> str:
    told = {"baseline": pair.baseline, "candidate": pair.candidate, "kind": pair.kind, "unsure": pair.unsure}
    said = {name: value for name, value in told.items() if value or name in ("baseline", "candidate")}
    inside = ", ".join(f"{name} = {json.dumps(value)}" for name, value in said.items())
    return f"{{ {inside} }}"


def _alone(side: str, tree: Tree, scope: str) -> str:
    """Describe a layer without counterpart; of attention, projections that the other framework packs into one matrix."""
    layer = tree.layer(scope)
    return f"{{ {side} = {json.dumps(scope)}, kind = {json.dumps(layer.name if layer is not None else '')} }}"


def write_map(proposal: Proposal, path: str | Path) -> Path:
    """Write the file; raises TrueupError if it cannot be written."""
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text(proposal), "utf-8")
    except OSError as error:
        raise TrueupError(f"cannot write {file}: {error.strerror or error}; choose another place") from None
    return file
