"""A warning is the one of a run without a capture: its place, its text, and how often it is shown."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import trueup
from trueup.recording.adapters.torch import profiling


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


def shown(around: AbstractContextManager[object]) -> list[tuple[str, str, int, str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        with around:
            train()
    return [(one.category.__name__, one.filename, one.lineno, str(one.message)) for one in found]


RULE = '[[rule]]\nlevel = "api"\nop = "torch.sort"\ndtype = "float64"\n'


def under_policy(root: Path) -> AbstractContextManager[object]:
    """Return what applies a rule to a function that the training does not call."""
    (root / "policy.toml").write_text(RULE)
    return trueup.apply_policy(None, root / "policy.toml")


AROUND: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "module": lambda root: trueup.capture(root / "run", level="module"),
    "api": lambda root: trueup.capture(root / "run", level="api"),
    "all": lambda root: trueup.capture(root / "run"),
    "policy": under_policy,
    "profile": lambda _: profiling.Lines(),
}


@pytest.mark.parametrize("around", AROUND)
def test_warnings_are_those_of_a_run_without(around: str, tmp_path: Path) -> None:
    torch.overrides.get_overridable_functions()  # once for a process, it changes the filters
    expected = shown(nullcontext())
    found = shown(AROUND[around](tmp_path))
    if around == "policy":  # a module has a frame of ours around it then, and `nn.Softmax` counts frames
        expected, found = ([one for one in side if "Implicit dimension" not in one[3]] for side in (expected, found))
        assert found == expected
        return
    assert found == expected
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
