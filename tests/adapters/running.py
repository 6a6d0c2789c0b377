"""Run a training loop, observed or not, and return all that a capture must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import trueup
from adapters.loops import Loop
from adapters.test_observer import content, random_states


def everywhere(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pair each name with the CPU, and every second one with the simulated device, which takes three times as long."""
    given = list(names)
    return [*((name, "cpu") for name in given), *((name, "npu") for name in given[::2])]


def outcome(
    loop: Loop, iterations: int, directory: Path | None, dense: Callable[[torch.Tensor], torch.Tensor], **options: Any
) -> dict[str, Any]:
    """Return losses, state (each tensor made ``dense`` first) and random states; without a directory nothing is captured."""
    trueup.seed_all(1)
    if directory is None:
        losses = [loop.iterate() for _ in range(iterations)]
    else:
        with trueup.capture(directory, model=loop.models, on_error="stop", **options):
            losses = [loop.iterate() for _ in range(iterations)]
    return random_states() | {"losses": [content(t) for t in losses], "state": [content(dense(t)) for t in loop.state()]}
