"""What was ready when decides who is blamed: calls that began first and went on while others ran pass on what those got wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trueup
from verdict.cases import Change, broken, named, record

LEVELS = ([], ["module", "api"])


@dataclass
class Run:
    """A small training that is recorded: `record` builds the model anew, so that all runs are of the same numbers."""

    folder: Path
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, Tensor]]
    level: Sequence[str] = ()
    count: int = 0

    def record(self, op: str | None = None, change: Change | None = None, nth: int = 0, **built: Any) -> Path:
        """Record two steps, one call of an operator broken if that is wanted."""
        torch.manual_seed(0)
        model = self.build(**built)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        x, y = self.inputs()

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
            optimizer.step()

        self.count += 1
        options = {"level": list(self.level)} if self.level else {}
        into = self.folder / str(self.count)
        if op is None or change is None:
            return record(into, step, model, steps=2, **options)
        with broken(op, change, nth) as wrong:
            made = record(into, step, model, steps=2, **options)
        assert wrong == [nth]
        return made


def one_percent(result: Any, *_: Any) -> Any:
    """Return a result, or the first of several, one percent too large."""
    return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result * 1.01


# ---------------------------------------------------------------- recomputation
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Recomputing(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(16, 16), nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def samples() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 16), torch.randint(0, 4, (8,))


@pytest.mark.parametrize("level", LEVELS, ids=["all", "api"])
@pytest.mark.parametrize(
    ("op", "nth", "culprit"),
    [
        ("aten::native_layer_norm", 4, ("layer_norm", "blocks.1.norm", "recompute")),
        ("aten::addmm", 6, ("linear", "blocks.1.linear", "recompute")),
        ("aten::gelu_backward", 1, ("gelu", "blocks.1", "backward")),
        ("aten::gelu", 1, ("gelu", "blocks.1", "forward")),
    ],
)
def test_a_backward_is_not_blamed_for_what_it_recomputes(
    op: str, nth: int, culprit: tuple[str, str, str], level: list[str], tmp_path: Path
) -> None:
    run = Run(tmp_path, Recomputing, samples, level)
    result = trueup.compare(run.record(), run.record(op, one_percent, nth))
    found = named(result)
    assert ((found.api or found.op).removeprefix("torch.nn.functional."), found.scope, found.phase) == culprit
    assert len(result.culprits) == 1


@pytest.mark.parametrize("level", LEVELS, ids=["all", "api"])
def test_a_reentrant_checkpoint_is_not_blamed_for_what_ran_inside(level: list[str], tmp_path: Path) -> None:
    run = Run(tmp_path, lambda: Recomputing(reentrant=True), samples, level)
    result = trueup.compare(run.record(), run.record("aten::gelu", one_percent, 1))
    found = named(result)
    assert ((found.api or found.op), found.scope, found.phase) == ("torch.nn.functional.gelu", "blocks.1", "forward")
    assert len(result.culprits) == 1


# ---------------------------------------------------------------- gradients of weights
class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(F.relu(self.stem(x)))).mean((2, 3)))


def last_filter_lost(result: Any, *_: Any) -> Any:
    weight = result[1].clone()
    weight[-1] = 0
    return result[0], weight, result[2]


@pytest.mark.parametrize("level", LEVELS, ids=["all", "api"])
@pytest.mark.parametrize(("nth", "scope"), [(0, "body"), (1, "stem")])
def test_a_weight_gradient_of_a_convolution_is_its_own(nth: int, scope: str, level: list[str], tmp_path: Path) -> None:
    run = Run(tmp_path, Pictures, lambda: (torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))), level)
    result = trueup.compare(run.record(), run.record("aten::convolution_backward", last_filter_lost, nth))
    found = named(result)
    assert ((found.api or found.op), found.scope, found.phase) == ("torch.nn.functional.conv2d", scope, "backward")
    assert len(result.culprits) == 1


class Words(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.words.weight if tied else nn.Parameter(self.words.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.words(x)))
        return result


@pytest.mark.parametrize("level", LEVELS, ids=["all", "api"])
def test_a_lost_tie_of_weights_is_not_blamed_on_the_optimizer(level: list[str], tmp_path: Path) -> None:
    run = Run(tmp_path, Words, lambda: (torch.randint(0, 40, (4, 8)), torch.randint(0, 40, (4, 8))), level)
    result = trueup.compare(run.record(), run.record(tied=False))
    assert "weight of head (Linear) is tied to words.weight in the baseline" in result.sentence.splitlines()[0]
    assert result.verdict == ("inconclusive" if level else "deviates")


# ---------------------------------------------------------------- memory that changes between two calls
class Changing(nn.Module):
    """Changes what one layer returned before the next one reads it, unseen by any hook."""

    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.first, self.second, self.by = nn.Linear(16, 16), nn.Linear(16, 16), by

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.detach().numpy()[...] *= self.by
        result: Tensor = self.second(x)
        return result


@pytest.mark.parametrize("level", LEVELS, ids=["all", "api"])
@pytest.mark.parametrize("by", [1.05, 1.001])
def test_what_was_written_unseen_is_named_where_it_is_read_first(by: float, level: list[str], tmp_path: Path) -> None:
    run = Run(tmp_path, Changing, samples, level)
    found = named(trueup.compare(run.record(), run.record(by=by)))
    assert (found.kind, found.scope, found.phase, found.step) == ("overwritten", "second", "forward", 0)
