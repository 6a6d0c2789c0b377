"""Which layer of one model is which of another, and weights of one framework as those of the other.

Two layers may only be a pair if they are the same row of `frameworks` and their tensors have the same neutral shapes. Only the
layer's class tells whether a square matrix is transposed; if no table has the class, the pair is unsure. Pairs come, in this
order, from

1. equal names, and names that differ only in what separates their parts (``layer1_0_bn2`` of a functional model);
2. order: the rest is aligned as two sequences, so that kinds and shapes agree and names are as alike as can be;
3. statistics: where several layers could be the pair, those whose weights have the same norms are it.

Modules around paired layers are paired by their contents, modules without tensors by class and place there. `trueup map` writes
every pair on a line of `map.toml`, the unsure ones with the reason.

Weights are converted by the class of each layer, never by shapes: a tensor is split, renamed, transposed or packed only if a row of
the table says so. One of a class that the table lacks is copied as it is, and named; so is what cannot be converted. By a map
file alone, without a model, names come from the tables. Files are read as checkpoints are (`foundation.checkpoint`).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trueup.comparison.verdict.align import best_pairs
from trueup.foundation.checkpoint.reading import BROKEN, open_checkpoint, refused
from trueup.foundation.frameworks.mapping import Mapping as LayerMap
from trueup.foundation.frameworks.tables import FRAMEWORKS, Layer, layers_by_name
from trueup.foundation.frameworks.trees import Node, Shape, Tree, path
from trueup.foundation.model import TrueupError

SAME = 1e-4  # relative difference of norms up to which two weights are taken for the same; float32 norms of large tensors

MOST = 2000  # layers of a side beyond which only equal names are looked for: sequences are aligned in quadratic time

Array = np.ndarray[Any, Any]

CELLS = re.compile(r"\d+\.cell(_[fb]w)?\..*")  # Paddle's second names of a recurrent network's tensors (paddle.nn.RNNBase, 3.3)


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


@dataclass
class Conversion:
    """What became of a model's weights."""

    state: dict[str, Array] = field(default_factory=dict)  # the target's tensors by full name
    missing: list[str] = field(default_factory=list)  # the target's tensors that could not be made, each with the reason
    unused: list[str] = field(default_factory=list)  # the source's tensors that went nowhere, each with the reason
    unsure: list[str] = field(default_factory=list)  # what was copied without a row of the table

    @property
    def is_whole(self) -> bool:
        """Whether every tensor of the target was made, and none of the source was left over."""
        return not self.missing and not self.unused

    def __str__(self) -> str:
        lines = [f"{len(self.state):,} tensors converted"]
        for said, found in (("could not be made", self.missing), ("went nowhere", self.unused), ("copied as it is", self.unsure)):
            lines += [f"  {said}: {one}" for one in found]
        return "\n".join(lines)


def convert(source: Tree, target: Tree, state: Mapping[str, Array], modules: Mapping[str, str] | None = None) -> Conversion:
    """Return a target's weights made of a source's ``state``, tensors by full name. ``modules`` are the target's, each with its
    name in the source; others have the same name. A shape that the target states is required."""
    found = Conversion()
    given = dict(_neutral(source, state, found))
    used: set[str] = set()
    for scope, node in target.nodes.items():
        layer = target.layer(scope)
        own = layer.own[target.framework] if layer is not None else None
        for tensor, shape in node.tensors.items():
            name = path(scope, tensor)
            if (own is not None and tensor in own.ignored) or _is_second(layer, tensor) or inside_recurrent(target, scope):
                continue
            parts = own.packed.get(tensor, (own.tensors.get(tensor, tensor),)) if own is not None else (tensor,)
            wanted = [path(_source(scope, modules or {}), part) for part in parts]
            wanted = [one if one in given else source.ties.get(one, one) for one in wanted]
            lacking = [one for one in wanted if one not in given]
            if lacking:
                _without(found, name, lacking, target)
                continue
            made = _expressed([given[one] for one in wanted], layer, target.framework, parts[0])
            if shape is not None and made.shape != shape:
                given_by = " and ".join(wanted)
                found.missing.append(f"{name}: it has shape {list(shape)}, and {given_by} would give {list(made.shape)}")
                continue
            found.state[name] = made
            used.update(wanted)
            if layer is None and is_ambiguous(made.shape):
                found.unsure.append(f"{name}: {node.kind} is in no table, so nothing says whether it is to be transposed")
    found.unused += [f"{one}: nothing of the target is made of it" for one in given if one not in used and one not in source.ties]
    _check_ties(target, found)
    return found


def _neutral(source: Tree, state: Mapping[str, Array], found: Conversion) -> Iterator[tuple[str, Array]]:
    """Yield the source's tensors by neutral names below its scopes, in neutral layouts."""
    for name, array in state.items():
        scope, tensor = _split(name, source)
        layer = source.layer(scope)
        if _is_second(layer, tensor) or inside_recurrent(source, scope):
            continue
        if layer is None:
            yield name, array
            continue
        own = layer.own[source.framework]
        if tensor in own.ignored:
            continue
        if tensor in own.packed:
            parts = own.packed[tensor]
            if array.shape[0] % len(parts):
                found.unused.append(f"{name}: its first size {array.shape[0]} is not {len(parts)} equal parts")
                continue
            yield from ((path(scope, part), one) for part, one in zip(parts, np.split(array, len(parts)), strict=True))
            continue
        neutral = own.tensors.get(tensor, tensor)
        axes = own.axes.get(neutral)
        array = array.reshape(-1) if neutral in own.reshaped else array
        yield path(scope, neutral), array if axes is None or len(axes) != array.ndim else np.transpose(array, axes)


def _expressed(parts: list[Array], layer: Layer | None, framework: str, neutral: str) -> Array:
    """Return one of a framework's tensors, made of neutral ones."""
    array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if layer is None or len(parts) > 1:
        return array
    own = layer.own[framework]
    axes = own.axes.get(neutral)
    if axes is not None and len(axes) == array.ndim:
        array = np.transpose(array, np.argsort(axes))
    return array.reshape(1, -1) if neutral in own.reshaped else array


def _split(name: str, tree: Tree) -> tuple[str, str]:
    """Return the module of a tensor and its name there."""
    scope = name
    while scope:
        scope, _, _ = scope.rpartition(".")
        if scope in tree.nodes:
            return scope, name[len(scope) + 1 :] if scope else name
    return "", name


def _source(scope: str, modules: Mapping[str, str]) -> str:
    """Return the source's name of a module of the target: by the module, else by one around it."""
    inner = ""
    while scope not in modules and scope:
        scope, _, last = scope.rpartition(".")
        inner = path(last, inner)
    return path(modules.get(scope, scope), inner)


def _is_second(layer: Layer | None, tensor: str) -> bool:
    return layer is not None and layer.tensors == ("*",) and CELLS.fullmatch(tensor) is not None


def inside_recurrent(tree: Tree, scope: str) -> bool:
    """Tell whether a module is inside one that holds the tensors itself: a cell of an LSTM."""
    while scope:
        scope, _, _ = scope.rpartition(".")
        layer = tree.layer(scope) if scope in tree.nodes else None
        if layer is not None and layer.tensors == ("*",):
            return True
    return False


def _without(found: Conversion, name: str, lacking: list[str], target: Tree) -> None:
    tied = target.ties.get(name)
    if tied is None or tied not in found.state:
        found.missing.append(f"{name}: the source has no {' and no '.join(lacking)}")


def _check_ties(target: Tree, found: Conversion) -> None:
    """Name tensors that are one in the target and two in the source."""
    for name, first in target.ties.items():
        both = found.state.get(name), found.state.get(first)
        if both[0] is not None and both[1] is not None and not np.array_equal(both[0], both[1]):
            found.missing.append(f"{name}: it is {first} in the target, and in the source the two differ")
            del found.state[name]


def is_ambiguous(shape: Shape) -> bool:
    """Tell whether a tensor has the same shape when two of its axes are swapped."""
    sizes = [size for size in shape if size > 1]
    return len(set(sizes)) < len(sizes)


def shapes_of(state: Mapping[str, Array]) -> dict[str, Shape]:
    """Return the shapes of arrays."""
    return {name: tuple(array.shape) for name, array in state.items()}


def neutral_names(source: Tree, state: Mapping[str, Array]) -> dict[str, Shape]:
    """Return the shapes of a state's tensors by neutral names below the source's scopes."""
    return shapes_of(dict(_neutral(source, state, Conversion())))


def convert_state(state: Mapping[str, Array], told: LayerMap, to: str) -> Conversion:
    """Return a ``state``, tensors by full name, converted to a map's side of framework ``to`` (torch or paddle). Raises
    TrueupError if the map does not name its frameworks, or they are the same or other ones."""
    sides = {side: framework for side, framework in told.frameworks.items() if framework in FRAMEWORKS}
    if len(set(sides.values())) != 2 or to not in sides.values():
        raise TrueupError(
            f"the map is of {' and '.join(told.frameworks.values()) or 'no named frameworks'}, and weights for {to} are wanted: it "
            "needs a line `made = { baseline = 'torch', candidate = 'paddle' }`, as `trueup map` writes it"
        )
    target = next(side for side, framework in sides.items() if framework == to)
    source = "baseline" if target == "candidate" else "candidate"
    trees = {side: _tree(told, side, framework) for side, framework in sides.items()}
    modules = told.modules if target == "candidate" else {b: c for c, b in told.modules.items()}
    names = neutral_names(trees[source], state)
    wanted = _expected(trees[target], modules, names)
    return convert(trees[source], wanted, state, modules)


def _tree(told: LayerMap, side: str, framework: str) -> Tree:
    scopes = list(told.modules) if side == "candidate" else list(told.modules.values())
    kinds = {scope: told.kinds.get(told.modules[scope] if side == "candidate" else scope, "") for scope in scopes}
    kinds |= told.alone[side]
    nodes = {scope: Node(scope, ("",)) for scope in sorted({"", *kinds}, key=lambda one: one.count("."))}
    return Tree(framework, nodes, {}, {scope: kind for scope, kind in kinds.items() if kind in layers_by_name()})


def _expected(target: Tree, modules: Mapping[str, str], names: Mapping[str, Shape]) -> Tree:
    """Return the target with the tensors that the tables make of the source's."""
    nodes = {}
    held: dict[str, set[str]] = {}
    for name in names:
        scope, _, tensor = name.rpartition(".")
        held.setdefault(scope, set()).add(tensor)
    for scope in target.nodes:
        layer, source = target.layer(scope), _source(scope, modules)
        there = held.get(source, set())
        own = layer.own[target.framework] if layer is not None else None
        tensors: dict[str, Shape | None] = {}
        if own is None or layer is None:
            tensors = dict.fromkeys(sorted(there))
        else:
            back = {neutral: name for name, neutral in own.tensors.items()}
            tensors = {back.get(one, one): None for one in sorted(there)}
            for packed, parts in own.packed.items():
                if all(path(source, part) in names for part in parts):
                    for name in [name for name in tensors if own.tensors.get(name, name) in parts]:
                        del tensors[name]
                    tensors[packed] = None
        nodes[scope] = Node(scope, ("",), tensors)
    return Tree(target.framework, nodes, {}, target.kinds)


def read_state(path: str | Path) -> dict[str, Array]:
    """Return the tensors of a file of weights by name, of a checkpoint those of the model; raises TrueupError if it is missing,
    damaged or of an unknown kind, if none of its parts can be told to be the model, or if it would run something."""
    found = open_checkpoint(path)
    try:
        return {name: held.read() for name, held in found.part(None).items()}
    except (OSError, *BROKEN) as error:
        raise refused(Path(path), error) from None


def write_state(state: Mapping[str, Array], path: str | Path) -> Path:
    """Write tensors as safetensors or npz; raises TrueupError for another kind, an existing file, or a failed write."""
    file = Path(path)
    if file.suffix not in (".safetensors", ".npz"):
        raise TrueupError(f"{file}: weights are written as .safetensors or .npz, which every framework reads")
    if file.exists():
        raise TrueupError(f"{file} exists; choose another name or delete it")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".npz":
            held: dict[str, Any] = {name: np.asarray(one) for name, one in state.items()}
            np.savez(file, **held)
        else:
            from safetensors.numpy import save_file

            save_file({name: np.ascontiguousarray(one) for name, one in state.items()}, file)
    except OSError as error:
        raise TrueupError(f"{file} cannot be written: {error.strerror or error}") from None
    return file
