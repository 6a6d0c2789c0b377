"""Formulas written another way, inside of which pairs stand that are no counterparts: real trainings, from statistics alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import trueup
from trueup.comparison.graph.readers import Readers
from trueup.comparison.graph.streams import Stream
from trueup.foundation.store.columns import Vocabulary

Divergence = Callable[[Tensor, Tensor], Tensor]
LEVELS = {"api": ["module", "api"], "all": None}


def plain(mean: Tensor, logs: Tensor) -> Tensor:
    return (-0.5 * (1 + logs - mean.square() - logs.exp())).sum(1).mean()


def rewritten(mean: Tensor, logs: Tensor, spread: float = 1.0) -> Tensor:
    own, standard = Normal(mean, (0.5 * logs).exp()), Normal(torch.zeros_like(mean), spread)
    return kl_divergence(own, standard).sum(1).mean()


def wrong(mean: Tensor, logs: Tensor) -> Tensor:
    return rewritten(mean, logs, 1.01)


class Encoder(nn.Module):
    """Gives means and logarithms of variances, and keeps a variance of what comes in, biased or not."""

    seen: Tensor

    def __init__(self, *, unbiased: bool = True) -> None:
        super().__init__()
        self.linear, self.unbiased = nn.Linear(16, 16), unbiased
        self.register_buffer("seen", torch.ones(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            middle = x - x.mean(0)
            count = len(x) - (1 if self.unbiased else 0)
            self.seen.lerp_(middle.square().sum(0) / count, 0.1)
        mean, logs = self.linear(x).chunk(2, 1)
        return mean, logs


def trained(into: Path, divergence: Divergence, *, unbiased: bool = True) -> Path:
    torch.manual_seed(0)
    model = Encoder(unbiased=unbiased)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(1))
    with trueup.capture(into, model=model, detail="stats") as capture:
        for batch in batches:
            optimizer.zero_grad()
            divergence(*model(batch)).backward()
            optimizer.step()
            capture.step()
    return into


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "baseline", plain)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "other", rewritten)


@pytest.mark.parametrize("levels", LEVELS)
def test_a_divergence_written_another_way_is_aligned(levels: str, baseline: Path, other: Path) -> None:
    result = trueup.compare(baseline, other, level=LEVELS[levels])
    assert result.verdict == "aligned", result.sentence
    assert any("written another way in the candidate; what they compute together agrees" in note for note in result.notes)


@pytest.mark.parametrize("levels", LEVELS)
def test_one_that_is_wrong_by_a_hundredth_is_blamed(levels: str, baseline: Path, tmp_path: Path) -> None:
    result = trueup.compare(baseline, trained(tmp_path / "wrong", wrong), level=LEVELS[levels])
    assert result.verdict == "deviates", result.sentence
    assert result.culprit is not None
    assert result.culprit.step == 0


@pytest.mark.parametrize("divergence", [plain, rewritten])
@pytest.mark.parametrize("levels", LEVELS)
def test_a_biased_running_variance_is_blamed(levels: str, divergence: Divergence, baseline: Path, tmp_path: Path) -> None:
    """Nobody reads it but the next step's update of itself: what it makes wrong is not seen, and does not come together."""
    result = trueup.compare(baseline, trained(tmp_path / "biased", divergence, unbiased=False), level=LEVELS[levels])
    assert result.verdict == "deviates", result.sentence
    assert result.culprit is not None
    assert "div" in result.culprit.op


@pytest.mark.parametrize("levels", LEVELS)
def test_a_forced_run_is_blamed(levels: str, baseline: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There what differs ends at the next call that is given the baseline's inputs, right or wrong."""
    monkeypatch.setattr(import_module("trueup.comparison.verdict.compare"), "lender_of", lambda _: "a run")
    result = trueup.compare(baseline, other, level=LEVELS[levels])
    assert result.verdict == "deviates", result.sentence


@pytest.mark.parametrize("criterion", ["msprobe", "bitwise"])
def test_limits_excuse_nothing(criterion: str, baseline: Path, other: Path) -> None:
    assert trueup.compare(baseline, other, criterion=criterion).verdict != "aligned"


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("baseline", {"torch.Tensor.chunk": ["torch.Tensor.add", "torch.Tensor.exp"]}),  # a view, named by what wrote its memory
        ("other", {"torch.Tensor.pow": ["torch.Tensor.add", "torch.Tensor.log"]}),
    ],
)
def test_gradients_that_autograd_adds_up_are_read_by_who_reads_the_sum(
    run: str, expected: dict[str, list[str]], request: pytest.FixtureRequest
) -> None:
    """At level api the sum is no call."""
    capture = trueup.open_capture(request.getfixturevalue(run))
    columns = partial(capture.records, rank=0, step=[0], level=["module", "api"])
    stream = Stream(lambda names: columns(list(names)), Vocabulary(), Vocabulary())
    readers, names = Readers(stream), stream.names.names
    sums = {k: readers.parts(k) for k in range(len(stream.slot)) if readers.parts(k)}
    ops = {names[stream.op[stream.call[k]]]: sorted(names[stream.op[stream.call[p]]] for p in parts) for k, parts in sums.items()}
    assert ops == expected
    assert all(k in readers.of(part) for k, parts in sums.items() for part in parts)


def averaged(path: Path, *, shifted: bool, extra: float = 0.0) -> Path:
    """Go over weights that are powers of e, divided by the largest so far or not; the last state is made and never read."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 16)
    with trueup.capture(path, level="api", detail="stats"):
        keys, values = layer(torch.randn(4, 3, 8)).chunk(2, -1)
        top, total, weight, found = torch.full_like(keys[:, 0], -1e30), torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4, 8)
        for n in range(3):
            if shifted:
                most = torch.maximum(top, keys[:, n])
                old, new, top = (top - most).exp(), (keys[:, n] - most).exp(), most
                total, weight = old * total, old * weight
            else:
                new = keys[:, n].exp()
            found = found + (total + new * values[:, n]) / (weight + new + extra)
            total, weight = 0.9 * total + new * values[:, n], 0.9 * weight + new
        found.square().mean().backward()
    return path


def test_a_state_that_differs_and_is_never_read_is_left_open(tmp_path: Path) -> None:
    """Of the other formula nothing else differs: nobody is blamed for it, and what nobody reads is not aligned."""
    baseline = averaged(tmp_path / "baseline", shifted=False)
    result = trueup.compare(baseline, averaged(tmp_path / "shifted", shifted=True))
    assert result.verdict == "inconclusive"
    assert result.notes[0].startswith("what torch.Tensor.add (rank 0 step 0 forward api torch.Tensor.add#")
    assert result.notes[0].endswith(" computes differs and no recorded call reads it; what is read agrees")
    assert trueup.compare(baseline, averaged(tmp_path / "wrong", shifted=True, extra=0.01)).verdict == "deviates"
