"""Random numbers of a call that runs in another way, or once more: where generators stand, and how to put them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

State = list[tuple[Any, torch.Tensor]]


class Generators:
    """The default generators of the host and of some devices, and those among a call's arguments."""

    def __init__(self, devices: Iterable[torch.device], arguments: Iterable[Any] = ()) -> None:
        self._given = [value for value in arguments if isinstance(value, torch.Generator)]
        self._devices = [device for device in dict.fromkeys(devices) if device.type not in ("cpu", "meta")]

    def state(self) -> State:
        """Return where they stand; a device that does not tell is left out."""
        found: State = [(torch.set_rng_state, torch.get_rng_state())]
        for device in self._devices:
            module: Any = getattr(torch, device.type, None)
            if hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state"):
                found.append((module.set_rng_state, module.get_rng_state()))
        return found + [(generator.set_state, generator.get_state()) for generator in self._given]

    def drew(self, before: State) -> bool:
        """Tell whether numbers were drawn since."""
        pairs = zip(self.state(), before, strict=True)
        return any(now.numpy().tobytes() != then.numpy().tobytes() for (_, now), (_, then) in pairs)


def put_back(state: State) -> None:
    """Let the generators stand where they stood."""
    for put, value in state:
        put(value)


@contextmanager
def drawing_from(generators: Generators, state: State | None) -> Iterator[None]:
    """Draw from a state in a block, and let the generators stand afterwards where they stand now."""
    now = generators.state()
    if state is not None:
        put_back(state)
    try:
        yield
    finally:
        put_back(now)
