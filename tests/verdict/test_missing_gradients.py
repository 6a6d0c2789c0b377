"""A backward that ends early in one run, and a weight that one optimizer alone updates: the place is named, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trueup

LEVELS = (None, ["module", "api"])
WIDTH = 8


class Halves(nn.Module):
    """Two residual halves behind an embedding; ``cut`` says where no gradient goes."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.words, self.head, self.cut = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10), cut
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(2))
        self.words.requires_grad_("frozen words" not in cut)
        self.first[0].requires_grad_("frozen layer" not in cut)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        again, reentrant = "again" in self.cut, "reentrant" in self.cut
        x = checkpoint(self.first, x, use_reentrant=reentrant) if again or reentrant else self.first(x)
        x = x.detach() if "detached" in self.cut else x
        return self.head(x + self.second(x))


def train(into: Path, cut: str = "", *, leave_out: str = "none", fused: bool = False) -> None:
    torch.manual_seed(0)
    model, draw = Halves(cut), torch.Generator().manual_seed(1)
    given = [one for name, one in model.named_parameters() if not name.startswith(leave_out)]
    optimizer = torch.optim.AdamW(given, 1e-2, fused=fused)
    with trueup.capture(into, model=model) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randint(0, 10, (16,), generator=draw)), torch.arange(16) % 10).backward()
            optimizer.step()
            capture.step()


def compared(folder: Path, level: list[str] | None, before: str, cut: str, **how: object) -> trueup.Result:
    train(folder / "a", before)
    train(folder / "b", cut, **how)  # type: ignore[arg-type]
    return trueup.compare(folder / "a", folder / "b", level=level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("before", "cut"), [("", "detached"), ("frozen words", "frozen words, reentrant")])
def test_where_a_backward_ends(tmp_path: Path, level: list[str] | None, before: str, cut: str) -> None:
    result = compared(tmp_path, level, before, cut)
    assert result.verdict == "deviates"
    assert [(one.op, one.phase, one.step) for one in result.culprits[:1]] == [("torch.Tensor.add", "backward", 0)]
    said = "DEVIATES  the candidate's backward ends at torch.Tensor.add, which makes no gradient of input.0"
    assert result.sentence.startswith(said)
    assert all("ends at" in one.cause for one in result.culprits), "what lies behind, and the weights a step later, are no others"


@pytest.mark.parametrize("level", LEVELS)
def test_a_frozen_layer_is_named_by_what_it_is_set_to(tmp_path: Path, level: list[str] | None) -> None:
    result = compared(tmp_path, level, "", "frozen layer")
    assert (result.culprit.scope, result.culprit.phase, result.culprit.step) == ("first.0", "backward", 0)
    assert "weight of first.0 (Linear) is trained in the baseline, frozen in the candidate" in result.sentence.splitlines()[0]


@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_one_optimizer_alone_updates(tmp_path: Path, level: list[str] | None) -> None:
    result = compared(tmp_path, level, "", "", leave_out="second.2")
    assert (result.culprit.op, result.culprit.step) == ("optimizer.step", 0)
    assert "the candidate does not update second.2.bias, second.2.weight" in result.culprit.because
    assert "AdamW parameters" in result.sentence.splitlines()[0]


def test_a_weight_outside_of_layers_that_an_optimizer_is_not_given(tmp_path: Path) -> None:
    for name in "ab":
        torch.manual_seed(0)
        layer, scale = nn.Linear(WIDTH, 4), nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([*layer.parameters(), *([scale] if name == "a" else [])], 0.1)
        with trueup.capture(tmp_path / name, model=layer, detail="stats") as capture:
            for step in range(2):
                optimizer.zero_grad()
                x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
                (layer(x).square().mean() * torch.exp(-scale).sum() + scale.sum()).backward()
                optimizer.step()
                capture.step()
    result = trueup.compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "deviates"
    assert "the candidate does not update neg(0): look for" in result.culprits[0].because
    assert result.sentence.splitlines()[0] == "DEVIATES  SGD parameters: 3 in the baseline, 2 in the candidate"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cut", ["reentrant", "again"])
def test_healthy_checkpoints_and_kernels_part_nowhere(tmp_path: Path, level: list[str] | None, cut: str) -> None:
    """Equal weights (ones and zeros of norms) keep their names where another kernel updates them, and a backward its forward
    where it goes through a recomputation, though nothing of the second step is bitwise equal."""
    result = compared(tmp_path, level, "", cut, fused=True)
    assert result.verdict == "aligned", result.sentence
