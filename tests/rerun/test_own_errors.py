"""A second fault behind the first one: which calls are wrong by themselves, from tensors, and from a shadow."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trueup
from trueup import simdev
from trueup.analysis.rerun.replay import OwnErrors
from trueup.foundation.model import Result

FIRST, SECOND = "layer-norm-epsilon", "layer-norm-backward"


def train(into: Path, device: str, faults: tuple[str, ...] = (), *, shadow: bool = False, detail: str = "tensor") -> Path:
    torch.manual_seed(0)
    layers = [(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in ((32, 64), (64, 64))]
    model = nn.Sequential(*(layer for block in layers for layer in block), nn.Linear(64, 8)).to(device)
    data, target = torch.randn(16, 32).to(device), torch.randint(0, 8, (16,)).to(device)
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(simdev.inject(fault))
        recording: Any = trueup.capture(into, model=model, detail=detail) if not shadow else None
        stack.enter_context(recording or trueup.shadow(model, directory=into, quiet=True))
        nn.functional.cross_entropy(model(data), target).backward()
    return into


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    simdev.install()
    simdev.heal()
    work = tmp_path_factory.mktemp("own")
    train(work / "cpu", "cpu", detail="stats")
    for name, faults in (("one", (FIRST,)), ("two", (FIRST, SECOND))):
        train(work / name, "npu", faults)
        train(work / f"{name}-shadow", "npu", faults, shadow=True)
    return work


def named(result: Result) -> list[str]:
    return [culprit.op.removeprefix("aten::native_") for culprit in result.culprits]


def test_statistics_do_not_show_the_second_fault(runs: Path) -> None:
    """If they do one day, another pair of faults is needed here."""
    result = trueup.compare(runs / "cpu", runs / "two", recompute=0)
    assert named(result) == ["layer_norm"]
    assert result.culprits[0].cleared == 0


@pytest.mark.parametrize("evidence", ["two", "two-shadow"])
def test_both_are_named_where_calls_are_computed_again(runs: Path, evidence: str) -> None:
    result = trueup.compare(runs / "cpu", runs / evidence)
    assert named(result) == ["layer_norm", "layer_norm_backward"]
    assert result.culprits[1].because.startswith("given its own inputs it is off by 1.1e-1, where rounding explains ")
    assert result.culprits[0].cleared > 0
    assert "behind it were computed again from their own inputs, and not wrong" in result.sentence


@pytest.mark.parametrize("evidence", ["one", "one-shadow"])
def test_nothing_else_is_named_where_there_is_one(runs: Path, evidence: str) -> None:
    result = trueup.compare(runs / "cpu", runs / evidence)
    assert named(result) == ["layer_norm"]
    assert (result.culprits[0].cleared > 0, result.culprits[0].beyond) == (True, 0)
    assert "a second fault would not show" not in result.sentence


def test_a_call_that_is_as_wrong_in_the_baseline_is_no_fault(runs: Path) -> None:
    candidate = trueup.open_capture(runs / "two")
    wrong = [seq for seq, why in OwnErrors(candidate, candidate, 60)(0, pairs(candidate)).items() if why is not None]
    alone = OwnErrors(trueup.open_capture(runs / "cpu"), candidate, 60)(0, pairs(candidate))
    assert wrong == []
    assert sum(why is not None for why in alone.values()) >= 4


def test_without_time_nothing_is_told(runs: Path) -> None:
    candidate = trueup.open_capture(runs / "two")
    assert OwnErrors(trueup.open_capture(runs / "cpu"), candidate, 0)(0, pairs(candidate)) == {}


def test_a_function_whose_forward_is_wrong_is_counted_as_untold(runs: Path) -> None:
    """Computed again, its backward begins with another forward: whether it is wrong, too, only its operators tell."""
    result = trueup.compare(runs / "cpu", runs / "two", level=["module", "api"])
    assert [culprit.phase for culprit in result.culprits] == ["forward"]
    assert result.culprits[0].beyond > 0
    assert "a second fault would not show there" in result.sentence


def pairs(candidate: trueup.Capture) -> list[tuple[int, int]]:
    seqs = sorted(set(candidate.records(columns=["seq"])["seq"].to_pylist()))
    return [(seq, seq) for seq in seqs]
