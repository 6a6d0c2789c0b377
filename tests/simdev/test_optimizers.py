"""Ascend's optimizers that PyTorch lacks: their papers' formulas in NumPy, and where they fall together with PyTorch's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from trueup.simdev.standins import optimizers

Array = NDArray[np.float64]
STEPS = 6


def made() -> tuple[list[Array], list[list[Array]]]:
    """Return weights (the second at a right angle to its gradients, as behind a norm) and the gradients of each step."""
    random = np.random.default_rng(3)
    weights = [random.normal(size=(4, 3, 3)), random.normal(size=(4, 8)), random.normal(size=5), np.zeros((2, 2))]
    gradients = []
    for _ in range(STEPS):
        given = [random.normal(size=one.shape) for one in weights]
        along = weights[1] / np.linalg.norm(weights[1], axis=1, keepdims=True)
        given[1] -= along * (along * given[1]).sum(1, keepdims=True)
        gradients.append(given)
    return weights, gradients


def trained(kind: Any, dtype: torch.dtype = torch.float64, **options: Any) -> list[Array]:
    weights, gradients = made()
    parameters = [torch.tensor(one, dtype=dtype, requires_grad=True) for one in weights]
    optimizer = kind(parameters, **options)
    for given in gradients:
        for p, grad in zip(parameters, given, strict=True):
            p.grad = torch.tensor(grad, dtype=dtype)
        optimizer.step()
    return [p.detach().double().numpy() for p in parameters]


def lamb(x: Array, m: Array, v: Array, g: Array, t: int, o: dict[str, Any]) -> tuple[Array, Array, Array]:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    r = m / (np.sqrt(v) + 1e-6) + o["weight_decay"] * x
    trust = min(np.sqrt((x**2).sum()), 10) / np.sqrt((r**2).sum()) if np.any(x) and np.any(r) else 1.0
    return x - o["lr"] * (1 if o.get("adam") else trust) * r, m, v


def adamp(x: Array, m: Array, v: Array, g: Array, t: int, o: dict[str, Any]) -> tuple[Array, Array, Array]:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    top = 0.9 * m + 0.1 * g if o.get("nesterov") else m
    p, ratio = top / (np.sqrt(v) / math.sqrt(1 - 0.999**t) + 1e-8), 1.0
    if x.ndim > 1:
        for view in ((len(x), -1), (1, -1)):
            w, d, q = x.reshape(view), g.reshape(view), p.reshape(view)
            unit = [row / (np.sqrt(row @ row) + 1e-8) for row in w]
            cosines = [abs(u @ e) / (np.sqrt(e @ e) + 1e-8) for u, e in zip(unit, d, strict=True)]
            if max(cosines) < 0.1 / math.sqrt(w.shape[1]):
                p = np.stack([row - u * (u @ row) for u, row in zip(unit, q, strict=True)]).reshape(x.shape)
                ratio = 0.1
                break
    return x * (1 - o["lr"] * o["weight_decay"] * ratio) - o["lr"] / (1 - 0.9**t) * p, m, v


def bert(x: Array, m: Array, v: Array, g: Array, t: int, o: dict[str, Any]) -> tuple[Array, Array, Array]:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    part = (t - 1) / 10
    factor = part / 0.2 if part < 0.2 else (part - 1) / (0.2 - 1)
    return x - o["lr"] * factor * (m / (np.sqrt(v) + 1e-6) + 0.01 * x), m, v


def rmsprop(x: Array, m: Array, v: Array, g: Array, t: int, o: dict[str, Any]) -> tuple[Array, Array, Array]:
    if o.get("decoupled_decay"):
        x = x - o["weight_decay"] * x
    else:
        g = g + o["weight_decay"] * x
    v = 0.9 * v + 0.1 * g * g
    m = 0.8 * m + o["lr"] * g / np.sqrt(v + 1e-10)
    return x - m, m, v


def expected(formula: Any, options: dict[str, Any], clip: float | None) -> list[Array]:
    weights, gradients = made()
    kept = [(np.zeros_like(one), np.zeros_like(one)) for one in weights]
    for t, given in enumerate(gradients, 1):
        norm = math.sqrt(sum(float((one**2).sum()) for one in given))
        factor = 1.0 if clip is None else min(1.0, clip / norm)
        for i, g in enumerate(given):
            weights[i], *moments = formula(weights[i], *kept[i], g * factor, t, options)
            kept[i] = tuple(moments)
    return weights


SCHEDULED = {"lr": 0.1, "warmup": 0.2, "t_total": 10}
CASES: tuple[tuple[str, Any, dict[str, Any], float | None], ...] = (
    ("NpuFusedLamb", lamb, {"lr": 0.1, "weight_decay": 0.01}, None),
    ("NpuFusedLamb", lamb, {"lr": 0.1, "weight_decay": 0.0, "use_global_grad_norm": True}, 1.0),
    ("NpuFusedLamb", lamb, {"lr": 0.1, "weight_decay": 0.1, "adam": True}, None),
    ("NpuFusedAdamP", adamp, {"lr": 0.1, "weight_decay": 0.05}, None),
    ("NpuFusedAdamP", adamp, {"lr": 0.1, "weight_decay": 0.0, "nesterov": True}, None),
    ("NpuFusedBertAdam", bert, SCHEDULED, 1.0),
    ("NpuFusedRMSpropTF", rmsprop, {"lr": 0.1, "weight_decay": 0.05, "momentum": 0.8}, None),
    ("NpuFusedRMSpropTF", rmsprop, {"lr": 0.1, "weight_decay": 0.05, "momentum": 0.8, "decoupled_decay": True}, None),
)


@pytest.mark.parametrize(("name", "formula", "options", "clip"), CASES)
def test_the_papers_formula(name: str, formula: Any, options: dict[str, Any], clip: float | None) -> None:
    for mine, wanted in zip(trained(getattr(optimizers, name), **options), expected(formula, options, clip), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-9)  # clipping adds 1e-6 to a norm
    assert not any(np.isnan(one).any() for one in trained(getattr(optimizers, name), torch.float32, **options))


def test_where_they_fall_together_with_pytorchs() -> None:
    plain = {"lr": 0.01, "alpha": 0.9, "eps": 0.0, "weight_decay": 0.1, "momentum": 0.7}
    adam = {"lr": 0.01, "weight_decay": 0.1}
    pairs = [
        (trained(optimizers.NpuFusedAdamP, delta=0.0, **adam), trained(torch.optim.AdamW, **adam)),
        (trained(optimizers.NpuFusedRMSpropTF, **plain), trained(torch.optim.RMSprop, **plain)),
        (trained(optimizers.NpuFusedRMSpropTF, **{**plain, "centered": True, "lr_in_momentum": False, "eps": 1e-30}),
         trained(torch.optim.RMSprop, **{**plain, "centered": True, "eps": 1e-30})),
    ]  # fmt: skip
    for ours, theirs in pairs:
        for mine, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine[np.isfinite(wanted)], wanted[np.isfinite(wanted)], rtol=1e-7)


def test_the_schedules_of_bert() -> None:
    with pytest.raises(ValueError, match="Invalid schedule parameter: steps; expected one of warmup_cosine"):
        optimizers.NpuFusedBertAdam([torch.zeros(1)], 0.1, schedule="steps")
    shares = [0.05, 0.1, 0.55, 1.0]
    assert [round(optimizers.WARMUP["warmup_cosine"](x, 0.1), 3) for x in shares] == [0.5, 0.976, 0.422, 0.0]
    assert [round(optimizers.WARMUP["warmup_linear"](x, 0.1), 3) for x in shares] == [0.5, 1.0, 0.5, 0.0]
    assert [round(optimizers.WARMUP["warmup_poly"](x, 0.1), 3) for x in shares] == [0.5, 0.949, 0.671, 0.0]
