"""Deterministic algorithms for one call: around its forward, and around each autograd node that it made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trueup.recording.adapters.torch.gradients import ACCUMULATE, MAX_NODES

Setting = tuple[bool, bool]


def setting() -> Setting:
    """Return whether deterministic algorithms are on, and whether only to warn."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def put(to: Setting) -> None:
    """Switch; `torch.use_deterministic_algorithms` would import the compiler to tell it."""
    torch._C._set_deterministic_algorithms(to[0], warn_only=to[1])


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms in a block, as an error where there is none."""
    before = setting()
    put((True, False))
    try:
        yield
    finally:
        put(before)


class Backward:
    """Makes the backward of calls deterministic, by hooks on their nodes, and says which call it was where PyTorch cannot.

    A hook runs on whichever thread executes the node. After an error no hook runs: `leave` puts the setting back then.
    """

    def __init__(self) -> None:
        self._before: Setting | None = None
        self._call = ""

    @property
    def under_way(self) -> str:
        """Name of the call whose node is executing, or nothing."""
        return self._call if self._before is not None else ""

    def hook(self, results: Iterable[torch.Tensor], first: int, call: str) -> bool:
        """Hook the nodes that a call made; tell whether there are any.

        Args:
            results: of the call.
            first: sequence number of the first node that it can have made.
            call: its name.
        """
        nodes = _nodes(results, first)
        for node in nodes:
            node.register_prehook(self._enter(call))
            node.register_hook(lambda *_: self.leave())
        return bool(nodes)

    def leave(self) -> None:
        """Put the setting back to what it was."""
        if self._before is not None:
            before, self._before = self._before, None
            put(before)

    def _enter(self, call: str) -> Callable[[Any], None]:
        def enter(_: Any) -> None:
            self.leave()
            self._before, self._call = setting(), call
            put((True, False))

        return enter


def _nodes(results: Iterable[torch.Tensor], first: int) -> list[Any]:
    pending = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    found: dict[Any, None] = {}
    while pending and len(found) < MAX_NODES:
        node = pending.pop()
        if node is None or node in found or not first <= node._sequence_nr() < ACCUMULATE:
            continue
        found[node] = None
        pending += [following for following, _ in node.next_functions]
    return list(found)
