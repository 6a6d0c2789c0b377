"""Parts of one training written another way, each where the search for what comes together has something else to follow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup

LEVELS = {"api": ["module", "api"], "all": None}
FORMS = ("plain", "weight", "sign", "loss", "twice", "square")


class Model(nn.Module):
    """Weights with a direction and a length of their own; the bias is read twice."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.way, self.length = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.rand(12) + 0.5)
        self.bias, self.form = nn.Parameter(torch.randn(12)), form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "weight":  # the gradient of the direction is a sum, which the optimizer reads
            weight = self.way * (self.length * torch.rsqrt(self.way.square().sum(1)))[:, None]
        else:
            weight = torch._weight_norm(self.way, self.length[:, None], 0)
        if self.form == "twice":
            rows = torch.stack([F.linear(row, weight, self.bias) for row in x])
        else:
            rows = F.linear(x, weight, self.bias)
        return torch.tanh(rows) + self.bias


def cost(form: str, scores: Tensor, labels: Tensor) -> Tensor:
    # the backward of a run reads what its forward was given
    named = F.nll_loss(scores.log_softmax(-1), labels) if form == "loss" else F.cross_entropy(scores, labels)
    most, times = scores.square().mean(1), 0.11 if form == "wrong" else 0.1
    liked = F.softplus(-times * most) if form == "sign" else -F.logsigmoid(times * most)
    long = scores.square().sum(1).sqrt()
    # both forms call `square`, and what it is given is no counterpart
    bound = (long.square() - 2 * long + 1).mean() if form == "square" else (long - 1).square().mean()
    return named + liked.mean() + 0.1 * bound


def trained(into: Path, form: str) -> Path:
    torch.manual_seed(0)
    model = Model(form)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    chance = torch.Generator().manual_seed(1)
    with trueup.capture(into, model=model, detail="stats") as capture:
        for _ in range(2):
            x, labels = torch.randn(6, 8, generator=chance), torch.randint(12, (6,), generator=chance)
            optimizer.zero_grad()
            cost(form, model(x), labels).backward()
            optimizer.step()
            capture.step()
    return into


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return {form: trained(tmp_path_factory.mktemp("runs") / form, form) for form in (*FORMS, "wrong")}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("levels", LEVELS)
def test_another_way_is_aligned(levels: str, form: str, runs: dict[str, Path]) -> None:
    result = trueup.compare(runs["plain"], runs[form], level=LEVELS[levels])
    assert result.verdict == "aligned", result.sentence


@pytest.mark.parametrize("levels", LEVELS)
def test_another_number_is_blamed(levels: str, runs: dict[str, Path]) -> None:
    result = trueup.compare(runs["plain"], runs["wrong"], level=LEVELS[levels])
    assert result.verdict == "deviates", result.sentence
    assert result.culprit is not None
    assert "mul" in result.culprit.op


class Turned(nn.Module):
    """Rotary positions, of halves that are negated and swapped or of complex numbers: `cat` stands in both, of other tensors."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.rows, self.out = form, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows, angle = self.rows(x), torch.outer(torch.arange(6.0), 1e-2 ** (torch.arange(8.0) / 8))
        first, second = rows[..., :8], rows[..., 8:]
        if self.form == "complex":
            turned = torch.complex(first.contiguous(), second.contiguous()) * torch.polar(torch.ones_like(angle), angle)
            return self.out(torch.cat([turned.real, turned.imag], -1))
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        return self.out(rows * cos + torch.cat([-second, first], -1) * (1.1 if self.form == "wrong" else 1.0) * sin)


def turned(into: Path, form: str) -> Path:
    torch.manual_seed(0)
    model = Turned(form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with trueup.capture(into, model=model, detail="stats") as capture:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6, 16)).square().mean().backward()
            optimizer.step()
            capture.step()
    return into


@pytest.mark.parametrize(("form", "verdict"), [("complex", "aligned"), ("wrong", "deviates")])
def test_a_pair_by_chance_says_nothing_of_what_flows_in(form: str, verdict: str, tmp_path: Path) -> None:
    result = trueup.compare(turned(tmp_path / "halves", "halves"), turned(tmp_path / form, form))
    assert result.verdict == verdict, str(result)


class ByHand(torch.optim.Optimizer):
    """SGD with Nesterov's momentum and a decay that joins the gradient, which PyTorch gives to `add` as `alpha`."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.decay = decay

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                gradient, state = weight.grad + self.decay * weight, self.state[weight]
                state["b"] = gradient.clone() if "b" not in state else state["b"] * 0.9 + gradient
                weight -= group["lr"] * (gradient + 0.9 * state["b"])


def decayed(into: Path, by_hand: bool) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 1))
    settings = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 3e-5}
    optimizer = ByHand(model.parameters(), 3e-5) if by_hand else torch.optim.SGD(model.parameters(), **settings)  # type: ignore[arg-type]
    with trueup.capture(into, model=model, detail="stats") as capture:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 1, 8, 8)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 12)
            optimizer.step()
            capture.step()
    return into


@pytest.mark.parametrize("levels", LEVELS)
def test_what_a_call_with_other_arguments_reads_is_compared_by_what_it_returns(levels: str, tmp_path: Path) -> None:
    """A momentum that is a new tensor in each step is a state that one run alone keeps: no more is told of it."""
    result = trueup.compare(decayed(tmp_path / "theirs", False), decayed(tmp_path / "own", True), level=LEVELS[levels])
    assert result.verdict != "deviates", str(result)
