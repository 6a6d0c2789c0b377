"""Weights of one framework as those of another, by the class of each layer: never by their shapes.

Both sides go through neutral names and layouts (`frameworks`). A tensor is taken apart, renamed, transposed, or packed with
others only where a row of the table says so; one of a class that the table lacks is copied as it is, and that is said. What cannot
be converted is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trueup.foundation.frameworks.tables import Layer
from trueup.foundation.frameworks.trees import Shape, Tree, path

Array = np.ndarray[Any, Any]

CELLS = re.compile(r"\d+\.cell(_[fb]w)?\..*")
"""What Paddle calls the tensors of a recurrent network a second time (paddle.nn.RNNBase, Paddle 3.3)."""


@dataclass
class Conversion:
    """What became of a model's weights."""

    state: dict[str, Array] = field(default_factory=dict)
    """The target's tensors by full name."""
    missing: list[str] = field(default_factory=list)
    """The target's tensors that could not be made, each with the reason."""
    unused: list[str] = field(default_factory=list)
    """The source's tensors that went nowhere, each with the reason."""
    unsure: list[str] = field(default_factory=list)
    """What was copied without a row of the table."""

    @property
    def is_whole(self) -> bool:
        """Whether each tensor of the target was made, and none of the source was left over."""
        return not self.missing and not self.unused

    def __str__(self) -> str:
        lines = [f"{len(self.state):,} tensors converted"]
        for said, found in (("could not be made", self.missing), ("went nowhere", self.unused), ("copied as it is", self.unsure)):
            lines += [f"  {said}: {one}" for one in found]
        return "\n".join(lines)


def convert(source: Tree, target: Tree, state: Mapping[str, Array], modules: Mapping[str, str] | None = None) -> Conversion:
    """Return a target's weights made of a source's.

    Args:
        source: the model that the weights are of.
        target: the model that they are for; its shapes are demanded where it has them.
        state: the source's tensors by full name.
        modules: the target's modules, each with its name in the source; modules that it does not name are called alike.
    """
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
            wanted = [_source_name(scope, part, modules or {}) for part in parts]
            wanted = [_untied(one, source, given) for one in wanted]
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


def _source_name(scope: str, tensor: str, modules: Mapping[str, str]) -> str:
    """Return the neutral name in the source of a tensor of a module of the target: by the module, else by one around it."""
    inner = ""
    while scope not in modules and scope:
        scope, _, last = scope.rpartition(".")
        inner = path(last, inner)
    return path(path(modules.get(scope, scope), inner), tensor)


def _untied(name: str, source: Tree, given: Mapping[str, Array]) -> str:
    return source.ties.get(name, name) if name not in given else name


def _is_second(layer: Layer | None, tensor: str) -> bool:
    return layer is not None and layer.tensors == ("*",) and CELLS.fullmatch(tensor) is not None


def inside_recurrent(tree: Tree, scope: str) -> bool:
    """Tell whether a module is inside one that holds its tensors itself: a cell of an LSTM."""
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
