"""Rows of functions.toml: TensorFlow's operations exist, and give the same as PyTorch's functions of the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.nn import functional as F

from trueup.foundation.frameworks.tables import functions

R = tf.raw_ops
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)

CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "matmul": (torch.matmul, lambda x, y: R.MatMul(a=x, b=y), (X, X.T.copy())),
    "add": (torch.add, lambda x, y: R.AddV2(x=x, y=y), (X, X)),
    "subtract": (torch.sub, lambda x, y: R.Sub(x=x, y=y), (X, X[::-1].copy())),
    "multiply": (torch.mul, lambda x, y: R.Mul(x=x, y=y), (X, X)),
    "divide": (torch.div, lambda x, y: R.RealDiv(x=x, y=y), (X, np.abs(X) + 1)),
    "relu": (F.relu, lambda x: R.Relu(features=x), (X,)),
    "relu6": (F.relu6, lambda x: R.Relu6(features=x), (X * 4,)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.3), lambda x: R.LeakyRelu(features=x, alpha=0.3), (X,)),
    "sigmoid": (torch.sigmoid, lambda x: R.Sigmoid(x=x), (X,)),
    "tanh": (torch.tanh, lambda x: R.Tanh(x=x), (X,)),
    "exp": (torch.exp, lambda x: R.Exp(x=x), (X,)),
    "rsqrt": (torch.rsqrt, lambda x: R.Rsqrt(x=x), (np.abs(X) + 1,)),
    "sqrt": (torch.sqrt, lambda x: R.Sqrt(x=x), (np.abs(X),)),
    "softmax": (lambda x: torch.softmax(x, -1), lambda x: R.Softmax(logits=x), (X,)),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), lambda x: R.LogSoftmax(logits=x), (X,)),
    "mean": (lambda x: torch.mean(x, 1), lambda x: R.Mean(input=x, axis=1), (X,)),
    "sum": (lambda x: torch.sum(x, 1), lambda x: R.Sum(input=x, axis=1), (X,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_both_compute_the_same(name: str) -> None:
    there, here, arrays = CALLS[name]
    expected = there(*map(torch.from_numpy, arrays)).numpy()
    np.testing.assert_allclose(here(*map(tf.constant, arrays)).numpy(), expected, rtol=2e-5, atol=2e-6)


def test_each_row_is_tried_and_each_name_exists() -> None:
    rows = [row for row in functions() if "tensorflow" in row.own]
    assert {row.name for row in rows} - CALLS.keys() == {"backward"}
    names = [name.removeprefix("tf.raw_ops.") for row in rows if row.name != "backward" for name in row.own["tensorflow"].names]
    assert [name for name in names if not hasattr(R, name)] == []
