"""`trueup align --recipe paddle` of PyTorch and PaddlePaddle: healthy pairs pass, planted differences are found in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import torch
from paddle import nn as pnn
from paddle.nn import functional as pf
from torch import nn
from torch.nn import functional as tf

import framework_pairs as pairs
import trueup
from trueup.analysis.pairing.proposing import write_map
from trueup.analysis.recipes import RecipeResult, follow
from trueup.analysis.recipes.recipe import Outcome

IMAGES = np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype(np.float32)
LABELS = np.array([0, 1, 2, 3])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = tf.relu(self.bn1(self.conv1(x)))
        return self.fc(tf.relu(self.bn2(self.conv2(x))).mean((2, 3)))


class Wrong(paddle.autograd.PyLayer):
    """A gradient that is 20 % too large, of an operator that no level of a capture sees."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, came: paddle.Tensor) -> paddle.Tensor:
        return came * 1.2


class Port(pnn.Layer):
    """`Net` in Paddle, with what a port may get wrong."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong
        self.conv1, self.bn1 = pnn.Conv2D(3, 8, 3, 1, 1), pnn.BatchNorm2D(8)
        self.conv2, self.bn2 = pnn.Conv2D(8, 16, 3, 2, 1), pnn.BatchNorm2D(16)
        self.fc = pnn.Linear(16, 5)
        if wrong == "epsilon":
            self.bn2._epsilon = 0.1
        if wrong == "gradient of a weight":
            self.fc.weight.register_hook(lambda came: came * 1.2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.bn1(self.conv1(x))
        x = pf.gelu(x) if self.wrong == "operator" else pf.relu(x)
        x = x * 1.3 if self.wrong == "scale" else x
        x = pf.relu(self.bn2(self.conv2(x)))
        x = Wrong.apply(x) if self.wrong == "gradient" else x
        return self.fc(x.sum([2, 3]) / 63 if self.wrong == "mean" else x.mean([2, 3]))


@dataclass(frozen=True)
class Pair:
    """Two models, the batch, their losses and their optimizers."""

    models: tuple[Any, Any]
    batch: Sequence[np.ndarray[Any, Any]]
    losses: tuple[Callable[..., Any], Callable[..., Any]]
    optimizers: tuple[Any, Any]


def net(wrong: str = "") -> Pair:
    pairs.seeded()
    there, here = Net(), Port(wrong)
    optimizers = torch.optim.SGD(there.parameters(), 0.05), paddle.optimizer.SGD(0.05, parameters=here.parameters())
    losses = (lambda m, x, y: tf.cross_entropy(m(x), y)), (lambda m, x, y: pf.cross_entropy(m(x), y))
    return Pair((there, here), (IMAGES, LABELS), losses, optimizers)


def twins(name: str) -> Pair:
    pairs.seeded()
    found = pairs.PAIRS[name]("")
    return Pair((found.torch, found.paddle), found.batch, found.losses, pairs.optimizers(found))


def followed(pair: Pair, into: Path, level: Sequence[str] = ("module", "api"), detail: str = "tensor") -> RecipeResult:
    """Record two steps and one forward more of both models, and follow the recipe."""
    trueup.convert_weights(*pair.models)
    mapping = write_map(trueup.map_models(*pair.models), into / "map.toml")
    both = zip(pair.models, pair.losses, pair.optimizers, (torch.as_tensor, paddle.to_tensor), ("base", "cand"), strict=True)
    for model, loss, optimizer, tensor, name in both:
        batch = [tensor(array) for array in pair.batch]
        with trueup.capture(into / name, model=model, level=list(level), detail=detail) as running:
            for _ in range(2):
                loss(model, *batch).backward()
                optimizer.step()
                optimizer.zero_grad() if tensor is torch.as_tensor else optimizer.clear_grad()
                running.step()
            loss(model, *batch)
            running.step()
    return follow(into / "base", into / "cand", "paddle", mapping=mapping)


def of(found: RecipeResult, name: str) -> Outcome:
    return next(outcome for outcome in found.outcomes if outcome.name == name)


def explained(found: RecipeResult) -> str:
    return "\n".join(f"{outcome.name} {outcome.status}: {outcome.said} {outcome.remarks}" for outcome in found.outcomes)


def test_a_gradient_that_is_rounding_alone_is_not_blamed(tmp_path: Path) -> None:
    found = followed(net(), tmp_path)
    assert found.verdict == found.result.verdict == "aligned", explained(found)
    backward = of(found, "backward")
    assert backward.status == "pass"
    assert "bitwise" not in backward.said
    rounding = [remark for remark in backward.remarks if "beyond these numbers and explained by rounding" in remark]
    assert rounding
    assert "bias" in rounding[0]


@pytest.mark.parametrize("detail", ["tensor", "stats"])
def test_modules_alone(detail: str, tmp_path: Path) -> None:
    found = followed(net(), tmp_path, ("module",), detail)
    assert (found.verdict, found.deviating) == ("aligned", None), explained(found)


@pytest.mark.parametrize("name", ["unet", "ctc recogniser", "lstm tagger"])
def test_healthy_pairs_pass(name: str, tmp_path: Path) -> None:
    found = followed(twins(name), tmp_path)
    assert found.verdict == "aligned", explained(found)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("operator", "between bn1 and conv2: gelu, tensor "),
        ("scale", "between relu#0 and conv2: __mul__ (only in the candidate), tensor "),
    ],
)
def test_an_operator_between_two_modules(wrong: str, said: str, tmp_path: Path) -> None:
    forward = of(followed(net(wrong), tmp_path), "forward")
    assert forward.status == "DEVIATES"
    assert forward.said.startswith(said)
    assert forward.scope == "", "no module is to blame"
    assert [rung.status for rung in forward.rungs] == ["pass"] * (len(forward.rungs) - 1) + ["DEVIATES"]


def test_modules_alone_do_not_show_an_operator_between_them(tmp_path: Path) -> None:
    found = followed(net("operator"), tmp_path, ("module",))
    assert found.verdict == "inconclusive", explained(found)
    forward = of(found, "forward")
    assert (forward.status, forward.scope, forward.rungs) == ("could not tell", None, ())
    assert forward.said.startswith("input.0 of rank 0 step 0 forward module conv2/Conv2D#0 differs (rel. L2 ")
    assert "and no compared call made that difference; " in forward.said
    assert of(found, "backward").status == "could not tell"


def test_a_wrong_gradient_of_an_operator_that_one_side_alone_has_is_named(tmp_path: Path) -> None:
    found = followed(net("gradient"), tmp_path)
    backward = of(found, "backward")
    assert (found.verdict, backward.status) == ("deviates", "DEVIATES"), explained(found)
    assert backward.said.startswith("between mean#0 and relu#0: apply (only in the candidate), tensor 20 % off")


@pytest.mark.parametrize(("wrong", "step", "scope"), [("epsilon", "inputs", "bn2"), ("gradient of a weight", "backward", "fc")])
def test_the_module_is_named(wrong: str, step: str, scope: str, tmp_path: Path) -> None:
    found = followed(net(wrong), tmp_path)
    deviating = found.deviating
    assert deviating is not None, explained(found)
    assert (deviating.name, deviating.scope) == (step, scope), explained(found)
    assert "bitwise" not in deviating.said


def test_a_fault_within_the_guides_numbers_is_no_alignment(tmp_path: Path) -> None:
    found = followed(net("mean"), tmp_path)
    forward = of(found, "forward")
    assert forward.status == "pass"
    said = "within these numbers, but more than rounding: the candidate runs paddle._C_ops.sum, paddle.Tensor.__truediv__ where"
    assert forward.remarks[0].startswith(said)
    assert (found.verdict, found.exit_code) == ("deviates", 1), explained(found)
