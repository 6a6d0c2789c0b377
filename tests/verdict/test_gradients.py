"""Gradient norms told from records are those that the training had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trueup
import zoo
from trueup.comparison.result.gradients import ABSENT, PARTIAL, WAYS, Norm, of_as_many

from .captures import Recording


def run(model: str, into: Path, **options: Any) -> list[float]:
    """Train two steps under capture; return the norms of the gradients as the backward left them, without clipping."""
    torch.set_num_threads(1)
    training = zoo.build(model)
    clip, training.clip = training.clip, None
    true: list[float] = []

    def norm(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        true.append(sum(float((p.grad.double() ** 2).sum()) for p in parameters) ** 0.5)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip, foreach=False)

    training.optimizer.register_step_pre_hook(norm)
    with trueup.capture(into, model=training.model, detail="stats", **options) as capture:
        for _ in range(2):
            training.step()
            capture.step()
    return true


def gradient_norms(path: Path) -> tuple[Any, str]:
    """Return norms and source as a comparison of the run with itself gives them."""
    summary = trueup.compare(path, path).baseline
    return summary.gradient_norms, summary.gradient_source


ALL = ("module", "api", "aten")


@pytest.mark.parametrize(("model", "level"), [("gpt2", ALL), ("gpt2", "aten"), ("bert", "aten"), ("lstm_tagger", "api")])
def test_norms_are_those_of_the_training_before_clipping(tmp_path: Path, model: str, level: Any) -> None:
    true = run(model, tmp_path / "run", level=level)
    norms, source = gradient_norms(tmp_path / "run")
    assert [step for step, _ in norms] == [0, 1]
    assert [norm for _, norm in norms] == pytest.approx(true, rel=1e-9)
    assert source.startswith(WAYS["read"])
    assert source.endswith(PARTIAL) == (level == "api")


def test_without_the_optimizer_leaf_gradients_are_taken(tmp_path: Path) -> None:
    true = run("lstm_tagger", tmp_path / "run", level=("module", "api"), phase=("forward", "backward"))
    norms, source = gradient_norms(tmp_path / "run")
    assert [norm for _, norm in norms] == pytest.approx(true, rel=1e-9)
    assert source == WAYS["leaf"]


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    run("lstm_tagger", tmp_path / "run", level="module")
    assert gradient_norms(tmp_path / "run") == ((), ABSENT)


def test_digests_have_no_norm(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trueup.capture(tmp_path / "run", model=model, detail="digest"):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert gradient_norms(tmp_path / "run") == ((), ABSENT)


def test_ranks_are_read_by_the_names_of_their_parameters_and_averaged(tmp_path: Path) -> None:
    run = Recording()
    for rank, scale in ((0, 1.0), (1, 3.0)):
        gradients = {f"input.{name}.grad": np.full(4, scale * k, np.float32) for name, k in (("a", 3), ("b", 4))}
        run.call("torch.optim.sgd.SGD.step", gradients, {}, level="api", phase="optimizer", rank=rank)
        run.call("torch.Tensor.add_", [np.full(9, 9.0, np.float32)], {}, level="api", phase="optimizer", rank=rank)
    norms, source = gradient_norms(run.write(tmp_path / "run"))
    assert norms == ((0, pytest.approx(2 * 10.0)),)
    assert source == WAYS["given"] + "; mean over ranks"


def test_norms_of_other_gradients_are_not_set_beside_each_other() -> None:
    """A weight that is used at each time step has its gradient summed where level api records nothing."""
    whole, partial = ([Norm(0, "read api", 3.0, count), Norm(1, "read api", 3.0, 10)] for count in (10, 8))
    assert [[one.step for one in side] for side in of_as_many((whole, partial))] == [[1], [1]]
    assert of_as_many((whole, [])) == (whole, [])
