"""Rows of functions.toml: both frameworks' functions exist, and give the same of the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
import torch
from paddle import _C_ops as C
from torch.nn import functional as F

from trueup.foundation.frameworks.tables import functions


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


X, W, B, IMAGE, KERNEL, ONE = normal(3, 4), normal(5, 4), normal(5), normal(2, 4, 6, 6), normal(8, 4, 3, 3), np.ones(4, np.float32)
ZERO = np.zeros(4, np.float32)

Calls = tuple[Callable[..., Any], Callable[..., Any], tuple[np.ndarray, ...]]
CALLS: dict[str, Calls] = {
    "linear": (F.linear, lambda x, w, b: C.linear(x, w.t(), b), (X, W, B)),
    "convolution": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        lambda x, w: C.conv2d(x, w, [2, 2], [1, 1], "EXPLICIT", [1, 1], 1, "NCHW"), (IMAGE, KERNEL),
    ),
    "matmul": (torch.matmul, lambda x, y: C.matmul(x, y, False, False), (X, W.T.copy())),
    "add": (torch.add, C.add, (X, X)),
    "subtract": (torch.sub, C.subtract, (X, X[::-1].copy())),
    "multiply": (torch.mul, C.multiply, (X, X)),
    "divide": (torch.div, C.divide, (X, np.abs(X) + 1)),
    "relu": (F.relu, C.relu, (X,)),
    "relu6": (F.relu6, C.relu6, (X * 4,)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), lambda x: C.leaky_relu(x, 0.2), (X,)),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), lambda x: C.gelu(x, True), (X,)),
    "silu": (F.silu, C.silu, (X,)),
    "sigmoid": (torch.sigmoid, C.sigmoid, (X,)),
    "tanh": (torch.tanh, C.tanh, (X,)),
    "hardswish": (F.hardswish, C.hardswish, (X * 4,)),
    "elu": (lambda x: F.elu(x, 0.5), lambda x: C.elu(x, 0.5), (X,)),
    "exp": (torch.exp, C.exp, (X,)),
    "rsqrt": (torch.rsqrt, C.rsqrt, (np.abs(X) + 1,)),
    "sqrt": (torch.sqrt, C.sqrt, (np.abs(X),)),
    "softmax": (lambda x: torch.softmax(x, -1), lambda x: C.softmax(x, -1), (X,)),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), lambda x: C.log_softmax(x, -1), (X,)),
    "mean": (lambda x: torch.mean(x, 1), lambda x: C.mean(x, 1, False), (X,)),
    "sum": (lambda x: torch.sum(x, 1), lambda x: paddle.sum(x, 1), (X,)),
    "embedding": (F.embedding, lambda x, w: C.embedding(x, w, -1, False), (np.array([[0, 2, 1]]), W)),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-3), lambda x, w, b: first(C.layer_norm(x, w, b, 1e-3, 1)), (X, ONE * 2, ONE)
    ),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b, 1e-3), lambda x, w, b: first(C.group_norm(x, w, b, 1e-3, 2, "NCHW")),
        (IMAGE, ONE * 2, ONE),
    ),
    "instance_norm": (
        lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=1e-3),
        lambda x, w, b: first(C.instance_norm(x, w, b, 1e-3)), (IMAGE, ONE * 2, ONE),
    ),
    "batch_norm": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, False, 0.1, 1e-3),
        lambda x, m, v, w, b: first(C.batch_norm(x, m, v, w, b, True, 0.9, 1e-3, "NCHW", False, False)),
        (IMAGE, ZERO, ONE, ONE * 2, ONE),
    ),
    "prelu": (F.prelu, lambda x, w: C.prelu(x, w, "NCHW", "channel"), (IMAGE, ONE * 0.3)),
}  # fmt: skip


def first(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) else value


@pytest.mark.parametrize("name", CALLS)
def test_both_compute_the_same(name: str) -> None:
    there, here, arrays = CALLS[name]
    expected = there(*(torch.from_numpy(np.array(one)) for one in arrays)).numpy()
    np.testing.assert_allclose(here(*map(paddle.to_tensor, arrays)).numpy(), expected, rtol=2e-5, atol=2e-6)


def test_each_row_is_tried() -> None:
    assert {row.name for row in functions()} - CALLS.keys() == {"backward"}


def test_each_name_exists() -> None:
    names = [name for row in functions() for own in ("torch", "paddle") for name in row.own[own].names]
    assert [name for name in names if not callable(found(name))] == []


def found(name: str) -> Any:
    value: Any = {"torch": torch, "paddle": paddle}[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    return value
