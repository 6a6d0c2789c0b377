"""Whose gradients leave the last autograd node of an API call: what msprobe and ptdbg see of a function's backward.

Of a function that is one node they are those of its inputs, in the order of the node's own arguments. Of any other they are those
of a tensor in between, which no native capture has: a linear layer on three dimensions ends in a view of a product, and what leaves
the view is the gradient that came in, in another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from trueup.exchange.readers.dump import Array, ForeignTensor, UnreadableError
from trueup.exchange.readers.names import nodes

Shape = tuple[int, ...] | None
"""None of a gradient that is not there, because its tensor wants none."""


class Left(NamedTuple):
    """What a gradient is in our words."""

    slot: str
    transposed: bool = False
    """Whether the dump has it with rows and columns exchanged: ``addmm`` gets the transposed weight."""


def left_gradients(op: str, shapes: Sequence[Shape]) -> list[Left]:
    """Return what each gradient is that left the last node of a call.

    >>> left_gradients("torch.nn.functional.gelu", [(2, 8)])
    [Left(slot='grad_input.0', transposed=False)]
    >>> [left.slot for left in left_gradients("torch.nn.functional.linear", [(8,), (4, 16), (16, 8)])]
    ['grad_input.2', 'grad_input.0', 'grad_input.1']
    """
    known = _of_linear(shapes) if op == "torch.nn.functional.linear" else None
    if known is None:
        names = nodes(op)
        known = [Left(f"grad_input.{name}") for name in names] if names is not None and len(names) == len(shapes) else None
    return known or [Left(f"grad_input.node.{k}") for k in range(len(shapes))]


def _of_linear(shapes: Sequence[Shape]) -> list[Left] | None:
    """Tell which node ended a linear layer, by the shapes: ``addmm(bias, input, weight.t())``, ``mm(input, weight.t())``, itself.

    A node that has but one gradient, in whatever shape, is a view of the product.
    """
    ranks = [None if shape is None else len(shape) for shape in shapes]
    given, weight, bias = Left("grad_input.0"), Left("grad_input.1"), Left("grad_input.2")
    if len(ranks) == 3 and ranks[0] in (1, None) and ranks[1] in (2, None) and ranks[2] in (2, None) and ranks[1:] != [None, None]:
        return [bias, given, weight._replace(transposed=True)]
    if len(ranks) == 3 and ranks[1] in (2, None) and ranks[2] in (1, None) and ranks[0] is not None and ranks[0] > 1:
        return [given, weight, bias]
    if ranks in ([2, 2], [None, 2], [2, None]):
        return [given, weight._replace(transposed=True)]
    return None


def transposed(tensor: ForeignTensor) -> ForeignTensor:
    """Exchange rows and columns of a matrix; its checksum compares with none of the other order, but an XOR has no order."""
    load: Callable[[], Array] | None = partial(_load_transposed, tensor) if tensor.load is not None else None
    shape = tensor.shape[::-1] if tensor.shape is not None else None
    algorithm, _, value = (tensor.checksum or "").partition(":")
    checksum = tensor.checksum if algorithm.startswith("xor") or not value else f"{algorithm}-transposed:{value}"
    return replace(tensor, shape=shape, checksum=checksum, load=load, strides=None)


def _load_transposed(tensor: ForeignTensor) -> Array:
    assert tensor.load is not None
    array = tensor.load()
    if tensor.shape is not None and array.shape != tensor.shape:
        raise UnreadableError(f"the file holds shape {list(array.shape)} where the dump says {list(tensor.shape)}")
    return np.ascontiguousarray(array.T)
