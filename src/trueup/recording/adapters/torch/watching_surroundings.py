"""What an event of the tape depends on besides its arguments: gradient and inference mode, autocast, random number generators."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Surroundings:
    """What else an event depends on."""

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    random: dict[str, Any] | None
    """States of the random number generators by name, where the event may draw."""


def surroundings(devices: dict[str, None], *, draws: bool) -> Surroundings:
    """Return what an event depends on besides its arguments."""
    kinds = {"cpu", *(name.partition(":")[0] for name in devices)} - {"meta"}
    cast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if _casts(kind))
    return Surroundings(
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, torch.is_autocast_cache_enabled(),
        random_states(devices) if draws else None,
    )  # fmt: skip


def _casts(kind: str) -> bool:
    return bool(torch.amp.is_autocast_available(kind))


def random_states(devices: dict[str, None]) -> dict[str, Any]:
    """Return the state of every generator that a training draws from: Python's, NumPy's, PyTorch's on each device."""
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if "numpy.random" in sys.modules:
        states["numpy"] = sys.modules["numpy.random"].get_state()
    for name in devices:
        module = getattr(torch, name.partition(":")[0], None)
        if not name.startswith(("cpu", "meta")) and hasattr(module, "get_rng_state"):
            states[name] = module.get_rng_state(name)  # type: ignore[union-attr]
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put the generators back to what `random_states` returned."""
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if "numpy" in states:
        sys.modules["numpy.random"].set_state(states["numpy"])
    for name, state in states.items():
        if name not in ("python", "cpu", "numpy"):
            getattr(torch, name.partition(":")[0]).set_rng_state(state, name)
