"""Gradients of a model's parameters, as entries ``Module.head.Linear.parameters_grad.0`` of ``dump.json``.

What the tool's hook on a parameter sees: the sum over all readers in one backward pass, before it is added to ``.grad``. The native
capture has each reader's own part, with the reader.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trueup.foundation.kernels import digest, hexadecimal
from trueup_compat.msprobe.saving import described, keep

Entries = dict[str, dict[str, list[dict[str, Any]]]]


class Gradients:
    """Gradients of one process, by step and entry.

    Args:
        tensors: gives the folder of a step's tensors.
        summary: ``statistics``, ``md5`` or ``xor``; the last two have the digest.
        kept: tells by its entry's name whether a gradient's elements are kept.
        present: gives the present step, None where nothing is dumped now.
    """

    def __init__(
        self, tensors: Callable[[int], Path], summary: str, kept: Callable[[str], bool], present: Callable[[], int | None]
    ) -> None:  # fmt: skip
        self._tensors, self._summary, self._kept, self._present = tensors, summary, kept, present
        self._found: defaultdict[int, Entries] = defaultdict(dict)
        self._counts: Counter[tuple[int, str, str]] = Counter()
        self._hooked: dict[tuple[str, str], torch.utils.hooks.RemovableHandle] = {}

    def await_those_of(self, scope: str, module: torch.nn.Module) -> None:
        """Take the gradients of a module's own parameters when they come; without effect where that was asked for before."""
        for name, parameter in module._parameters.items():
            if scope and parameter is not None and parameter.requires_grad and (scope, name) not in self._hooked:
                arrived = functools.partial(self._arrived, f"Module.{scope}.{type(module).__name__}.parameters_grad", name)
                self._hooked[scope, name] = parameter.register_hook(arrived)

    def of_step(self, step: int) -> Entries:
        """Return the entries of a step; those of earlier ones are forgotten."""
        for old in [one for one in self._found if one < step]:
            del self._found[old]
        return self._found[step]

    def remove(self) -> None:
        """Take no more."""
        while self._hooked:
            self._hooked.popitem()[1].remove()

    def _arrived(self, module: str, parameter: str, gradient: torch.Tensor) -> None:
        """Put a gradient in its entry; nothing raises inside a backward pass."""
        step = self._present()
        if step is None:
            return
        number = self._counts[step, module, parameter]
        self._counts[step, module, parameter] += 1
        entry = f"{module}.{number}"
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                leaf = described(gradient)
                if self._summary != "statistics":
                    bits = gradient.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                    leaf["md5"] = hexadecimal(digest(bits.numpy()))
                if self._kept(entry):
                    leaf["data_name"] = f"{entry}.{parameter}.pt"
                    keep(gradient, self._tensors(step) / leaf["data_name"])
        except Exception as error:  # noqa: BLE001 - the training is not to end by it
            print(f"trueup: the gradient of {entry}.{parameter} is left out: {error}", file=sys.stderr, flush=True)
            return
        self._found[step].setdefault(entry, {})[parameter] = [leaf]


def with_gradients(data: Mapping[str, Any], gradients: Entries) -> dict[str, Any]:
    """Return entries with those of parameters before the backward of their module, of modules that have an entry."""
    return dict(_in_order(data, gradients))


def _in_order(data: Mapping[str, Any], gradients: Entries) -> Iterator[tuple[str, Any]]:
    left = dict(gradients)
    for name, entry in data.items():
        own = name.replace(".backward.", ".parameters_grad.") if name.startswith("Module.") else ""
        if own in left:
            yield own, left.pop(own)
        yield name, entry
    for name, entry in left.items():  # a module whose input needs no gradient has no backward
        if name.replace(".parameters_grad.", ".forward.") in data:
            yield name, entry
