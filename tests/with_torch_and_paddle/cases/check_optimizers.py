"""What two optimizers do in other ways is said before any number; pairs that are set alike make the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
import torch
from paddle import nn as pnn
from torch import nn

import trueup
from trueup.analysis.pairing.models import compare_optimizers
from trueup.recording.adapters.models import facts_of

P = paddle.optimizer


def said(there: Callable[[Any], Any], here: Callable[[Any], Any]) -> list[str]:
    models = nn.Linear(3, 2), pnn.Linear(3, 2)
    facts = facts_of(there(models[0].parameters())), facts_of(here(models[1].parameters()))
    return [str(one).partition(": ")[2] for one in compare_optimizers(*facts)]


def test_defaults() -> None:
    assert said(torch.optim.AdamW, lambda p: P.AdamW(parameters=p)) == []
    assert said(torch.optim.Adam, lambda p: P.Adam(parameters=p)) == []
    assert said(torch.optim.SGD, lambda p: P.SGD(parameters=p)) == []
    assert said(torch.optim.SGD, lambda p: P.Momentum(parameters=p)) == ["momentum is 0 in torch, 0.9 in paddle"]
    assert said(torch.optim.RMSprop, lambda p: P.RMSProp(0.01, parameters=p)) == [
        "alpha is 0.99 in torch, 0.95 in paddle", "eps is 1e-08 in torch, 1e-06 in paddle",
        "torch adds epsilon to the root, paddle under it",
    ]  # fmt: skip
    assert "rho is 0.9 in torch, 0.95 in paddle" in said(torch.optim.Adadelta, lambda p: P.Adadelta(parameters=p))


def test_decay_clipping_schedules_and_kinds() -> None:
    decay = said(lambda p: torch.optim.Adam(p, weight_decay=0.1), lambda p: P.Adam(parameters=p, weight_decay=0.2))
    assert decay == ["weight_decay is 0.1 in torch, 0.2 in paddle"]
    assert said(torch.optim.SGD, lambda p: P.SGD(parameters=p, weight_decay=0.1)) == ["weight_decay is 0 in torch, 0.1 in paddle"]
    clip = pnn.ClipGradByGlobalNorm(1.0)
    clipped = said(torch.optim.AdamW, lambda p: P.AdamW(parameters=p, grad_clip=clip))
    assert clipped == ["clipping is none of its own in torch, ClipGradByGlobalNorm at 1.0 in paddle"]
    scheduled = said(torch.optim.SGD, lambda p: P.SGD(P.lr.StepDecay(0.001, 10), parameters=p))
    assert scheduled == ["schedule is none of its own in torch, StepDecay in paddle"]
    assert said(torch.optim.SGD, lambda p: P.AdamW(parameters=p)) == ["they are different algorithms"]
    assert "is in no table" in said(torch.optim.Rprop, lambda p: P.Rprop(parameters=p))[0]


@pytest.mark.parametrize("name", ["SGD", "Momentum", "Adam", "AdamW"])
def test_alike_settings_make_the_same_steps(name: str) -> None:
    there, here = nn.Linear(3, 2), pnn.Linear(3, 2)
    trueup.convert_weights(there, here)
    momentum = {"momentum": 0.9} if name == "Momentum" else {}
    kind = torch.optim.SGD if name in ("SGD", "Momentum") else getattr(torch.optim, name)
    first = kind(there.parameters(), lr=0.01, weight_decay=0.1, **momentum)
    second = getattr(P, name)(learning_rate=0.01, weight_decay=0.1, parameters=here.parameters(), **momentum)
    assert compare_optimizers(facts_of(first), facts_of(second)) == []
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    for _ in range(3):
        there(torch.from_numpy(x)).square().sum().backward()
        here(paddle.to_tensor(x)).square().sum().backward()
        for optimizer in (first, second):
            optimizer.step()
        first.zero_grad()
        second.clear_grad()
    np.testing.assert_allclose(here.weight.numpy().T, there.weight.detach().numpy(), rtol=1e-5, atol=1e-6)
