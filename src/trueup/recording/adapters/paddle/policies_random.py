"""Random numbers of a call that runs in another way, or once more: where Paddle's generators stand, and how to put them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.base import core

State = list[tuple[Any, Any]]


def state() -> State:
    """Return where the generators of the host and of the current device stand."""
    generators = [core.default_cpu_generator()]
    place = paddle.framework._current_expected_place()
    if place.is_gpu_place():
        generators.append(core.default_cuda_generator(place.get_device_id()))
    elif place.is_xpu_place():
        generators.append(core.default_xpu_generator(place.get_device_id()))
    elif place.is_custom_place():
        generators.append(core.default_custom_device_generator(paddle.CustomPlace(place.get_device_type(), place.get_device_id())))
    return [(generator, generator.get_state()) for generator in generators]


def put_back(before: State) -> None:
    """Let the generators stand where they stood."""
    for generator, value in before:
        generator.set_state(value)


def drew(before: State) -> bool:
    """Tell whether numbers were drawn since."""
    return any(_numbers(generator.get_state()) != _numbers(value) for generator, value in before)


def _numbers(value: Any) -> list[str]:
    words = str(value).split()
    return words[:3] + words[4:]  # the fourth is an address


@contextmanager
def drawing_from(before: State | None) -> Iterator[None]:
    """Draw from a state in a block, and let the generators stand afterwards where they stand now."""
    now = state()
    if before is not None:
        put_back(before)
    try:
        yield
    finally:
        put_back(now)
