"""What each fault does to the numbers: one function a row of `trueup.simdev.tables`, grouped by kind of operator.

A function gets the call with its healthy result and returns what the broken device gives instead. Only
`trueup.simdev.injection` imports from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor


@dataclass(slots=True)
class Call:
    """One healthy execution of a faulted operator."""

    op: str
    arguments: dict[str, Any]
    """Arguments by schema name, defaults filled in; those the operator writes to are copies from before."""
    outputs: list[Any]
    """Healthy results: what it returned, then what it wrote in place. None where there is none."""
    memory: dict[Any, Any]
    """Lives as long as the injection; for faults that depend on earlier calls."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


Wrong: TypeAlias = Sequence[Tensor | None] | Tensor | None
"""Replacements for the outputs, in order; None leaves an output (or, alone, the whole call) healthy."""

EFFECTS: dict[str, Callable[[Call], Wrong]] = {}


def effect(name: str) -> Callable[[Callable[[Call], Wrong]], Callable[[Call], Wrong]]:
    """Register the function that carries out the fault ``name``."""

    def register(function: Callable[[Call], Wrong]) -> Callable[[Call], Wrong]:
        EFFECTS[name] = function
        return function

    return register


def load() -> dict[str, Callable[[Call], Wrong]]:
    """Import every group and return the effects by name."""
    from trueup.simdev.faults import (  # noqa: F401
        activation,
        indexing,
        memory,
        normalisation,
        optimizer,
        product,
        recurrent,
        reduction,
    )

    return EFFECTS
