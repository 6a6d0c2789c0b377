"""Teacher forcing: each module computes with the baseline's inputs, so a comparison finds local errors alone."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import trueup
import zoo
from trueup import Result, simdev
from trueup.foundation.model import TrueupError


def recorded(into: Path, model: str, device: str, fault: str | None = None, **options: object) -> Path:
    training = zoo.build(model, device)
    with (
        simdev.inject(fault) if fault else nullcontext(),
        trueup.capture(into, model=training.model, on_error="stop", **options) as capture,  # type: ignore[arg-type]
    ):
        for _ in range(2 if model == "resnet" else 1):
            training.step()
            capture.step()
    return into


def scopes_of(result: Result) -> set[str]:
    """Return the scopes of the culprits, and of those of their kinds."""
    return {name.split(",")[0] for c in result.culprits for name in (c.name, *c.alike_in)}


@pytest.mark.parametrize(
    ("model", "fault", "scopes"),
    [
        ("gpt2-eager", "softmax-backward", {"transformer.h.0.attn", "transformer.h.1.attn"}),
        ("resnet", "batch-norm-backward", None),
        ("resnet", "conv-padding-replicates-edge", None),
    ],
)
def test_every_call_shows_its_own_error_alone(model: str, fault: str, scopes: set[str] | None, tmp_path: Path) -> None:
    base = recorded(tmp_path / "base", model, "cpu", detail="tensor")
    free = trueup.compare(base, recorded(tmp_path / "free", model, "npu", fault))
    forced = trueup.compare(base, recorded(tmp_path / "forced", model, "npu", fault, inputs_from=base))
    assert forced.verdict == "deviates"
    assert forced.culprit is not None
    assert free.culprit is not None
    one, other = ((c.scope, c.op, c.phase) for c in (forced.culprit, free.culprit))
    assert one == other
    assert {c.op for c in forced.culprits} == {forced.culprit.op}
    assert forced.counts["equal"] > 2 * free.counts["equal"] or forced.counts["deviates"] < free.counts["deviates"] / 2
    assert scopes is None or scopes_of(forced) == scopes
    assert "inputs were forced" in forced.sentence
    assert "its own error alone" in forced.sentence


def test_agreement_at_level_module_alone_proves_nothing(tmp_path: Path) -> None:
    base = recorded(tmp_path / "base", "gpt2-eager", "cpu", detail="tensor", level="module")
    forced = recorded(tmp_path / "forced", "gpt2-eager", "npu", "softmax-backward", inputs_from=base, level="module")
    result = trueup.compare(base, forced)
    assert result.verdict == "inconclusive"
    assert "at level module a forced run does not show what functions between modules compute" in result.sentence


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, width), nn.ReLU(inplace=True), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.first(x)))


def train(model: nn.Module, into: Path, **options: object) -> list[str]:
    torch.manual_seed(1)
    x = torch.randn(3, 4)
    with trueup.capture(into, model=model, on_error="stop", **options) as capture:  # type: ignore[arg-type]
        model(x).sum().backward()
        capture.step()
    return list(trueup.open_capture(into).ranks[0]["notes"])


def test_gradients_reach_what_came_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net(5)
    train(model, tmp_path / "base", detail="tensor")
    expected = [p.grad.clone() for p in model.parameters()]
    other = Net(5)  # other weights: all that it computes is forced
    notes = train(other, tmp_path / "forced", inputs_from=tmp_path / "base")
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, other.parameters(), strict=True))
    assert any(note.startswith("inputs were forced: 4 module calls") for note in notes)


def test_what_has_no_counterpart_is_said(tmp_path: Path) -> None:
    train(Net(5), tmp_path / "base", detail="tensor")
    notes = train(Net(6), tmp_path / "forced", inputs_from=tmp_path / "base")
    assert any("a different shape than the baseline's param" in note and "first" in note for note in notes), notes
    lone = train(nn.Sequential(nn.Tanh(), nn.Linear(4, 2)), tmp_path / "alone", inputs_from=tmp_path / "base")
    assert any("the baseline has no such call" in note for note in lone)


def test_baseline_without_tensors_is_refused(tmp_path: Path) -> None:
    train(Net(5), tmp_path / "base")
    with pytest.raises(TrueupError, match="cannot lend its inputs"):
        trueup.capture(tmp_path / "forced", inputs_from=tmp_path / "base")


def test_what_is_drawn_behind_a_function_without_a_tensor(tmp_path: Path) -> None:
    """`Module.to` asks such a function first; the state of the generator, which it is the first to see, is the next call's."""

    def run(into: Path, **options: object) -> Path:
        torch.manual_seed(0)
        with trueup.capture(into, level=("api", "aten"), on_error="stop", **options):  # type: ignore[arg-type]
            layer = nn.Linear(3, 2).to("cpu")
            layer(torch.randn(4, 3)).sum().backward()
        return into

    base = run(tmp_path / "base", detail="tensor")
    result = trueup.compare(base, run(tmp_path / "forced", inputs_from=base, force="aten"))
    assert (result.verdict, result.counts["deviates"]) == ("aligned", 0), result.sentence


def test_gradients_that_an_optimizer_was_lent_were_not_changed_by_the_candidate(tmp_path: Path) -> None:
    def run(into: Path, **options: object) -> Path:
        torch.manual_seed(0)
        with trueup.capture(into, level=("api", "aten"), on_error="stop", **options):  # type: ignore[arg-type]
            layer = nn.Linear(3, 2)
            layer(torch.ones(4, 3)).sum().backward()
            torch.optim.SGD(layer.parameters(), lr=0.1).step()
        return into

    base = run(tmp_path / "base", detail="tensor")
    sentence = trueup.compare(base, run(tmp_path / "forced", inputs_from=base, force="api")).sentence
    assert sentence.startswith("ALIGNED")
    assert "as by clipping" not in sentence
