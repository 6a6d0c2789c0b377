"""What a call reads tells whether it is wrong: another result, of another shape too, or one that nobody reads any more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup.foundation.model import Result

Computation = Callable[[nn.Linear], Tensor | None]


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compared(tmp_path: Path, *runs: Computation, level: str = "api", training: bool = True) -> Result:
    """Compare what two functions compute with one layer, and the gradients of what they return."""
    for name, run in zip("ab", runs, strict=True):
        torch.manual_seed(0)
        layer = nn.Linear(6, 6)
        with trueup.capture(tmp_path / name, level=level, detail="stats"), nullcontext() if training else torch.no_grad():
            cost = run(layer)
            if cost is not None:
                cost.backward()
    return trueup.compare(tmp_path / "a", tmp_path / "b")


def two_views(layer: nn.Linear, order: str = "01 10") -> Tensor:
    """Have each of two views of a batch predict the other one, nearly the same."""
    scores = [layer(noise(1, 16, 6) + 0.1 * noise(seed, 16, 6)) for seed in (2, 3)]
    with torch.no_grad():
        targets = [(one * 2).softmax(-1) for one in scores]
    logs = [F.log_softmax(one, -1) for one in scores]
    terms = [(targets[int(one)] * logs[int(other)]).sum(1) for one, other in order.split()]
    return -(terms[0] + terms[1]).mean()


@pytest.mark.parametrize(("order", "verdict"), [("10 01", "aligned"), ("00 11", "deviates")])
def test_terms_that_change_places_do_not_excuse_each_other(tmp_path: Path, order: str, verdict: str) -> None:
    result = compared(tmp_path, two_views, lambda layer: two_views(layer, order))
    assert result.verdict == verdict
    if verdict == "deviates":
        assert result.culprits[0].cause == (
            "torch.Tensor.mul reads the result of call #1 of torch.nn.functional.log_softmax in the baseline, of call #0 of "
            "torch.nn.functional.log_softmax in the candidate"
        )


def chosen(layer: nn.Linear, shift: float = 0.0) -> None:
    """Choose by scores that are far apart, of angles; the last scores are a view and nobody reads them."""
    angles = torch.arange(6.0)
    if shift:
        angles = angles - shift
    scores = layer(noise(1, 4, 6)) + angles.cos() * 0.1 + 100 * torch.eye(6)[:4]
    scores.unflatten(0, (2, 2)).argmax(-1)
    (layer(noise(1, 4, 6)) * angles.cos()).unflatten(0, (2, 2))


@pytest.mark.parametrize("level", ["api", "aten"])
def test_a_view_is_no_reader_of_what_it_shows(tmp_path: Path, level: str) -> None:
    result = compared(tmp_path, chosen, lambda layer: chosen(layer, 1.0), level=level, training=False)
    assert (result.verdict, result.culprits[0].op.rpartition("sub")[2]) == ("deviates", "")


def decoded(layer: nn.Linear, *, stale: bool = False) -> None:
    """Append to a cache in each step; a stale one is what it was after the first."""
    cache = first = layer(noise(1, 3, 6))
    for step in range(3):
        cache = torch.cat((first if stale else cache, layer(noise(2 + step, 1, 6))))
        (cache @ cache[-1]).softmax(0)


def test_a_cache_that_is_not_appended_to_is_named_where_it_is_read(tmp_path: Path) -> None:
    first = compared(tmp_path, decoded, lambda layer: decoded(layer, stale=True), training=False).culprit
    assert first is not None
    assert (first.op, first.step) == ("torch.cat", 0)
    assert first.cause == "torch.cat reads the result of torch.cat in the baseline, of torch.nn.functional.linear in the candidate"


def nearest(layer: nn.Linear, *, squared: bool) -> Tensor:
    x = layer(noise(1, 8, 6))
    with torch.no_grad():
        apart = (x[:, None] - x).square().sum(-1) if squared else torch.cdist(x, x)
        near = apart.topk(3, largest=False).indices
    return x[near].square().mean()


def test_distances_that_nobody_reads_are_a_by_product_of_who_is_near(tmp_path: Path) -> None:
    runs = [lambda layer, way=way: nearest(layer, squared=way) for way in (False, True)]
    assert compared(tmp_path, *runs, level="all").verdict == "aligned"


class Added(nn.Module):
    """A layer with a low-rank addition, as two more layers or added to its weight."""

    def __init__(self, *, merged: bool, scale: float) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.merged, self.scale = merged, scale

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + self.scale * (self.up.weight @ self.down.weight), self.base.bias)
        return self.base(x) + self.scale * self.up(self.down(x))


@pytest.mark.parametrize(("scale", "verdict"), [(2.0, "aligned"), (2.1, "deviates")])
def test_layers_that_only_modules_show_are_read_by_the_module_around(tmp_path: Path, scale: float, verdict: str) -> None:
    for name, merged in (("a", False), ("b", True)):
        torch.manual_seed(0)
        model = nn.Sequential(Added(merged=merged, scale=scale if merged else 2.0), nn.Linear(6, 3))
        with trueup.capture(tmp_path / name, model=model, level="module", detail="stats"):
            model(noise(1, 4, 6)).square().mean().backward()
    result = trueup.compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == verdict
    assert all(one.scope == "0" for one in result.culprits)
