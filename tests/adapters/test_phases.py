"""Recompute is its own phase: nothing lost, nothing doubled, in the right scope, whatever re-runs it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trueup
from adapters.subjects import WIDTH, Checkpointed, build

MICRO = 2


def keys(rows: list[dict]) -> Counter[tuple[str, str]]:
    return Counter((row["scope"], row["op"]) for row in rows)


TAIL = {
    "module": (),
    "api": ("torch.tanh", "torch.Tensor.mul", "torch.Tensor.exp"),
    "aten": ("aten::tanh", "aten::mul", "aten::exp"),
}
"""What the checkpointed bare function executes, outside any module but the root."""

NOT_NEEDED = {
    (f"blocks.{k}{rest}", op)
    for k in (0, 1) for rest, op in (("", "torch.Tensor.add"), ("", "aten::add"), (".drop", "aten::mul"))
}  # fmt: skip
"""What follows the last tensor that the backward needs: there, a recomputation without reentrant autograd ends."""


@pytest.mark.parametrize("level", [("module", "api", "aten"), "module", "api", "aten"])
@pytest.mark.parametrize("name", ["checkpoint", "checkpoint-reentrant"])
def test_recompute_is_what_ran_forward(name: str, level: str, device: str, path: Path, calls) -> None:
    training = build(name, device)
    with trueup.capture(path, model=training.model, level=level, on_error="stop"):
        training.step()
        training.step()
    for step in (0, 1):
        for one in [level] if isinstance(level, str) else level:
            forward = keys(calls(phase="forward", level=one, step=step))
            again = keys(calls(phase="recompute", level=one, step=step))
            replayed = {key: n for key, n in forward.items() if key[0].startswith("blocks.") or key[1] in TAIL[one]}
            assert replayed
            lost = {key for key in replayed if key not in again}
            assert lost <= (NOT_NEEDED if name == "checkpoint" else set())
            assert again == {key: n for key, n in replayed.items() if key not in lost}


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_happens_once(reentrant: bool, device: str, path: Path, calls) -> None:
    training = build("checkpoint-reentrant" if reentrant else "checkpoint", device)
    with trueup.capture(path, model=training.model, on_error="stop"):
        training.step()
    linear = calls(phase="backward", level="api", op="torch.nn.functional.linear")
    assert Counter(row["scope"] for row in linear) == Counter(
        dict.fromkeys(("inlet", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"), MICRO)
    )
    modules = calls(phase="backward", level="module", op="Linear")
    assert Counter(row["scope"] for row in modules) == Counter(row["scope"] for row in linear)
    by_seq = {row["seq"]: row for row in calls()}
    assert {by_seq[row["forward_seq"]]["phase"] for row in linear if row["scope"] != "inlet"} == {
        "recompute" if reentrant else "forward"
    }


@pytest.mark.parametrize("reentrant", [False, True])
def test_stacks_are_clean_after_early_stop(reentrant: bool, device: str, path: Path, calls) -> None:
    model = Checkpointed(reentrant).to(device)
    capture = trueup.capture(path, model=model, on_error="stop")
    with capture:
        model(torch.randn(2, WIDTH).to(device)).sum().backward()
        state = capture._session.threads.state
        assert (state.contexts, state.modules, state.running, state.runs, state.busy) == ([], [], [], [], False)
        capture.step()
        model(torch.randn(2, WIDTH).to(device))
    assert {row["phase"] for row in calls(step=1)} == {"forward"}


def test_forward_and_optimizer_have_their_phases(device: str, path: Path, calls) -> None:
    training = build("accumulation", device)
    with trueup.capture(path, model=training.model, on_error="stop"):
        training.step()
        training.step()
    assert {row["phase"] for row in calls(op="aten::addcdiv_")} == {"optimizer"}
    assert {row["scope"] for row in calls(phase="optimizer")} == {""}
    assert {row["phase"] for row in calls(op="torch.nn.functional.layer_norm")} == {"forward", "backward"}
    for step in (0, 1):
        found = calls(step=step, op="torch.nn.functional.layer_norm", phase="backward")
        assert [row["ordinal"] for row in found] == [0, 1, 2]


def test_double_backward_is_backward(device: str, path: Path, calls) -> None:
    weight = torch.randn(3, 3).to(device).requires_grad_()
    x = torch.randn(2, 3).to(device).requires_grad_()
    with trueup.capture(path, on_error="stop"):
        y = (x @ weight).tanh().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        gradient.square().sum().backward()
    assert "recompute" not in {row["phase"] for row in calls()}
    assert "backward" in {row["phase"] for row in calls(level="aten", op="aten::mm")}


def test_gradient_inside_a_forward_is_backward(path: Path, calls) -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            return torch.autograd.grad(self.energy(x).tanh().sum(), x, create_graph=True)[0]

    model = Force()
    with trueup.capture(path, model=model, on_error="stop"):
        model(torch.randn(2, 3)).square().sum().backward()
    assert {row["scope"] for row in calls(op="aten::tanh_backward", phase="backward")} >= {""}
    assert "recompute" not in {row["phase"] for row in calls()}
    assert {row["phase"] for row in calls(op="torch.Tensor.square")} == {"forward", "backward"}


def test_closure_of_an_optimizer(path: Path, calls) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x = torch.randn(4, 2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().sum()
        loss.backward()
        return loss

    with trueup.capture(path, model=model, on_error="stop"):
        optimizer.step(closure)
        model(x)
    assert {row["phase"] for row in calls(op="torch.Tensor.square")} == {"forward", "backward"}
    assert {row["step"] for row in calls(op="torch.nn.functional.linear", phase="forward")} == {0, 1}
    assert {row["phase"] for row in calls(op="torch.Tensor.dot")} == {"optimizer"}


def test_wrapped_optimizer_ends_one_step(path: Path, calls) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__([torch.zeros(1)], {})
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()
            self.inner.param_groups[0]["params"][0].detach().mul_(1.0)

    model = nn.Linear(2, 1)
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with trueup.capture(path, model=model, on_error="stop"):
        model(torch.randn(1, 2)).sum().backward()
        optimizer.step()
    assert {row["step"] for row in calls()} == {0}
    assert calls(op="torch.Tensor.mul_")[0]["phase"] == "optimizer"


def test_checkpointed_function_keeps_its_scope(device: str, path: Path, calls) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def part(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.sin(x)).tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x, use_reentrant=False)

    model = nn.Sequential(nn.Identity(), Outer()).to(device)
    with trueup.capture(path, model=model, on_error="stop"):
        model(torch.randn(2, 3).to(device)).sum().backward()
    again = calls(phase="recompute", level="api")
    assert [(row["scope"], row["op"]) for row in again] == [
        ("1", "torch.sin"), ("1.inner", "torch.nn.functional.linear"), ("1", "torch.Tensor.tanh"),
    ]  # fmt: skip
