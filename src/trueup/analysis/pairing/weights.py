"""Weights of one framework as those of another, by the class of each layer, never by shapes.

Both sides go through neutral names and layouts (`frameworks`). A tensor is split, renamed, transposed or packed only if a row of
the table says so. One of a class that the table lacks is copied as it is, and named; so is what cannot be converted. By a map
file alone, without a model, names come from the tables. Files are read as checkpoints are (`foundation.checkpoint`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trueup.foundation.checkpoint.reading import BROKEN, open_checkpoint, refused
from trueup.foundation.frameworks.mapping import Mapping as LayerMap
from trueup.foundation.frameworks.tables import FRAMEWORKS, Layer, layers_by_name
from trueup.foundation.frameworks.trees import Node, Shape, Tree, path
from trueup.foundation.model import TrueupError

Array = np.ndarray[Any, Any]

CELLS = re.compile(r"\d+\.cell(_[fb]w)?\..*")  # Paddle's second names of a recurrent network's tensors (paddle.nn.RNNBase, 3.3)


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
