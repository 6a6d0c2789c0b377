"""Faults of optimizer steps, in the one-tensor and in the foreach form of each operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.simdev.faults import Call, Wrong, effect


def _list(value: Any) -> Sequence[Tensor]:
    return [value] if isinstance(value, Tensor) else value


def _small(value: Any) -> bool:
    """Whether a scalar can be the epsilon of an optimizer (PyTorch's defaults are 1e-8 and 1e-10)."""
    return isinstance(value, float) and 0 < value <= 1e-4


@effect("adam-epsilon-inside-root")
def _epsilon(call: Call) -> Wrong:
    epsilon = call.arguments.get("other", call.arguments.get("scalar"))
    if not _small(epsilon):
        return None
    return [(root * root + epsilon).sqrt() for root in _list(call["self"])]


@effect("adam-second-moment-value")
def _second_moment(call: Call) -> Wrong:
    triples = zip(_list(call["self"]), _list(call["tensor1"]), _list(call["tensor2"]), strict=True)
    return [moment + first * second for moment, first, second in triples]


@effect("sgd-momentum-dampened")
def _momentum(call: Call) -> Wrong:
    other = call["other"]
    if call["alpha"] != 1 or (call.op == "aten::add_.Tensor" and not isinstance(other, torch.Tensor)):
        return None
    return [buffer + 0.9 * grad for buffer, grad in zip(_list(call["self"]), _list(other), strict=True)]
