"""A PaddlePaddle of which one operator is broken: `inject(name)` puts it in the place of the healthy one.

It stands for a faulty kernel of a new accelerator: the wrong numbers are in the memory of the result before anybody reads it, a
capture included. tests/with_paddle/cases/faulty.py has more of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops

from trueup.recording.adapters.paddle.session import aside
from trueup.recording.engine.replacing import Sweep

Operator = Callable[..., Any]
Array = np.ndarray[Any, Any]


def inject(name: str) -> None:
    """Break an operator of Paddle's, in all modules that hold it, until the process ends."""
    if name not in FAULTS:
        raise SystemExit(f"fault {name!r} is unknown: expected one of {', '.join(FAULTS)}")
    operator, broken = FAULTS[name]
    with aside():
        original = getattr(_C_ops, operator)
        Sweep([(original, broken(original))]).install()


def conv_padding(original: Operator) -> Operator:
    """Pad a convolution's input with copies of its edge where zeros are asked for."""

    def conv2d(x: Any, weight: Any, strides: Any, paddings: Any, *rest: Any) -> Any:
        result = original(x, weight, strides, paddings, *rest)
        if any(paddings):
            sides = [(0, 0), (0, 0), *((p, p) for p in paddings[-2:])]
            padded = np.pad(memory(x), sides, mode="edge")
            with paddle.no_grad():
                memory(result)[...] = memory(original(tensor(padded), weight.detach(), strides, [0, 0], *rest))
        return result

    return conv2d


def batch_norm_backward(original: Operator) -> Operator:
    """Forget, in batch norm's backward, that the variance depends on the input too."""

    returned: list[Any] = []

    def batch_norm(x: Any, mean: Any, variance: Any, scale: Any, shift: Any, is_test: bool, *rest: Any) -> Any:
        result = original(x, mean, variance, scale, shift, is_test, *rest)
        node = result[0].grad_fn
        if is_test or node is None:
            return result
        saved, epsilon = [(memory(x).astype(np.float64), memory(scale).copy())], rest[1]

        def wrong(made: Any, came: Any) -> Any:
            values, weights = saved.pop()  # Paddle 3.3 frees neither a post-hook nor what it gave back
            axes, gradient = (0, *range(2, values.ndim)), memory(came[0])
            factor = (weights / np.sqrt(values.var(axes) + epsilon)).reshape(1, -1, *[1] * (values.ndim - 2))
            memory(made[0])[...] = factor * (gradient - gradient.mean(axes, keepdims=True))
            while returned:
                returned.pop()._clear()
            returned.extend(gradient for gradient in made if isinstance(gradient, paddle.Tensor))
            return made

        node._register_post_hook(wrong)
        return result

    return batch_norm


def transposed_copy(original: Operator) -> Operator:
    """Copy a transposed tensor in the order of its memory where a reshape needs it in the order of its elements."""

    def reshape(x: Any, shape: Any, *rest: Any) -> Any:
        strides, contiguous = list(x.strides), x.is_contiguous()
        result = original(x, shape, *rest)
        if not contiguous and result.data_ptr() != x.data_ptr():
            order = sorted(range(x.ndim), key=lambda axis: -strides[axis])
            memory(result)[...] = memory(x).transpose(order).reshape(result.shape)
        return result

    return reshape


FAULTS: dict[str, tuple[str, Callable[[Operator], Operator]]] = {
    "conv-padding-replicates-edge": ("conv2d", conv_padding),
    "batch-norm-backward": ("batch_norm", batch_norm_backward),
    "transposed-view-copy": ("reshape", transposed_copy),
}


class _Window:
    """The memory of a tensor as NumPy asks for it."""

    def __init__(self, x: Any) -> None:
        kind = np.dtype(str(x.dtype).rpartition(".")[2])
        self._tensor = x
        self.__array_interface__ = {
            "version": 3, "typestr": kind.str, "shape": tuple(x.shape), "data": (x.data_ptr(), False),
            "strides": tuple(s * kind.itemsize for s in x.strides),
        }  # fmt: skip


def memory(x: Any) -> Array:
    """Return a tensor's own memory, to be read and written."""
    return np.asarray(_Window(x))


def tensor(values: Array) -> Any:
    """Make a tensor that takes no part in any graph."""
    return paddle.to_tensor(values)
