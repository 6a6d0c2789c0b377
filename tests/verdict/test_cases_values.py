"""Values that coarse numbers overlook: NaN in another place, a loss half or ten times off, one integer, one bool, shapes, dtypes.

msprobe 26.2.0 passes a NaN in another place, a 0-d loss wrong by 50 % (and by ten times, from tensors), an integer vector off by
one (from statistics) and one of three bools.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from verdict.cases import broken, named, record, told, trained

KEPT = [("stats", "all"), ("tensor", "api")]
Kept = dict[str, Any]


@pytest.fixture(params=KEPT, ids="-".join)
def kept(request: pytest.FixtureRequest) -> Kept:
    """Return options of a capture: what is kept of a tensor, and the levels."""
    torch.set_num_threads(1)
    detail, level = request.param
    return {"detail": detail, "level": level}


def run_both(folder: Path, baseline: Callable[..., Path], candidate: Callable[..., Path], kept: Kept) -> trueup.Result:
    return trueup.compare(baseline(folder / "baseline", **kept), candidate(folder / "candidate", **kept))


# ---------------------------------------------------------------- NaN and Inf
def put(value: float, row: int, column: int) -> Callable[..., Tensor]:
    """Return a change of one element, counted in the rows of the last dimension."""

    def change(right: Tensor, *_: Any) -> Tensor:
        right.view(-1, right.shape[-1])[row, column] = value
        return right

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("masked", [False, True], ids=["probability", "masked"])
def test_in_another_place_of_a_softmax(
    masked: bool, value: float, kept: Kept, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Both runs have one such element, so its count tells nothing; in place of a masked one, nor do the others."""
    places = [(0, 3), (4, 9)] if masked else [(2, 0), (7, 1)]
    sides = [
        partial(trained, model="gpt2-eager", alter=lambda _, at=at: broken("aten::_softmax", put(value, *at), 1))
        for at in places
    ]
    found = named(run_both(tmp_path, *sides, kept))
    assert found.scope == "transformer.h.1.attn"
    assert "softmax" in found.op


class Gated(nn.Module):
    """Adds what a mask lets through: zeros, and whatever the mask does wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.outer(y) + F.hardtanh(y, 0.0, 0.0).nan_to_num()


def stepped(folder: Path, make: Callable[[], nn.Module], x: Callable[[], Tensor], alter: Any = None, **options: Any) -> Path:
    """Record a forward and a backward of a model, seeded."""
    torch.manual_seed(3)
    model, data = make(), x()
    with broken(*alter) if alter is not None else torch.enable_grad():
        return record(folder, lambda: model(data).square().mean().backward(), model, **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_in_another_place_of_zeros(value: float, kept: Kept, tmp_path: Path) -> None:
    """Count, extremes, norm and sketch of the finite elements are those of the other side: the digest alone differs."""
    sides = [
        partial(stepped, make=Gated, x=lambda: torch.randn(5, 16), alter=("aten::hardtanh", put(value, *at), 0))
        for at in ((0, 3), (4, 6))
    ]
    result = run_both(tmp_path, *sides, kept)
    assert result.verdict != "aligned", result.sentence
    if kept["detail"] == "tensor":
        assert "hardtanh" in named(result).op
    assert result.culprit is None or "hardtanh" in result.culprit.op


# ---------------------------------------------------------------- a loss of no dimensions
@pytest.mark.parametrize("factor", [1.5, 10.0, 1.001])
def test_a_loss_that_is_off(factor: float, kept: Kept, tmp_path: Path) -> None:
    """Gradients do not show it: they come from the logits."""

    def wrong(right: tuple[Tensor, Tensor], *_: Any) -> Any:
        return right[0] * factor, right[1]

    sides = [
        partial(trained, model="bert", alter=alter)
        for alter in (None, lambda _: broken("aten::nll_loss_forward", wrong))
    ]
    found = named(run_both(tmp_path, *sides, kept))
    assert found.phase == "forward"
    assert "loss" in found.op or "cross_entropy" in found.op
    assert found.error_out == pytest.approx(factor - 1, rel=0.01)


# ---------------------------------------------------------------- integers and bools
class Positions(nn.Module):
    """Numbers the words that are no padding, as RoBERTa does, and looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 24), nn.Embedding(40, 24)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens.ne(0).int()
        places = (torch.cumsum(mask, dim=1).type_as(mask) * mask).long()
        return self.head(self.norm(self.words(tokens) + self.places(places)))


def tokens() -> Tensor:
    drawn = torch.randint(1, 50, (3, 30))
    drawn[1, 20:] = 0
    return drawn


def all_off(right: Tensor, *_: Any) -> Tensor:
    return right + 1


def one_off(right: Tensor, *_: Any) -> Tensor:
    right.view(-1)[17] += 1
    return right


@pytest.mark.parametrize("change", [all_off, one_off])
def test_integers_off_by_one(change: Callable[..., Tensor], kept: Kept, tmp_path: Path) -> None:
    sides = [
        partial(stepped, make=Positions, x=tokens, alter=alter) for alter in (None, ("aten::cumsum", change))
    ]
    found = named(run_both(tmp_path, *sides, kept))
    assert "cumsum" in found.op
    assert found.kind == "operator"


@pytest.mark.parametrize("change", [all_off, one_off])
def test_integer_data_off_by_one(change: Callable[..., Tensor], kept: Kept, tmp_path: Path) -> None:
    sides = [partial(stepped, make=Positions, x=x) for x in (tokens, lambda: change(tokens()) % 50)]
    found = named(run_both(tmp_path, *sides, kept))
    assert found.kind == "input"
    assert found.phase == "forward"


class Heads(nn.Module):
    """Three heads, of which those with a positive score speak."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.heads = nn.Parameter(torch.tensor([0.4, -0.2, 0.3])), nn.Linear(8, 3)
        self.watched = False

    def forward(self, x: Tensor) -> Tensor:
        on = self.scores > 0.0
        return torch.where(on, self.heads(x), torch.zeros(()))


def flip(right: Tensor, *_: Any) -> Tensor:
    right[1] = ~right[1]
    return right


def test_one_bool_of_three(kept: Kept, tmp_path: Path) -> None:
    sides = [
        partial(stepped, make=Heads, x=lambda: torch.randn(4, 8), alter=alter)
        for alter in (None, ("aten::gt.Scalar", flip))
    ]
    found = named(run_both(tmp_path, *sides, kept))
    assert "gt" in found.op, found.sentence
    assert found.kind == "operator"


class Watched(Heads):
    """Nobody reads the bools: that they differ can show nowhere else."""

    def forward(self, x: Tensor) -> Tensor:
        _ = self.scores > 0.0
        return self.heads(x)


def test_one_bool_that_nobody_reads(kept: Kept, tmp_path: Path) -> None:
    sides = [
        partial(stepped, make=Watched, x=lambda: torch.randn(4, 8), alter=alter)
        for alter in (None, ("aten::gt.Scalar", flip))
    ]
    assert "gt" in named(run_both(tmp_path, *sides, kept)).op


# ---------------------------------------------------------------- shapes and dtypes
class Pooled(nn.Module):
    def __init__(self, cells: int) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(cells)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.conv(x)).flatten(2).mT)


def test_another_shape(kept: Kept, tmp_path: Path) -> None:
    sides = [partial(stepped, make=partial(Pooled, cells), x=lambda: torch.randn(2, 3, 12, 12)) for cells in (1, 2)]
    result = run_both(tmp_path, *sides, kept)
    found = named(result)
    assert found.scope == "pool", found.sentence


def test_a_longer_batch(kept: Kept, tmp_path: Path) -> None:
    """One side pads to another length: nothing can be compared, which is neither aligned nor any operator's fault."""
    def padded(training: Any) -> None:
        fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        training.batches = [{name: F.pad(t, (0, 3), value=fill[name]) for name, t in batch.items()} for batch in training.batches]

    sides = [partial(trained, model="gpt2", alter=alter) for alter in (None, padded)]
    result = run_both(tmp_path, *sides, kept)
    assert result.verdict != "aligned"
    assert result.culprit is None or result.culprit.kind == "input", result.sentence
    assert "shape" in told(result), told(result)


class Cast(nn.Module):
    """Takes the mean of a feature map in the given dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.head, self.dtype = nn.Linear(32, 32), nn.Linear(32, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        pooled = torch.sum(self.inner(x).to(self.dtype), dim=1)
        return self.head(pooled.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dtype_in_the_middle(dtype: torch.dtype, kept: Kept, tmp_path: Path) -> None:
    """A sum that one side takes in a short dtype: the cast is named, or the sum."""
    sides = [partial(stepped, make=partial(Cast, dt), x=lambda: torch.randn(4, 50, 32)) for dt in (torch.float32, dtype)]
    found = named(run_both(tmp_path, *sides, kept))
    assert found.scope == "", found.sentence
    assert any(op in found.op for op in ("to", "sum")), found.sentence


def test_wider_indices_are_equal(kept: Kept, tmp_path: Path) -> None:
    """The same places as int32 and as int64 give the same run."""

    class Narrow(Positions):
        def forward(self, tokens: Tensor) -> Tensor:
            mask = tokens.ne(0).int()
            places = torch.cumsum(mask, dim=1).type_as(mask) * mask
            return self.head(self.norm(self.words(tokens) + self.places(places)))

    result = run_both(tmp_path, partial(stepped, make=Positions, x=tokens), partial(stepped, make=Narrow, x=tokens), kept)
    assert result.culprit is None, result.sentence


# ---------------------------------------------------------------- another call in the place of one
class Reordered(nn.Module):
    """A small network in which one call can be another, outside its module."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.form = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8), form

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.form == "permuted":
            hidden = hidden[..., torch.arange(31, -1, -1)]
        normed = self.norm(hidden)
        if self.form == "epsilon":
            normed = F.layer_norm(hidden, (32,), self.norm.weight, self.norm.bias, 1e-2)
        out: Tensor = self.last(F.gelu(normed))
        return out


@pytest.mark.parametrize("level", ["aten", "api"])
@pytest.mark.parametrize(("form", "op"), [("permuted", ("index", "getitem")), ("epsilon", ("layer_norm",))])
def test_a_call_that_one_side_lacks_is_judged_in_the_forward(tmp_path: Path, level: str, form: str, op: tuple[str, ...]) -> None:
    """Its backward reads what it saved, and gradients that differ because of it: they are no excuse for the forward."""
    torch.set_num_threads(1)
    for name in ("", form):
        torch.manual_seed(0)
        model, batch = Reordered(name), torch.randn(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trueup.capture(tmp_path / f"run-{name}", model=model, level=level):
            model(batch).square().mean().backward()
            optimizer.step()
    result = trueup.compare(tmp_path / "run-", tmp_path / f"run-{form}")
    assert result.culprit is not None, result.sentence
    assert (result.culprit.kind, result.culprit.phase) == ("region", "forward")
    assert any(part in result.culprit.op for part in op)
