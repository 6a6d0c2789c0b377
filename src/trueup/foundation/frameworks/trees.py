"""What a model and its optimizer consist of, in the framework's own names: modules in order, their tensors and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trueup.foundation.frameworks.tables import Layer, layers_by_class, layers_by_name

Shape = tuple[int, ...]
PLAIN = (bool, int, float, str, type(None))  # types of plain attributes
TIED, TRAINED, DTYPE, LIES = ".tied_to", ".requires_grad", ".dtype", ".lies"  # ends of names of what a module says of a parameter
AUTOCAST = "autocast"  # to which dtype what a model computes is cast
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes under which wrappers of PyTorch (DataParallel, DDP, torch.compile, FSDP, checkpoint_wrapper) hold a module."""


@dataclass(frozen=True, slots=True)
class Node:
    """A module."""

    scope: str
    classes: tuple[str, ...]  # names of its class and of those that it derives from, nearest first
    tensors: Mapping[str, Shape | None] = field(default_factory=dict)  # own parameters and buffers; None: shape unknown
    settings: Mapping[str, Any] = field(default_factory=dict)  # its plain attributes
    norms: Mapping[str, float] = field(default_factory=dict)  # euclidean norms of its tensors, where they are known

    @property
    def kind(self) -> str:
        """Name of its class."""
        return self.classes[0]


@dataclass(frozen=True, slots=True)
class Tree:
    """A model of a framework: modules by scope, in order, the root first (its scope is empty)."""

    framework: str
    nodes: Mapping[str, Node]
    ties: Mapping[str, str] = field(default_factory=dict)  # tensors that are another one: full name -> full name
    kinds: Mapping[str, str] = field(default_factory=dict)  # scope -> row of `trueup.foundation.frameworks`, as the user says

    def layer(self, scope: str) -> Layer | None:
        """Return the row of a module, None where the tables know none of its classes."""
        if scope in self.kinds:
            return layers_by_name()[self.kinds[scope]]
        known = layers_by_class(self.framework)
        return next((known[name] for name in self.nodes[scope].classes if name in known), None)


def path(scope: str, name: str) -> str:
    """Return the full name of what is called ``name`` in a module."""
    return f"{scope}.{name}" if scope and name else scope or name


def gathered(framework: str, modules: Iterable[tuple[Node, Mapping[str, Any]]]) -> Tree:
    """Return a model of its modules, each with its own tensors by name; a tensor that stands in two places is tied."""
    nodes: dict[str, Node] = {}
    ties: dict[str, str] = {}
    seen: dict[int, str] = {}
    for node, tensors in modules:
        nodes[node.scope] = node
        for name, tensor in tensors.items():
            full = path(node.scope, name)
            first = seen.setdefault(id(tensor), full)
            if first != full:
                ties[full] = first
    return Tree(framework, nodes, ties)


def classes_of(value: Any, *known: type[Any]) -> tuple[str, ...]:
    """Return the names of an object's class and of those that it derives from, nearest first, but for a framework's ``known``."""
    return tuple(kind.__name__ for kind in type(value).__mro__ if kind not in (object, *known))


def plain_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are plain values or lists of them, and the names of its functions."""
    found: dict[str, Any] = {}
    for name, held in vars(value).items():
        if all(isinstance(one, PLAIN) for one in (held if isinstance(held, (tuple, list)) else [held])):
            found[name] = held
        elif callable(held) and hasattr(held, "__name__"):
            found[name] = held.__name__
    return found


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """What an optimizer of a framework is."""

    framework: str
    classes: tuple[str, ...]
    settings: Mapping[str, Any]  # of its first group, by the framework's names
    groups: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)  # what further groups have in another way
    clipping: str = ""  # how it clips gradients itself, in words
    schedule: str = ""  # what changes its learning rate by itself
    held: tuple[Sequence[Any], ...] = ()  # its parameters, by group, as the framework has them; empty: not known
