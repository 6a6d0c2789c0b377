"""Forcing call by call: each function, or operator, computes with the baseline's inputs, and the graph stays the program's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import trueup
from trueup import simdev
from trueup.doors.cli import main
from trueup.foundation.model import TrueupError

from .test_forcing import recorded, scopes_of

LEVELS = ["module", "api", "aten"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    simdev.install()
    simdev.heal()
    torch.set_num_threads(1)
    return recorded(tmp_path_factory.mktemp("base") / "base", "gpt2-eager", "cpu", detail="tensor", level=LEVELS)


@pytest.mark.parametrize("level", ["api", "aten"])
def test_every_call_shows_its_own_error_alone(level: str, base: Path, tmp_path: Path) -> None:
    options = {"inputs_from": base, "force": level}
    healthy = trueup.compare(base, recorded(tmp_path / "healthy", "gpt2-eager", "npu", **options))
    assert healthy.verdict == "aligned"
    broken = trueup.compare(base, recorded(tmp_path / "broken", "gpt2-eager", "npu", "softmax-backward", **options))
    assert {(c.op, c.phase) for c in broken.culprits} == {("aten::_softmax_backward_data", "backward")}
    assert scopes_of(broken) == {"transformer.h.0.attn", "transformer.h.1.attn"}
    assert broken.counts["deviates"] < 12  # the operator, and the functions and views around it
    assert f"{level} calls computed with the inputs of" in broken.sentence
    assert "its own error alone" in broken.sentence


class Net(nn.Module):
    """Views, writes in place, a shared tensor, a custom function, dropout and a buffer."""

    def __init__(self, seed: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.batch = nn.Linear(4, width), nn.Linear(width, 2), nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.batch(self.first(x))
        y[:, ::2] *= 2
        y = torch.relu_(y)
        left, right = y.chunk(2, dim=1)
        z = torch.cat([left.exp(), right.t().t() + left, left[:, :0]], dim=1)
        z = nn.functional.dropout(z, 0.5, training=True)
        return self.last(z + y.mean(0, keepdim=True).expand_as(z))


def train(model: nn.Module, into: Path, seed: int = 1, **options: object) -> list[str]:
    torch.manual_seed(seed)
    x = torch.ones(6, 4) * seed
    with trueup.capture(into, model=model, on_error="stop", **options) as capture:  # type: ignore[arg-type]
        model(x).square().sum().backward()
        capture.step()
    return list(trueup.open_capture(into).ranks[0]["notes"])


@pytest.mark.parametrize("level", ["api", "aten"])
def test_all_that_is_forced_is_the_baselines(level: str, tmp_path: Path) -> None:
    """Another model, other data and another seed compute the baseline's bits, gradients of the weights included."""
    model = Net(0)
    train(model, tmp_path / "base", detail="tensor", level=LEVELS)
    expected = [p.grad.clone() for p in model.parameters()]
    other = Net(5)
    notes = train(other, tmp_path / "forced", seed=3, inputs_from=tmp_path / "base", force=level)
    for (name, p), gradient in zip(other.named_parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0, msg=name)
    assert any("inputs were forced" in note for note in notes)
    assert trueup.compare(tmp_path / "base", tmp_path / "forced").verdict == "aligned"


def test_what_has_no_counterpart_is_said(tmp_path: Path) -> None:
    train(Net(0), tmp_path / "base", detail="tensor", level=["api"])
    notes = train(Net(0, width=12), tmp_path / "forced", inputs_from=tmp_path / "base", level=["api"])
    assert any("a different shape than the baseline's input" in note for note in notes), notes
    lone = train(nn.Sequential(nn.Tanh(), nn.Linear(4, 2)), tmp_path / "alone", inputs_from=tmp_path / "base", level=["api"])
    assert any("the baseline has no such call; the first is 0, forward" in note for note in lone), lone


def test_the_level_is_that_of_the_baseline_or_the_one_asked_for(base: Path, tmp_path: Path) -> None:
    train(Net(0), tmp_path / "api", detail="tensor", level=["api"])
    with pytest.raises(TrueupError, match=r"cannot lend its inputs\.\n  expected: a capture of level aten"):
        trueup.capture(tmp_path / "x", inputs_from=tmp_path / "api", force="aten")
    with pytest.raises(TrueupError, match="force says which calls get a baseline's inputs"):
        trueup.capture(tmp_path / "x", force="aten")
    with pytest.raises(TrueupError, match="levels above show the run's own: record api or aten"):
        trueup.capture(tmp_path / "x", inputs_from=tmp_path / "api", level="module")
    assert main(["capture", "--force", "api", "-o", str(tmp_path / "x"), "--", "true"]) == 64
    assert main(["capture", "--inputs-from", str(base), "--force", "operator", "-o", str(tmp_path / "x"), "--", "true"]) == 64
    assert not (tmp_path / "x").exists()
