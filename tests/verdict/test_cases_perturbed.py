"""One operator perturbed in a GPT of 6.9 million parameters (a ResNet-18 for ReLU), all else the same, told from statistics.

These are the cases in which msprobe 26.2.0 flagged a later operator or nothing: noise of 1e-3 on a softmax, a perturbed weight,
the tanh approximation of GELU, ReLU off by 1 %; and two threads against one, where it must name nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import trueup
from trueup.foundation.model import Finding
from verdict.cases import broken, named, noisy, record

LEVELS = (None, "aten", "api")


class InBfloat16(nn.Module):
    """A layer that somebody left in bfloat16: its weights too, or cast in each forward."""

    def __init__(self, layer: nn.Linear, *, stored: bool) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        if stored:
            self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = [t.to(torch.bfloat16) for t in (x, self.weight, self.bias)]
        return nn.functional.linear(*half).to(x.dtype)


def trained(folder: Path, model: str, change: Callable[[Any], Any] = lambda _: None) -> Path:
    """Record a step of a benchmark's model; ``change`` alters the model, or returns a context that breaks a kernel."""
    training = models.build(model)
    with change(training.model) or nullcontext():
        return record(folder, training, training.model, level="all")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the baseline by model."""
    folder = tmp_path_factory.mktemp("baselines")
    return {model: trained(folder / model, model) for model in ("gpt", "resnet")}


# ---------------------------------------------------------------- what is changed
def softmax(deviation: float) -> Callable[[Any], AbstractContextManager[Any]]:
    return lambda _: broken("aten::_softmax", noisy(deviation), 2)


def weight(gpt: Any) -> None:
    with torch.no_grad():
        changed = gpt.blocks[2].fc1.weight
        changed += 1e-3 * torch.randn(changed.shape, generator=torch.Generator().manual_seed(3))


def gelu(_: Any) -> AbstractContextManager[Any]:
    table = torch.library.get_kernel("aten::gelu", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return broken("aten::gelu", lambda right, x, **_: table.call_boxed(keys, x, approximate="tanh"), 3)


def epsilon(gpt: Any) -> None:
    gpt.blocks[2].ln1.eps = 1e-3


def scale(gpt: Any) -> None:
    """Divide the scores of one block by the width of a head, not by its root."""
    attention, whole = gpt.blocks[2].attn, gpt.blocks[2].attn.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models.math, "sqrt", float)
            return whole(x)

    attention.forward = forward


def bfloat16(stored: bool) -> Callable[[Any], None]:
    def change(gpt: Any) -> None:
        gpt.blocks[2].fc2 = InBfloat16(gpt.blocks[2].fc2, stored=stored)

    return change


def relu(_: Any) -> AbstractContextManager[Any]:
    return broken("aten::relu_", lambda right, x: right.mul_(1.01), 4)


# ---------------------------------------------------------------- what must be said
@dataclass(frozen=True)
class Case:
    model: str
    change: Callable[[Any], Any]
    kinds: tuple[str, ...]
    scope: str
    ops: tuple[str, ...]
    """Parts of the operator's name at either level, one of which must be in it; nothing where only the scope is asked for."""
    words: tuple[str, ...] = ()
    """What the sentence must contain, all of it."""


CASES: dict[str, Case] = {
    "softmax-1e-3": Case("gpt", softmax(1e-3), ("operator",), "blocks.2.attn", ("softmax",)),
    "fc1-weight": Case("gpt", weight, ("input",), "blocks.2.fc1", ()),
    "gelu-tanh": Case("gpt", gelu, ("operator",), "blocks.3", ("gelu",)),
    "epsilon": Case("gpt", epsilon, ("argument",), "blocks.2.ln1", ("layer_norm",), ("1e-05", "0.001")),
    "attention-scale": Case("gpt", scale, ("argument",), "blocks.2.attn", ("mul",), ("0.17", "0.03125")),
    "bfloat16-stored": Case("gpt", bfloat16(stored=True), ("input", "region", "operator"), "blocks.2.fc2", ()),
    "bfloat16-cast": Case("gpt", bfloat16(stored=False), ("region", "operator"), "blocks.2.fc2", ()),
    "relu-1.01": Case("resnet", relu, ("operator",), "layers.1.relu", ("relu",)),
}


def check(case: Case, found: Finding) -> None:
    assert (found.scope, found.phase, found.step) == (case.scope, "forward", 0), found.sentence
    assert found.kind in case.kinds, found.sentence
    assert not case.ops or any(op in found.op for op in case.ops), found.sentence
    assert all(word in found.sentence for word in case.words), found.sentence
    assert found.confidence == "high"


@pytest.mark.parametrize("name", list(CASES))
def test_the_right_call_or_input_is_named(name: str, baselines: dict[str, Path], tmp_path: Path) -> None:
    case = CASES[name]
    candidate = trained(tmp_path / "candidate", case.model, case.change)
    for level in LEVELS:
        check(case, named(trueup.compare(baselines[case.model], candidate, level=level)))


def test_one_thread_against_two(baselines: dict[str, Path], tmp_path: Path) -> None:
    torch.set_num_threads(2)
    try:
        candidate = trained(tmp_path / "candidate", "gpt")
    finally:
        torch.set_num_threads(1)
    result = trueup.compare(baselines["gpt"], candidate)
    assert result.counts["equal"] < result.counts["compared"], "two threads computed the same bits: nothing was tested"
    assert (result.verdict, result.culprit) == ("aligned", None), result.sentence
    at_api = trueup.compare(baselines["gpt"], candidate, level="api")
    assert (at_api.verdict, at_api.culprit) == ("aligned", None), at_api.sentence
