"""Deterministic algorithms for one call of Paddle's: flags around its forward, and from its backward to the end of the pass.

Nothing of Paddle's tells when the last node of a call has run, so the flags stay until the pass has ended: what runs
deterministically without being asked costs time and no accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle

FLAGS = ("FLAGS_cudnn_deterministic", "FLAGS_embedding_deterministic", "FLAGS_cpu_deterministic")
"""What a build for GPUs has (Paddle 2.4 to 3.3); one for the CPU has none of them."""


def setting() -> dict[str, Any]:
    """Return the flags that this build has, as they are."""
    found: dict[str, Any] = {}
    for name in FLAGS:
        try:
            found |= paddle.get_flags(name)
        except ValueError:  # this build has no such flag
            continue
    return found


def _switch_on() -> None:
    paddle.set_flags({name: type(value)(1) for name, value in setting().items()})


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms in a block."""
    before = setting()
    _switch_on()
    try:
        yield
    finally:
        paddle.set_flags(before)


class Backward:
    """Makes the backward of calls deterministic, by hooks on their results."""

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None

    def hook(self, results: Iterable[paddle.Tensor], mark: int, call: str) -> bool:  # noqa: ARG002 - Paddle raises nothing for it
        """Hook the results of a call; tell whether any takes a gradient."""
        hooked = [tensor._register_grad_hook(self._enter()) for tensor in results if not tensor.stop_gradient]
        return bool(hooked)

    def leave(self) -> None:
        """Put the flags back to what they were."""
        if self._before is not None:
            before, self._before = self._before, None
            paddle.set_flags(before)

    def _enter(self) -> Callable[[Any], None]:
        def enter(_: Any) -> None:
            if self._before is None:
                self._before = setting()
                _switch_on()

        return enter
