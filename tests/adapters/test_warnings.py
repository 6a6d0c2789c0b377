"""A warning is the one of a run without a capture: its place, its text, and how often it is shown."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import trueup
from trueup.foundation.model import Level


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("the user's", stacklevel=1)
        return self.softmax(x)  # names the caller of the module: five frames above


def train() -> None:
    net, weight = Net(), torch.ones(4, 4, requires_grad=True)
    for _ in range(2):
        loss = functional.mse_loss(net(weight), torch.ones(4, 1))  # from Python, of the frame above
        loss.backward()
        torch.std(torch.ones(1))  # from C++
        torch.add(weight.detach(), 1, out=torch.empty(3))  # from C++, of a call that is recorded at length
        functional.softmax(weight)


def shown(level: tuple[Level, ...], root: Path) -> list[tuple[str, str, int, str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        if level:
            with trueup.capture(root, level=level):
                train()
        else:
            train()
    return [(one.category.__name__, one.filename, one.lineno, str(one.message)) for one in found]


@pytest.mark.parametrize("level", [("module",), ("api",), ("module", "api", "aten")])
def test_warnings_are_those_of_a_run_without_a_capture(level: tuple[Level, ...], tmp_path: Path) -> None:
    torch.overrides.get_overridable_functions()  # once for a process, it changes the filters
    expected = shown((), tmp_path)
    assert shown(level, tmp_path / "run") == expected
    assert len(expected) == 6
    assert sum(one[1] == __file__ for one in expected) == 5


def test_a_stack_holds_the_line_that_called_once(tmp_path: Path) -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: gradient * 2)  # computes while `Tensor.backward` executes
    with trueup.capture(tmp_path / "run", level=("api",)):
        functional.softmax(weight, 0).sum().backward()
    stacks = [frames for frames, _ in trueup.open_capture(tmp_path / "run").sites(0).values()]
    assert stacks
    for frames in stacks:
        assert not any(one == other for one, other in itertools.pairwise(frames))
        assert not any("<called>" in one for one in frames)


def test_nothing_of_a_program_is_held(tmp_path: Path) -> None:
    held = {"torch": torch, "layer": nn.Linear(2, 2)}
    layer = weakref.ref(held["layer"])
    with trueup.capture(tmp_path / "run", level=("api",)):
        exec("torch.relu(torch.ones(2))", held)
        del held
    gc.collect()
    assert layer() is None
