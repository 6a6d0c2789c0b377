"""What a monitor asks of a framework: numbers of a training by step, each taken without changing it.

A probe hooks the framework and hands each step to a listener as blocks, names of series and their numbers. What the numbers mean,
and what becomes of them (files, alerts, actions), is framework-free and above (`trueup.analysis.monitor`). A framework without a
probe is refused by name (`Adapter.lacks`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FRAMEWORKS = ("/torch/", "/paddle/", "/tensorflow/", "/keras/")  # whose frames say nothing of who calls a module
FRAMES = 8  # of a stack
PLANS = 256  # sets of parameters with gradients, and of names, that are remembered
Names = tuple[str, ...]  # the same object in each step, by which a writer knows its columns
Block = tuple[Names, NDArray[np.float64]]


@dataclass(slots=True)
class Wanted:
    """What a probe is to take."""

    every: int = 10  # steps between two with everything; loss, learning rate and gradient norms are of each step
    digests: int = 100  # steps between digests of parameters; 0: none. Taken only where there are several ranks
    also: frozenset[str] = frozenset()  # of `ALSO`

    def apart(self, step: int) -> int:
        """Return how far apart steps with everything are around a step: a tenth of its number, at most `every`. A training moves
        fast at first, and one of 50 steps has 30 of them."""
        return max(1, min(self.every, step // 10))


ALSO = (
    "moments", "spectrum", "output-gradients", "collectives", "modules", "inputs", "extremes", "micro-batches", "updates",
)  # fmt: skip
"""What is taken only where it is asked for, in steps that have everything: the mean and kurtosis of outputs; of each weight the
largest singular value and the stable rank; the gradients of outputs; what collectives carry; once what modules are, with who calls
them; what goes into modules; the ends of gradients and weights; the gradient after each backward pass; how large updates are."""


class Listener(Protocol):
    """Who is told."""

    step: int  # the present one
    paused: bool  # true: nothing is to be taken; steps are counted

    def begins(self, model: Any) -> None:
        """A model begins to run, forward."""

    def arrived(self, blocks: Sequence[Block], step: int | None = None) -> None:
        """Take a step's numbers; None: of the present one."""

    def ended(self) -> None:
        """The present step is over."""

    def failed(self, error: Exception, what: str) -> None:
        """Take note that the probe failed; it is not asked again, and the training goes on."""


class Probe(Protocol):
    """The framework's half of a monitor."""

    def attach(self) -> None:
        """Begin to look."""

    def detach(self) -> None:
        """End, and leave nothing behind in the framework."""

    def end_step(self) -> None:
        """End the present step, for loops in which no optimizer of the framework does."""

    def drain(self) -> None:
        """Hand over what is still under way on a device."""

    def rank_and_world(self) -> tuple[int | None, int]:
        """Return this process's rank (None when nothing says so) and how many there are."""

    @property
    def optimizer(self) -> Any:
        """The optimizer whose steps end those of the training; None before the first."""

    @property
    def modules(self) -> dict[str, dict[str, Any]]:
        """What the modules are that ran, and who called them, where that is asked for."""

    def describe(self) -> dict[str, Any]:
        """Describe the process for its rank's manifest."""

    def settings(self) -> dict[str, Any]:
        """Return the numbers that modules and the optimizer are set to, as the manifest of a capture has them; empty: not known."""

    def dtypes(self) -> dict[str, list[str]]:
        """Return the scopes of modules by the dtype of what they return."""


_label_cache: dict[tuple[str, tuple[str, ...]], Names] = {}
_same_cache: dict[Names, Names] = {}


def same(names: Names) -> Names:
    """Return the same object for the same names."""
    if len(_same_cache) > PLANS:
        _same_cache.clear()
    return _same_cache.setdefault(names, names)


def labels(kind: str, scopes: Sequence[str]) -> Names:
    """Return the names of a kind's series, the same object for the same scopes."""
    key = kind, tuple(scopes)
    if key not in _label_cache:
        _label_cache[key] = tuple(f"{kind}/{scope}" if scope else kind for scope in scopes)
    return _label_cache[key]


def by_layer(names: Sequence[str], known: Iterable[str] = ()) -> tuple[list[str], NDArray[np.intp]]:
    """Return the layers that parameters belong to (``encoder.0.weight`` is of ``encoder.0``), and for each parameter the number of
    its layer. They come in the order of ``known``, the names of a model, else of ``names``: an optimizer has groups."""
    of = [name.rpartition(".")[0] or name for name in names]
    there = set(of)
    forward = (name.rpartition(".")[0] or name for name in known)
    layers = dict.fromkeys((*(one for one in forward if one in there), *of))
    places = {layer: place for place, layer in enumerate(layers)}
    return list(layers), np.array([places[layer] for layer in of], np.intp)


def joined(norms: NDArray[np.float64], places: NDArray[np.intp], count: int) -> NDArray[np.float64]:
    """Return the norms of layers from those of their parameters."""
    found: NDArray[np.float64] = np.sqrt(np.bincount(places, norms * norms, count))
    return found


def callers(skipped: Sequence[str] = FRAMEWORKS) -> list[str]:
    """Return the frames of the user's code that runs now, innermost first, without those of frameworks and of Trueup."""
    frame: Any = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < FRAMES:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not any(one in file for one in (*skipped, "/trueup/")):
            found.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found
