"""Which gradients leave a call's last autograd node, held against autograd itself: a hook sees what msprobe and ptdbg see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trueup.exchange.readers import ascend
from trueup.exchange.readers.ascend import left_gradients, transposed
from trueup.exchange.readers.dump import ForeignTensor

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "conv1d": [(2, 3, 5), (4, 3, 3), (4,)], "conv2d": [(2, 3, 5, 5), (4, 3, 3, 3), (4,)],
    "conv3d": [(1, 2, 3, 3, 3), (2, 2, 2, 2, 2), (2,)],
    "mm": [(3, 4), (4, 5)], "matmul": [(3, 4), (4, 5)], "bmm": [(2, 3, 4), (2, 4, 5)], "addmm": [(5,), (3, 4), (4, 5)],
    "baddbmm": [(2, 3, 5), (2, 3, 4), (2, 4, 5)], **{name: [(3, 4), (4,)] for name in ("add", "sub", "mul", "div")},
}  # fmt: skip
"""Shapes of the tensors that a function is given; a matrix where none are named."""


def arguments(op: str) -> dict[str, Any]:
    """Return arguments for a function by the names of a native capture: a position, or a keyword."""
    name = op.rpartition(".")[2]
    made = {
        "layer_norm": {"0": torch.rand(3, 4), "normalized_shape": (4,), "weight": torch.rand(4), "bias": torch.rand(4)},
        "group_norm": {"0": torch.rand(2, 4, 5), "1": 2, "weight": torch.rand(4), "bias": torch.rand(4)},
        "batch_norm": {
            "0": torch.rand(3, 4), "1": torch.zeros(4), "2": torch.ones(4), "weight": torch.rand(4), "bias": torch.rand(4),
            "training": True,
        },
        "embedding": {"0": torch.tensor([1, 0, 1]), "1": torch.rand(3, 4)},
        "softmax": {"0": torch.rand(3, 4), "dim": -1},
        "masked_fill": {"0": torch.rand(3, 4), "1": torch.rand(3, 4) > 0.5, "2": 0.0},
    }.get(name)  # fmt: skip
    return made or {str(n): torch.rand(shape) + 0.5 for n, shape in enumerate(SHAPES.get(name, [(3, 4)]))}


def function_of(op: str) -> Callable[..., Tensor]:
    place: Any = torch
    for part in op.split(".")[1:]:
        place = getattr(place, part)
    return place  # type: ignore[no-any-return]


def left_and_true(
    call: Callable[..., Tensor], given: dict[str, Any], wanted: dict[str, Tensor]
) -> tuple[list[Any], dict[str, Tensor]]:
    """Return what leaves the last node of a call, and the gradients of what it was given."""
    seen: list[Any] = []
    for tensor in wanted.values():
        tensor.requires_grad_()
    output = call(*(v for k, v in given.items() if k.isdigit()), **{k: v for k, v in given.items() if not k.isdigit()})
    assert output.grad_fn is not None
    output.grad_fn.register_hook(lambda left, _: seen.extend(left))
    found = torch.autograd.grad(output, list(wanted.values()), torch.rand(output.shape))
    return seen, dict(zip(wanted, found, strict=True))


@pytest.mark.parametrize("op", sorted(ascend.table()["nodes"]))
def test_a_function_of_one_node_gives_the_gradients_of_its_inputs(op: str) -> None:
    torch.manual_seed(0)
    function, given = function_of(op), arguments(op)
    wanted = {k: v for k, v in given.items() if isinstance(v, Tensor) and v.is_floating_point() and not is_statistic(function, k)}
    left, true = left_and_true(function, given, wanted)
    told = left_gradients(op, [None if g is None else tuple(g.shape) for g in left])
    found = {one.slot: gradient for one, gradient in zip(told, left, strict=True) if gradient is not None}
    assert {slot.removeprefix("grad_input.") for slot in found} == set(true)
    for slot, gradient in found.items():
        assert torch.equal(gradient, true[slot.removeprefix("grad_input.")])


def is_statistic(function: Callable[..., Tensor], argument: str) -> bool:
    return getattr(function, "__name__", "") == "batch_norm" and argument in ("1", "2")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("shape", [(5, 4), (4, 4), (2, 3, 4)])
def test_a_linear_layer(shape: tuple[int, ...], frozen: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    given = {"0": torch.rand(shape), "1": torch.rand(4, 4), "2": torch.rand(4)}
    if not bias:
        del given["2"]
    wanted = {name: tensor for name, tensor in given.items() if int(name) not in frozen}
    left, true = left_and_true(functional.linear, given, wanted)
    told = left_gradients("torch.nn.functional.linear", [None if g is None else tuple(g.shape) for g in left])
    found = [(one, gradient) for one, gradient in zip(told, left, strict=True) if gradient is not None]
    if len(shape) == 3:
        assert all(one.slot.startswith("grad_input.node.") for one, _ in found)
        return
    assert {one.slot.removeprefix("grad_input.") for one, _ in found} == set(true)
    for one, gradient in found:
        assert torch.equal(gradient.T if one.transposed else gradient, true[one.slot.removeprefix("grad_input.")])


def test_a_linear_layer_that_is_its_own_node() -> None:
    """As on devices whose backend has a kernel for it: input, weight, bias."""
    told = left_gradients("torch.nn.functional.linear", [(2, 3, 4), (5, 4), (5,)])
    assert told == [("grad_input.0", False), ("grad_input.1", False), ("grad_input.2", False)]


def test_what_is_known_of_no_function() -> None:
    assert [one.slot for one in left_gradients("torch.stft", [(3,), (4,)])] == ["grad_input.node.0", "grad_input.node.1"]
    assert [one.slot for one in left_gradients("torch.Tensor.add", [(3,)])] == ["grad_input.node.0"]  # which of two?


def test_a_transposed_gradient() -> None:
    array = np.arange(6.0).reshape(2, 3)
    tensor = ForeignTensor("grad_input.1", "n", "float64", (2, 3), checksum="crc32:00", load=lambda: array)
    turned = transposed(tensor)
    assert (turned.shape, turned.checksum) == ((3, 2), "crc32-transposed:00")
    assert turned.load is not None
    assert np.array_equal(turned.load(), array.T)
    assert transposed(replace(tensor, checksum="xor64:0f")).checksum == "xor64:0f"  # an XOR has no order
