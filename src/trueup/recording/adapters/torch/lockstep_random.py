"""The random states of two devices: whether a call drew numbers, and the same draw for the other model where that is possible."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

States = tuple[torch.Tensor, ...]


class RandomStates:
    """States of the host's generator and of those of the devices of two models."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        self._first, self._second = first, second
        self.shared = first.type == second.type
        """Whether both models draw from generators of one kind, so that the same state gives the same numbers."""
        self._modules: list[Any] = []
        for kind in sorted({first.type, second.type} - {"cpu"}):
            module = torch.get_device_module(kind)
            if hasattr(module, "get_rng_state"):
                self._modules.append(module)

    def state(self) -> States:
        """Return the present states."""
        return (torch.get_rng_state(), *(module.get_rng_state() for module in self._modules))

    def set(self, states: States) -> None:
        """Set the states."""
        torch.set_rng_state(states[0])
        for module, state in zip(self._modules, states[1:], strict=True):
            module.set_rng_state(state)

    def lend(self, states: States) -> None:
        """Let the second device's generator begin where the first one's did, where it takes that state."""
        self.set(states)
        if self.shared:
            return
        kinds = ["cpu", *sorted({self._first.type, self._second.type} - {"cpu"})]
        state = dict(zip(kinds, states, strict=False)).get(self._first.type)
        module = torch.random if self._second.type == "cpu" else torch.get_device_module(self._second.type)
        if state is not None and hasattr(module, "set_rng_state"):
            with suppress(RuntimeError, TypeError):  # a state of another kind of generator
                module.set_rng_state(state)

    def drawn(self, before: States) -> bool:
        """Tell whether any number was drawn since."""
        return not all(torch.equal(a, b) for a, b in zip(before, self.state(), strict=True))
