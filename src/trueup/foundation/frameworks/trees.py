"""What a model and its optimizer consist of, in the framework's own names: modules in order, their tensors and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trueup.foundation.frameworks.tables import Layer, layers_by_class, layers_by_name

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A module."""

    scope: str
    classes: tuple[str, ...]
    """Names of its class and of those that it derives from, nearest first."""
    tensors: Mapping[str, Shape | None] = field(default_factory=dict)
    """Its own parameters and buffers, not those of modules below; None: of a shape that is not known."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its plain attributes."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """Euclidean norms of its tensors, where they are known."""

    @property
    def kind(self) -> str:
        """Name of its class."""
        return self.classes[0]


@dataclass(frozen=True, slots=True)
class Tree:
    """A model of a framework: modules by scope, in order, the root first (its scope is empty)."""

    framework: str
    nodes: Mapping[str, Node]
    ties: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are another one: full name -> full name."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """What the user says a module is: scope -> row of `trueup.foundation.frameworks`."""

    def layer(self, scope: str) -> Layer | None:
        """Return the row of a module, None where the tables know none of its classes."""
        if scope in self.kinds:
            return layers_by_name()[self.kinds[scope]]
        known = layers_by_class(self.framework)
        return next((known[name] for name in self.nodes[scope].classes if name in known), None)


def path(scope: str, name: str) -> str:
    """Return the full name of what is called ``name`` in a module."""
    return f"{scope}.{name}" if scope and name else scope or name


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """What an optimizer of a framework is."""

    framework: str
    classes: tuple[str, ...]
    settings: Mapping[str, Any]
    """Of its first group, by the framework's names."""
    groups: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)
    """What further groups have in another way."""
    clipping: str = ""
    """How it clips gradients itself, in words."""
    schedule: str = ""
    """What changes its learning rate by itself."""
