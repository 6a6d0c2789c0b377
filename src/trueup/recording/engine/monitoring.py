"""What a monitor asks of a framework: numbers of a training by step, each taken without changing it.

A probe hooks the framework and hands each step to a listener as blocks, names of series and their numbers. What the numbers mean,
and what becomes of them (files, alerts, actions), is framework-free and above (`trueup.analysis.monitor`). A framework without a
probe is refused by name (`Adapter.lacks`).

What is taken of the layers of a model in steps that have everything is here, too; the adapters say which outputs, logits and
routers those are.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FRAMEWORKS = ("/torch/", "/paddle/", "/tensorflow/", "/keras/")  # whose frames say nothing of who calls a module
FRAMES = 8  # of a stack
PLANS = 256  # sets of parameters with gradients, and of names, that are remembered
Names = tuple[str, ...]  # the same object in each step, by which a writer knows its columns
Block = tuple[Names, NDArray[np.float64]]


Floats = NDArray[np.float64]
Numbers = Sequence[Any] | Floats

ROUTERS = ("router", "gate", "wg")
MOST_EXPERTS = 1024
DTYPE = re.compile(r"[a-z]+\d\w*")  # in ``torch.bfloat16``, ``<dtype: 'float32'>``
BOUNDED = {
    "sigmoid": (0.01, 0.99), "tanh": (-0.99, 0.99), "hardsigmoid": (0.01, 0.99), "hard_sigmoid": (0.01, 0.99),
    "hardtanh": (-0.99, 0.99), "hard_tanh": (-0.99, 0.99),
}  # fmt: skip
"""Activations with two flat ends, and beyond what they count as saturated (after PyTorch's initial checks of `dead` units)."""
QUERIES = 64  # of the first sample, evenly spaced, whose logits are computed again


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


class Layers:
    """What a probe takes of the layers of a model in steps that have everything: outputs, attention's logits, routers."""

    def __init__(self, probe: Any) -> None:
        self._probe = probe
        self.scopes: dict[int, str] = {}
        self.awake = True  # False: the present step has not everything, so a module's hook has nothing to do
        self._modules: list[Any] = []  # held, so that no other object gets their identities
        self._outputs: dict[str, tuple[Sequence[Any], float | None, int]] = {}  # numbers, size, and how many there are
        self._attention: dict[str, Sequence[Any]] = {}
        self._routers: dict[str, tuple[Sequence[Any], int]] = {}
        self._several: dict[Names, Numbers] = {}
        self._carried: dict[str, tuple[int, list[Any], int]] = {}  # by collective its calls, norms of what goes in, elements
        self._more: dict[str, tuple[Sequence[Any], float]] = {}  # by name of a series a number, and what it is divided by
        self.seen: dict[str, dict[str, Any]] = {}
        self._dtypes: dict[str, Any] = {}  # of what each module returned first

    def wants(self, what: str) -> bool:
        """Tell whether something of `ALSO` is asked for."""
        return what in self._probe._wanted.also

    def took(self, scope: str, kind: str, output: Any, size: float | None, *, half: bool, experts: int) -> None:
        """Take a module's output: of class ``kind``, with so many elements (None: `Kernels.spread` tells), of a half precision;
        ``experts``: the outputs that a layer without activation has, 0 of any other."""
        kernels, ends = self._probe.kernels, BOUNDED.get(kind.lower())
        self._dtypes.setdefault(scope, output.dtype)
        numbers = self._probe.sample(lambda: kernels.spread(output, ends))
        self._outputs[scope] = numbers, size, 4 + (ends is not None or half)
        if self.wants("moments"):
            names = tuple(f"activation_{kind}/{scope}" for kind in ("mean", "kurtosis", "not_finite"))
            self._several[names] = self._probe.sample(lambda: kernels.moments(output))
        if self.wants("modules") and scope not in self.seen:
            shape = [None if one is None else int(one) for one in output.shape]
            said = {"class": kind, "output": shape, "dtype": str(output.dtype).rpartition(".")[2], "called by": callers()}
            self.seen[scope] = said
        if scope.rpartition(".")[2] in ROUTERS and 2 <= experts <= MOST_EXPERTS:
            self._routers[scope] = self._probe.sample(lambda: kernels.routes(output)), experts

    def dtypes(self) -> dict[str, list[str]]:
        """Return the scopes of modules by the dtype of what they returned first (``bfloat16``)."""
        found: dict[str, list[str]] = {}
        for scope, dtype in self._dtypes.items():
            name = DTYPE.search(str(dtype))
            found.setdefault(name[0] if name else str(dtype), []).append(scope)
        return found

    def given(self, scope: str, tensor: Any, size: float | None) -> None:
        """Take the first tensor that a module is given, of so many elements; None as of `took`."""

        def compute() -> Numbers:
            norm, low, high, *more = self._probe.kernels.spread(tensor, None)
            return [norm / (size if size is not None else more[-1]) ** 0.5, low, high]

        self._several[tuple(f"input_{kind}/{scope}" for kind in ("rms", "min", "max"))] = self._probe.sample(compute)

    def gradient(self, scope: str, gradient: Any, size: float) -> None:
        """Take the gradient of a module's output, of so many elements."""
        self._more[f"output_gradient_rms/{scope}"] = [self._probe.kernels.norms([gradient])[0]], math.sqrt(size)

    def carried(self, name: str, tensors: Sequence[Any]) -> None:
        """Take what a collective is given by one call."""
        kernels = self._probe.kernels
        count, numbers, elements = self._carried.get(name, (0, [], 0))
        elements += sum(kernels.size(one) for one in tensors)
        self._carried[name] = count + 1, [*numbers, *kernels.norms(tensors)], elements

    def attended(self, scope: str, compute: Callable[[], Sequence[Any]]) -> None:
        """Take the largest logit and the entropy of an attention; of no known module it has a number."""
        self._attention[scope or f"attention{len(self._attention)}"] = self._probe.sample(compute)

    def finish(self) -> None:
        """Hand over what was taken in the step; each closure below has labels of its own."""
        outputs, attention, routers, several, more = self._outputs, self._attention, self._routers, self._several, self._more
        self._outputs, self._attention, self._routers, self._several, self._more = {}, {}, {}, {}, {}
        order = {scope: place for place, scope in enumerate(self.scopes.values())}
        if outputs:
            scopes = sorted(outputs, key=order.__getitem__)
            names = same(tuple(f"{kind}/{s}" for s in scopes for kind in _KINDS[: outputs[s][2] - 1]))
            numbers = [one for scope in scopes for one in outputs[scope][0]]
            taken = [outputs[scope][1:] for scope in scopes]

            def made(got: Floats) -> Sequence[Block]:
                values: list[float] = []
                at = 0
                for known, count in taken:
                    norm, low, high, others, *flat = got[at : at + count]
                    size = got[at + count] if known is None else known
                    most = max(abs(low), abs(high)) if low == low else low  # a NaN is both ends
                    values += [norm / math.sqrt(size), most, 1 - others / size, *(one / size for one in flat)]
                    at += count + (known is None)
                return [(names, np.array(values))]

            self._probe.add(numbers, made)
        if attention:
            kinds = ("attention_largest_logit", "attention_entropy", "attention_largest_weight")
            read = same(tuple(f"{kind}/{s}" for s in attention for kind in kinds))
            self._probe.add([one for held in attention.values() for one in held], lambda got: [(read, got)])
        if routers:
            routed = ("router_load", "router_entropy", "router_largest_logit", "router_token_entropy")
            named = same(tuple(f"{kind}/{s}" for s in routers for kind in routed))
            factors = [(experts, 1 / math.log(experts), 1, 1 / math.log(experts)) for _, experts in routers.values()]
            counts = np.array(factors, np.float64).ravel()
            self._probe.add([one for held, _ in routers.values() for one in held], lambda got: [(named, got * counts)])
        if several:
            of = same(tuple(name for names in several for name in names))
            self._probe.add([one for held in several.values() for one in held], lambda got: [(of, got)])
        carried, self._carried = self._carried, {}
        for name, (count, norms, elements) in carried.items():
            of_one = same(tuple(f"collective_{kind}/{name}" for kind in ("calls", "elements", "norm")))
            self._probe.add(norms, partial(_joined_collective, of_one, count, elements))
        if more:
            besides = same(tuple(more))
            sizes = np.array([size for _, size in more.values()])
            self._probe.add([one for held, _ in more.values() for one in held], lambda got: [(besides, got / sizes)])


def _joined_collective(names: Names, count: int, elements: int, got: Floats) -> Sequence[Block]:
    return [(names, np.array([count, elements, math.sqrt(float(np.sum(got * got)))]))]


_KINDS = ("activation_rms", "activation_max", "activation_zeros", "activation_saturated")
