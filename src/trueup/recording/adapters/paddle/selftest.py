"""What the installed Paddle can do of what a capture stands on, tried on tensors of a few elements before anything is recorded.

GradNode hooks, ``_C_ops`` and addresses are private parts of Paddle. Where one does not behave as it did, the capture falls back
and says so: without post-hooks the gradients that calls make are not recorded; without hooks there is no backward; where
operators cannot be replaced, only Layers are recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import paddle
from paddle import _C_ops
from paddle.base import core, unique_name

from trueup.foundation.model import TrueupError
from trueup.recording.adapters.paddle.host import to_numpy
from trueup.recording.adapters.paddle.tensors import layout_of
from trueup.recording.recorder.replacing import Replacement


@dataclass(frozen=True)
class Abilities:
    """What works, and a sentence for each thing that does not."""

    operators: bool
    backward: bool
    nodes: bool
    sentences: tuple[str, ...]


def examine() -> Abilities:
    """Try what a capture needs; no random number is drawn and nothing stays behind.

    Raises:
        TrueupError: tensors cannot be read, without which there is nothing to record.
    """
    return _examine(paddle.__version__)


@lru_cache(maxsize=1)
def _examine(version: str) -> Abilities:
    with unique_name.guard():
        _tried("the memory of tensors", _reads_memory, version, needed=True)
        said = [
            _tried("the operators of paddle._C_ops and of paddle.Tensor cannot be replaced", _replaces_operators, version),
            _tried("hooks on tensors do not tell gradients", _hooks_tensors, version),
            _tried("post-hooks of GradNodes do not tell gradients", _hooks_nodes, version),
        ]
    ends = ("operators are not recorded, only Layers", "no backward is recorded", "gradients that a call makes are not recorded")
    operators, backward, nodes = (one is None for one in said)
    sentences = tuple(f"{one}; {end}" for one, end in zip(said, ends, strict=True) if one is not None)
    return Abilities(operators, backward, nodes and backward, sentences)


def _tried(what: str, check: object, version: str, *, needed: bool = False) -> str | None:
    assert callable(check)
    try:
        check()
    except Exception as error:  # noqa: BLE001 - whatever it is, it does not work
        said = f"Paddle {version}: {what} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        if needed:
            raise TrueupError(f"{said}: nothing can be recorded; docs/paddle.md names the versions that were tested") from None
        return said
    return None


def _tensor(values: list[float], *, gradient: bool = False) -> paddle.Tensor:
    return paddle.to_tensor(values, dtype="float32", place=paddle.CPUPlace(), stop_gradient=not gradient)


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _reads_memory() -> None:
    whole = _tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])  # type: ignore[list-item]
    part = whole[1:]
    for tensor in (whole, part):
        layout = layout_of(tensor)
        _expect(layout is not None, "a plain tensor is not dense")
        assert layout is not None
        _expect(bool(np.array_equal(to_numpy(tensor, layout), tensor.numpy())), "address and strides show other numbers")
    shared = part.data_ptr() == whole.data_ptr() + part._offset() - whole._offset()
    _expect(shared or part._offset() == 0, "the offset of a view is not in its address")
    before = whole._inplace_version()
    whole.add_(_tensor([1.0, 1.0, 1.0]))
    _expect(whole._inplace_version() != before, "a write does not count in the version")


def _replaces_operators() -> None:
    seen: list[str] = []

    def make(original: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            seen.append("seen")
            return original(*args, **kwargs)  # type: ignore[operator]

        return call

    left, right = _tensor([1.0, 2.0]), _tensor([3.0, 4.0])
    parts = [Replacement(_C_ops, "relu", make), Replacement(paddle.Tensor, "__add__", make)]
    for part in parts:
        part.install()
    try:
        _C_ops.relu(left)
        found = left + right
    finally:
        for part in reversed(parts):
            part.remove()
    _expect(seen == ["seen", "seen"] and found.tolist() == [4.0, 6.0], "a call went past what stands there")


def _hooks_tensors() -> None:
    _expect(all(hasattr(core.eager, name) for name in ("run_backward", "run_partial_grad")), "core.eager starts no backward")
    seen: list[list[float]] = []
    with paddle.enable_grad():
        leaf = _tensor([1.0, 2.0], gradient=True)
        middle = leaf * 3.0
        middle._register_grad_hook(lambda gradient: seen.append(gradient.tolist()))
        (middle * 2.0).sum().backward()
    _expect(seen == [[2.0, 2.0]] and leaf.grad.tolist() == [6.0, 6.0], "another gradient than expected")


def _hooks_nodes() -> None:
    seen: list[list[float]] = []

    def hook(made: tuple[paddle.Tensor, ...], _: object) -> tuple[paddle.Tensor, ...]:
        seen.append(made[0].tolist())
        return made

    with paddle.enable_grad():
        leaf, fixed = _tensor([1.0, 2.0], gradient=True), _tensor([5.0, 7.0])
        result = paddle.multiply(leaf, fixed)
        node = result.grad_fn
        edges = [None if following is None else following.node_ptr() for following in node.next_functions]
        _expect(edges == [leaf.grad_fn.node_ptr(), None], "the edges of a node are others")
        node._register_post_hook(hook)
        result.sum().backward()
    _expect(seen == [[5.0, 7.0]] and leaf.grad.tolist() == [5.0, 7.0], "another gradient than expected")
