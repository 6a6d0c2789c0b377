"""Where random number generators stand: that of the host, those of devices, and those that a call is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

State = list[tuple[Callable[[torch.Tensor], None], torch.Tensor]]
"""For each generator what sets it, and where it stands."""


def state_of(device: str) -> torch.Tensor | None:
    """Return where the default generator of a device stands; None where it has none, or cannot be asked now."""
    kind = device.partition(":")[0]
    if kind == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    try:
        state = torch.get_rng_state() if kind == "cpu" else torch.get_device_module(kind).get_rng_state(*_which(device))
    except (RuntimeError, AttributeError):  # meta, a backend without generators, or inside a torch.func transform
        return None
    return state.cpu() if isinstance(state, torch.Tensor) else None


def set_state(device: str, state: torch.Tensor) -> None:
    """Set the default generator of a device to a state, if it takes it: a GPU's cannot go on from a CPU's."""
    kind = device.partition(":")[0]
    with suppress(RuntimeError, TypeError, AttributeError):
        if kind == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(kind).set_rng_state(state, *_which(device))


def _which(device: str) -> tuple[str, ...]:
    """Name a device where there are several of its kind; backends that have one generator take no name (MPS)."""
    kind, number, _ = device.partition(":")
    return (device,) if number and torch.get_device_module(kind).device_count() > 1 else ()


class Generators:
    """The default generators of the host and of some devices, and those among a call's arguments."""

    def __init__(self, devices: Iterable[torch.device | str], arguments: Iterable[Any] = ()) -> None:
        self._devices = [name for name in dict.fromkeys(map(str, devices)) if not name.startswith(("cpu", "meta"))]
        self._given = [value for value in arguments if isinstance(value, torch.Generator)]

    def state(self) -> State:
        """Return where they stand; a device that does not tell is left out."""
        found: State = [(torch.set_rng_state, torch.get_rng_state())]
        for device in self._devices:
            if (state := state_of(device)) is not None:
                found.append((partial(set_state, device), state))
        return found + [(generator.set_state, generator.get_state()) for generator in self._given]

    def drew(self, before: State) -> bool:
        """Tell whether numbers were drawn since."""
        pairs = zip(self.state(), before, strict=True)
        return any(now.numpy().tobytes() != then.numpy().tobytes() for (_, now), (_, then) in pairs)


def put(state: State) -> None:
    """Set generators back to where they stood."""
    for put_back, value in state:
        put_back(value)


@contextmanager
def drawing_from(generators: Generators, state: State | None = None) -> Iterator[None]:
    """Draw from a state in a block, and let the generators stand afterwards where they stand now."""
    now = generators.state()
    put(state or [])
    try:
        yield
    finally:
        put(now)
