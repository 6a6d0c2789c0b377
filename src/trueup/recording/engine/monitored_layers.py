"""What a monitor takes of the layers of a model in steps that have everything, in whichever framework; its adapters say which
outputs, logits and routers those are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.recording.engine.monitoring import Block, Names, callers, same

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
