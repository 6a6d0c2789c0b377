"""Loops of every shape under watch, with and without hits: nothing of them changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trueup
from adapters.loops import LOOPS
from adapters.test_optimizers import run, skip_where_impossible, unobserved
from adapters.test_watching import DONE_AGAIN, blamed_in_each_step  # noqa: F401 - a fixture
from trueup.analysis.watch.watcher import Watch


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watch]]:
    """Watch where the loops' own tests capture."""
    made: list[Watch] = []

    def watch(directory: Path, model: Any, **_: Any) -> Watch:
        made.append(trueup.watch(model, directory))
        return made[-1]

    monkeypatch.setattr(trueup, "capture", watch)
    yield made
    assert [one._session.failure.text for one in made if one._session.failure.text] == []


def check(name: str, device: str, path: Path) -> None:
    skip_where_impossible(name, device)
    observed, expected = run(name, device, path), unobserved(name, device)
    assert [key for key in expected if observed[key] != expected[key]] == []


@pytest.mark.parametrize("name", LOOPS)
def test_a_watch_changes_nothing(name: str, device: str, path: Path, watches: list[Watch]) -> None:
    check(name, device, path)
    assert [one.hits for one in watches] == [[]]


@pytest.mark.usefixtures("blamed_in_each_step")
@pytest.mark.parametrize("name", LOOPS)
def test_hits_change_nothing(name: str, path: Path, watches: list[Watch]) -> None:
    check(name, "cpu", path)
    assert [bool(one.hits) for one in watches] == [True]


def test_what_runs_in_a_closure_is_executed_again(path: Path) -> None:
    """Lightning gives its forward and backward to the optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())

    gains = iter((1.0, 1e4))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.exp(model(torch.ones(2, 4)) * next(gains)).sum()
        loss.backward()
        return loss

    with trueup.watch(model, path) as watch:
        for _ in range(2):
            optimizer.step(closure)
    (hit,) = watch.hits
    assert (hit.step, hit.name) == (1, "torch.exp, forward")
    assert hit.tensors.startswith(DONE_AGAIN)
