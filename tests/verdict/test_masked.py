"""A mask of -1e9 or -1e4 in an attention's logits is larger than all other numbers there, and hides none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup

LENGTH, HEADS, WIDTH = 12, 4, 8
Way = Literal["add", "where"]


class Attention(nn.Module):
    def __init__(self, way: Way = "add", mask: float = -1e9, scale: float = WIDTH**-0.5, bias: float | None = None) -> None:
        super().__init__()
        self.way, self.mask, self.scale, self.bias, self.before = way, mask, scale, bias, False
        self.embed = nn.Embedding(40, HEADS * WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (of(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for of in (self.query, self.key, self.value))
        logits = (q * self.scale) @ k.transpose(-1, -2) if self.before else (q @ k.transpose(-1, -2)) * self.scale
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        if self.way == "add":
            logits = logits + torch.zeros(later.shape).masked_fill(later, self.mask).to(logits.dtype)
        else:
            logits = torch.where(later, torch.tensor(self.mask, dtype=logits.dtype), logits)
        if self.bias is not None:
            logits = logits + self.bias * torch.linspace(-1, 1, ids.shape[-1])
        x = x + self.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x @ self.embed.weight.T


def trained(into: Path, model: nn.Module, level: str = "api", *, half: bool = False, length: int = LENGTH) -> Path:
    with trueup.capture(into, model=model, level=level) as capture:
        ids = torch.randint(0, 40, (4, length), generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(ids)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        capture.step()
    return into


def made(way: Way = "add", mask: float = -1e9, scale: float = WIDTH**-0.5, bias: float | None = None) -> Attention:
    torch.manual_seed(0)
    return Attention(way, mask, scale, bias)


@pytest.mark.parametrize("mask", [-1e9, -1e4])
def test_a_bias_behind_a_mask(mask: float, tmp_path: Path) -> None:
    base = trained(tmp_path / "a", made(mask=mask))
    result = trueup.compare(base, trained(tmp_path / "b", made(mask=mask, bias=0.05)))
    assert result.verdict == "deviates"
    assert len(result.culprits) == 1
    assert "bias of the model (Attention): None in the baseline, 0.05 in the candidate" in (result.culprits[0].cause or "")
    other = trueup.compare(base, trained(tmp_path / "c", made("where", mask, bias=0.05)))
    assert other.verdict == "deviates"


def test_a_scale_before_a_mask_in_bfloat16(tmp_path: Path) -> None:
    for way in ("add", "where"):
        base = trained(tmp_path / way / "a", made(way), "aten", half=True)
        result = trueup.compare(base, trained(tmp_path / way / "b", made(way, scale=0.3), "aten", half=True))
        assert result.verdict == "deviates"
        assert len(result.culprits) == 1
        assert "0.3" in (result.culprits[0].cause or "")


@pytest.mark.parametrize("half", [False, True])
def test_another_way_to_mask_is_none(half: bool, tmp_path: Path) -> None:
    base = trained(tmp_path / "a", made(), half=half)
    for way, mask in (("where", -1e9), ("add", -1e4)):
        assert trueup.compare(base, trained(tmp_path / f"{way}{mask}", made(way, mask), half=half)).verdict == "aligned"


def test_what_a_mask_rounds_is_no_fault(tmp_path: Path) -> None:
    """Logits beside -1e4 are rounded to 64 in bfloat16, and those that differ by a rounding may be 64 apart."""
    after, before = made(mask=-1e4, scale=22.6), made(mask=-1e4, scale=22.6)
    before.before = True
    runs = [trained(tmp_path / name, model, half=True, length=256) for name, model in (("a", after), ("b", before))]
    assert trueup.compare(*runs).verdict == "aligned"
