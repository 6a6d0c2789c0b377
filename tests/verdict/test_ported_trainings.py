"""Small trainings as people port them: averages of the weights, optimizers in another order, packed and transposed tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trueup

DECAY = 0.99


def in_place(averages: list[Tensor], weights: list[Tensor], decay: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.mul_(decay).add_(weight, alpha=1 - decay)


def of_lists(averages: list[Tensor], weights: list[Tensor], decay: float) -> None:
    torch._foreach_lerp_(averages, weights, 1 - decay)


def anew(averages: list[Tensor], weights: list[Tensor], decay: float) -> None:
    averages[:] = [decay * average + (1 - decay) * weight for average, weight in zip(averages, weights, strict=True)]


def copied(averages: list[Tensor], weights: list[Tensor], decay: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(average * decay + weight * (1 - decay))


def moved_back(averages: list[Tensor], weights: list[Tensor], decay: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.sub_((1 - decay) * (average - weight))


FORMS: tuple[Callable[[list[Tensor], list[Tensor], float], None], ...] = (in_place, of_lists, anew, copied, moved_back)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., None], float], Path]:
    """Return what trains a small regression, with an output of one element, and an average of its weights; each once."""
    folder = tmp_path_factory.mktemp("averaged")

    def train(form: Callable[..., None], decay: float = DECAY) -> Path:
        into = folder / f"{form.__name__}-{decay}"
        if not into.exists():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
            averages, optimizer = list(copy.deepcopy(model).parameters()), torch.optim.Adam(model.parameters(), 1e-2, foreach=False)
            with trueup.capture(into, model=model) as capture:
                for _ in range(3):
                    optimizer.zero_grad()
                    (model(torch.randn(16, 8)) - 1).square().mean().backward()
                    optimizer.step()
                    with torch.no_grad():
                        form(averages, list(model.parameters()), decay)
                    capture.step()
        return into

    return train


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("baseline", FORMS[:3], ids=lambda form: form.__name__)
def test_an_average_of_the_weights_in_any_form(
    averaged: Callable[[Callable[..., None], float], Path], baseline: Callable[..., None], form: Callable[..., None]
) -> None:
    """Nobody reads what the last step made of it. What is right is aligned, and another decay of the same form is no other form."""
    result = trueup.compare(averaged(baseline, DECAY), averaged(form, DECAY))
    assert result.verdict == "aligned", result.sentence
    result = trueup.compare(averaged(baseline, DECAY), averaged(form, 0.98))
    assert (result.verdict, result.culprit.phase, result.culprit.step) == ("deviates", "optimizer", 0), result.sentence


@pytest.mark.parametrize("steps", [1, 3])
def test_an_average_that_is_computed_and_dropped(steps: int, tmp_path: Path) -> None:
    """`average = ...` in a loop names another tensor, and changes none: nobody reads what it makes, there or in the next step."""

    def train(dropped: bool) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        target, optimizer = copy.deepcopy(model).requires_grad_(False), torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            (model(x) - target(x)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for average, weight in zip(target.parameters(), model.parameters(), strict=True):
                    made = average * DECAY + weight * (1 - DECAY)
                    if not dropped:
                        average.copy_(made)

    assert pair(tmp_path, train).verdict != "aligned"


def test_another_figure_that_is_logged_is_no_counterpart(tmp_path: Path) -> None:
    def train(other: bool) -> None:
        model = nn.Linear(8, 16)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.weight.abs().mean() if other else model.weight.std()

    assert pair(tmp_path, train).verdict != "deviates"


def pair(folder: Path, train: Callable[[bool], None], level: list[str] | None = None) -> trueup.Result:
    for other in (False, True):
        torch.manual_seed(0)
        with trueup.capture(folder / str(other), steps=range(3)):
            train(other)
    return trueup.compare(folder / "False", folder / "True", level=level)


@pytest.mark.parametrize("kernel", ["loop", "foreach", "fused", "momentum"])
def test_the_same_parameters_in_another_order(kernel: str, tmp_path: Path) -> None:
    def train(backwards: bool) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
        given = list(model.parameters())[:: -1 if backwards else 1]
        how = {kernel: True} if kernel in ("foreach", "fused") else {"foreach": False}
        optimizer = torch.optim.SGD(given, 0.1, momentum=0.9) if kernel == "momentum" else torch.optim.AdamW(given, 1e-2, **how)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()

    assert pair(tmp_path, train).verdict == "aligned"


@pytest.mark.parametrize("level", [None, ["module", "api"]])
def test_a_transposed_weight_is_no_other_weight(level: list[str] | None, tmp_path: Path) -> None:
    def train(transposed: bool) -> None:
        weight, x = nn.Parameter(torch.randn(3, 3)), torch.ones(2, 3)
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            ((x + (weight.t() if transposed else weight)[None][0, 0]) ** 2).sum().backward()
            optimizer.step()

    result = pair(tmp_path, train, level)
    assert result.verdict == "deviates"
    first = result.sentence.splitlines()[0]
    assert first.removeprefix("DEVIATES  only the candidate runs ") in ("aten::t", "torch.Tensor.t"), result.sentence


@pytest.mark.parametrize("level", [None, ["module", "api"]])
def test_two_results_of_one_call_that_change_places(level: list[str] | None, tmp_path: Path) -> None:
    def train(swapped: bool) -> None:
        packed, head = nn.Linear(8, 24), nn.Linear(8, 2)
        for _ in range(2):
            q, k, v = packed(torch.randn(2, 5, 8)).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
            q, k = (k, q) if swapped else (q, k)
            head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).square().mean().backward()

    result = pair(tmp_path, train, level)
    assert result.verdict == "deviates"
    assert "scaled_dot_product_attention reads output." in result.sentence.splitlines()[0]


def test_a_mask_takes_away_what_is_large(tmp_path: Path) -> None:
    """Of the gradients of rare targets one factor leaves what is small: the error lies evenly, and is large beside that."""

    def train(by_hand: bool) -> None:
        layer = nn.Linear(16, 64)
        for _ in range(2):
            x, target = torch.randn(256, 16), (torch.rand(256, 64) < 0.02).float()
            p = torch.sigmoid(layer(x) - 8)
            cross = F.binary_cross_entropy(p, target, reduction="none") if not by_hand else (
                -(target * torch.log(p) + (1 - target) * torch.log(1 - p))
            )  # fmt: skip
            (cross * (1 - (p * target + (1 - p) * (1 - target))) ** 2).sum().backward()

    result = pair(tmp_path, train)
    assert result.verdict == "aligned", result.sentence


def test_the_norm_of_a_sparse_gradient_is_of_no_indices(tmp_path: Path) -> None:
    def train(dense: bool) -> None:
        bag, head = nn.EmbeddingBag(900, 4, sparse=not dense), nn.Linear(4, 2)
        head(bag(torch.randint(800, 900, (5, 3)))).square().mean().backward()

    result = pair(tmp_path, train)
    assert result.verdict != "deviates", result.sentence
    assert all(norm < 10 for run in (result.baseline, result.candidate) for _, norm in run.gradient_norms)
