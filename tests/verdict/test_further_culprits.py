"""Behind one fault nothing else is blamed: neither a gradient that holds its share of others, nor one whose forward was wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import trueup
from strange import Altered
from trueup import simdev

LEVELS = (None, ["module", "api"])


def adversarial(into: Path, factor: float) -> None:
    """Train a critic twice on real and on made-up numbers, under autocast, which casts its weight once for both; then the maker."""
    torch.manual_seed(0)
    critic, maker, draw = nn.Linear(256, 1), nn.Linear(256, 256), torch.Generator().manual_seed(1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, maker)]
    with trueup.capture(into, model=nn.ModuleList([critic, maker])) as capture:
        for made_larger in (1.0, factor):
            real, noise = torch.randn(2, 8, 256, generator=draw)
            with torch.autocast("cpu", torch.bfloat16):
                on_real, on_made = critic(real), critic(maker(noise).detach() * made_larger)
            optimizers[0].zero_grad()
            (torch.relu(1 - on_real.float()).mean() + torch.relu(1 + on_made.float()).mean()).backward()
            optimizers[0].step()
        optimizers[1].zero_grad()
        critic(maker(noise)).mean().backward()
        optimizers[1].step()
        capture.step()


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_that_holds_others_is_no_culprit(tmp_path: Path, level: list[str] | None) -> None:
    """What went into the other pass was saved there: of the gradient that comes in nothing differs."""
    for name, factor in (("a", 1.0), ("b", 1.25)):
        adversarial(tmp_path / name, factor)
    result = trueup.compare(tmp_path / "a", tmp_path / "b", level=level)
    assert [culprit.kind for culprit in result.culprits] == ["argument"]


def classify(into: Path) -> None:
    torch.manual_seed(0)
    model, draw = nn.Linear(16, 64), torch.Generator().manual_seed(1)
    with trueup.capture(into, model=model) as capture:
        for _ in range(2):
            logits = model(torch.randn(8, 16, generator=draw))
            nn.functional.cross_entropy(logits, torch.arange(8)).backward()
            capture.step()


@pytest.mark.parametrize("level", LEVELS)
def test_the_gradient_of_a_wrong_log_softmax_keeps_no_law_and_is_not_blamed(tmp_path: Path, level: list[str] | None) -> None:
    classify(tmp_path / "a")
    with simdev.inject("log-softmax-half-sum"), Altered():
        classify(tmp_path / "b")
    result = trueup.compare(tmp_path / "a", tmp_path / "b", level=level)
    assert [(culprit.phase, culprit.step) for culprit in result.culprits] == [("forward", 0)]
