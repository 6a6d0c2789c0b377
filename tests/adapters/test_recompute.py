"""A recomputed call names the forward call that it repeats, at every level and however checkpointed functions nest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trueup
from adapters.subjects import WIDTH, Block, build

LEVELS = ("module", "api", "aten")


def name(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["level"], row["scope"], row["op"]


def assert_linked(calls: Any, step: int) -> None:
    """Every recomputed call repeats a forward call of its kind, each once, in order, with the same results."""
    by_seq = {row["seq"]: row for row in calls(step=step)}
    again = [row for row in by_seq.values() if row["phase"] == "recompute"]
    assert {row["level"] for row in again} == set(LEVELS)
    for row in again:
        origin = by_seq[row["forward_seq"]]
        assert (origin["phase"], name(origin)) == ("forward", name(row))
    assert max(Counter(row["forward_seq"] for row in again).values()) == 1


@pytest.mark.parametrize("subject", ["checkpoint", "checkpoint-reentrant", "autocast-checkpoint"])
def test_recomputed_calls_name_their_forward_calls(subject: str, device: str, path: Path, calls, rows) -> None:
    training = build(subject, device)
    with trueup.capture(path, model=training.model, on_error="stop"):
        training.step()
        training.step()
    for step in (0, 1):
        assert_linked(calls, step)
    outputs = {(row["seq"], row["slot"]): row for row in rows() if row["slot"].startswith("output")}
    repeated = [(row, outputs[row["forward_seq"], row["slot"]]) for row in outputs.values() if row["phase"] == "recompute"]
    assert len(repeated) > 20
    drawn = [pair for pair in repeated if pair[0]["op"] in ("aten::bernoulli_", "aten::native_dropout")]
    assert len({row["seq"] for row, _ in drawn}) == 4 * training.micro  # two blocks, two steps
    for row, origin in repeated:  # the random numbers among them
        assert (row["digest"], row["l2"]) == (origin["digest"], origin["l2"]), row


class Stack(nn.Module):
    """Checkpointed blocks inside a checkpointed half, and the same block used twice in it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inlet, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])

    def half(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, torch.sin(x), use_reentrant=self.reentrant)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.half, self.inlet(x), use_reentrant=self.reentrant).exp()


@pytest.mark.parametrize("reentrant", [False, True])
def test_nested_checkpoints_name_the_forward(reentrant: bool, device: str, path: Path, calls) -> None:
    torch.manual_seed(0)
    model = Stack(reentrant).to(device)
    with trueup.capture(path, model=model, on_error="stop"):
        model(torch.randn(3, WIDTH).to(device)).sum().backward()
    by_seq = {row["seq"]: row for row in calls()}
    again = [row for row in by_seq.values() if row["phase"] == "recompute"]
    for row in again:
        origin = by_seq[row["forward_seq"]]
        assert (origin["phase"], name(origin)) == ("forward", name(row))
    times = Counter(row["forward_seq"] for row in again if row["op"] == "torch.nn.functional.gelu")
    assert len(times) == 3
    assert sorted(times.values()) == ([2, 2, 2] if reentrant else [1, 2, 2])  # with the half (or as far as needed), with the block


OF_CHECKPOINTING = ("Sequential", "torch.utils.checkpoint.CheckpointFunction.apply", "torch.Tensor.detach")
"""What only one of the two runs has: the container of the plain one, and the machinery of the reentrant one."""


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_adds_recompute_and_nothing_else(reentrant: bool, device: str, path: Path, calls) -> None:
    """Count against the same training without checkpoints, over several micro-batches."""

    def counted(directory: Path, subject: str, plain: bool) -> Counter[tuple[Any, ...]]:
        training = build(subject, device)
        if plain:
            training.model.forward = lambda x: training.model.tail(nn.Sequential(*training.model.blocks)(training.model.inlet(x)))
        with trueup.capture(directory, model=training.model, level=("module", "api"), on_error="stop"):
            training.step()
            training.step()
        found = trueup.open_capture(directory).records(["seq", "step", "phase", "level", "scope", "op"]).to_pylist()
        once = {row["seq"]: row for row in found if row["op"] not in OF_CHECKPOINTING}
        return Counter((row["step"], row["phase"], *name(row)) for row in once.values())

    subject = "checkpoint-reentrant" if reentrant else "checkpoint"
    expected = counted(path.with_name("plain"), subject, True)
    observed = counted(path, subject, False)
    assert Counter({key: n for key, n in observed.items() if key[1] != "recompute"}) == expected
    assert any(key[1] == "recompute" for key in observed)


def test_calls_past_the_first_run_have_no_forward(path: Path, calls) -> None:
    """A function that does more when it is run again: what has nothing to repeat names nothing."""
    runs = []

    def body(x: Tensor) -> Tensor:
        runs.append(1)
        y = x.tanh()
        return (y.sin() if len(runs) == 1 else y.sin() + y.cos() * 0).exp()

    x = torch.randn(3, requires_grad=True)
    with trueup.capture(path, level="api", on_error="stop"):
        checkpoint(body, x, use_reentrant=True).sum().backward()
    again = {row["op"]: row["forward_seq"] for row in calls(phase="recompute")}
    assert again.pop("torch.Tensor.cos") is None
    assert again["torch.Tensor.exp"] is not None


def test_gradient_inside_a_checkpointed_function(path: Path, calls) -> None:
    """A backward pass inside the checkpointed function is backward, not a recomputation, in either run."""

    def energy(x: Tensor) -> Tensor:
        y = x.tanh()
        return torch.autograd.grad(y.square().sum(), x, create_graph=True)[0] * y

    x = torch.randn(3, requires_grad=True)
    with trueup.capture(path, on_error="stop"):
        checkpoint(energy, x, use_reentrant=False).sum().backward()
    squares = calls(op="torch.Tensor.square")
    assert [row["phase"] for row in squares if row["phase"] != "backward"] == ["forward", "recompute"]
    assert {row["phase"] for row in calls(op="aten::tanh_backward")} == {"backward"}
