"""What a call is given: another call's result, clipped gradients, numbers that only one run casts; from statistics alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup.foundation.model import Result

LEVELS = {"api": ["module", "api"], "all": None}
Cost = Callable[[Tensor], Tensor]
TRUTH = (torch.arange(32 * 4) % 3 == 0).float().reshape(32, 4)


class Halves(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.first, self.linear, self.order = nn.Linear(4, 4), nn.Linear(4, 4), order

    def forward(self, x: Tensor) -> Tensor:
        whole = self.first(x)
        one, other = whole.chunk(2, -1)
        other = other.exp() + one if self.order == "swapped sum" else one + other.exp()
        other = whole[:, 2:] if self.order == "unread sum" else other
        return self.linear(torch.cat((one, other) if self.order == "swapped" else (other, one), -1))


def clipped(model: nn.Module, how: str) -> None:
    if how == "function":
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=False)
    if how == "by hand":
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        whole = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        for grad in grads:
            grad.mul_((0.01 / (whole + 1e-6)).clamp(max=1.0))


def focal(scores: Tensor) -> Tensor:
    missed = torch.where(TRUTH > 0, 1 - torch.sigmoid(scores), torch.sigmoid(scores))
    return (missed.square() * F.binary_cross_entropy_with_logits(scores, TRUTH, reduction="none")).sum()


def focal_by_signs(scores: Tensor, sign: float = -1.0) -> Tensor:
    right = torch.where(TRUTH > 0, scores, -scores)
    return sign * (torch.sigmoid(-right).square() * F.logsigmoid(right)).sum()


def compared(tmp_path: Path, level: str, *runs: tuple[str, str, Cost]) -> Result:
    """Compare two trainings of two steps: the order of halves, how gradients are clipped, and the loss."""
    for n, (order, clip, cost) in enumerate(runs):
        torch.manual_seed(0)
        model = Halves(order)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        batches = torch.randn(2, 32, 4, generator=torch.Generator().manual_seed(1))
        with trueup.capture(tmp_path / str(n), model=model, detail="stats") as capture:
            for batch in batches:
                optimizer.zero_grad()
                cost(model(batch).float()).backward()
                clipped(model, clip)
                optimizer.step()
                capture.step()
    return trueup.compare(tmp_path / "0", tmp_path / "1", level=LEVELS[level])


PLAIN = ("plain", "", focal)


@pytest.mark.parametrize("level", LEVELS)
def test_halves_joined_in_another_order_are_named(tmp_path: Path, level: str) -> None:
    first = compared(tmp_path, level, PLAIN, ("swapped", "", focal)).culprit
    assert first is not None
    assert (first.op, first.kind, first.step) == ("torch.cat", "argument", 0)
    assert first.cause.startswith("torch.cat reads the result of torch.Tensor.add in the baseline, of torch.nn.functional.linear (")


@pytest.mark.parametrize("level", LEVELS)
def test_a_view_read_for_what_was_computed_is_named(tmp_path: Path, level: str) -> None:
    result = compared(tmp_path, level, PLAIN, ("unread sum", "", focal))
    assert [(f.op, f.kind, f.cause) for f in result.culprits] == [
        ("torch.Tensor.__getitem__", "region", "only the candidate runs torch.Tensor.__getitem__")
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_terms_in_another_order_are_no_fault(tmp_path: Path, level: str) -> None:
    assert compared(tmp_path, level, PLAIN, ("swapped sum", "", focal)).verdict == "aligned"


@pytest.mark.parametrize("level", LEVELS)
def test_a_sign_moved_out_of_a_sum_is_aligned_and_a_lost_one_is_not(tmp_path: Path, level: str) -> None:
    assert compared(tmp_path / "right", level, PLAIN, ("plain", "", focal_by_signs)).verdict == "aligned"
    wrong = compared(tmp_path / "wrong", level, PLAIN, ("plain", "", lambda scores: focal_by_signs(scores, 1.0)))
    assert wrong.verdict == "deviates"


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_by_hand_is_aligned_and_none_is_named(tmp_path: Path, level: str) -> None:
    plain = ("plain", "function", focal)
    assert compared(tmp_path / "right", level, plain, ("plain", "by hand", focal)).verdict == "aligned"
    first = compared(tmp_path / "wrong", level, plain, PLAIN).culprit
    assert first is not None
    assert (first.op, first.phase) == ("torch.Tensor.mul_", "optimizer")


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_that_one_run_casts_is_not_aligned(tmp_path: Path, level: str) -> None:
    def cost(scores: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
        with torch.no_grad():
            coarse = scores.bfloat16().float()  # so that bfloat16 is a dtype of both runs
        scores = scores + 0 * coarse
        return (scores.to(kind) if kind != torch.float32 else scores).logsumexp(-1).float().mean()

    assert compared(tmp_path / "right", level, ("plain", "", cost), ("plain", "", cost)).verdict == "aligned"
    result = compared(tmp_path, level, ("plain", "", cost), ("plain", "", lambda scores: cost(scores, torch.bfloat16)))
    assert result.verdict != "aligned"
