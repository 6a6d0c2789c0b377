"""A shadow run touches nothing of the training, and finds the wrong operator in one step, with no baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trueup
import zoo
from trueup import simdev
from trueup.foundation.model import TrueupError
from trueup.recording.execution.shadow import ShadowResult, open_result


def trained(model: str, device: str, **shadow: Any) -> dict[str, Any]:
    """Train two steps; return everything that a shadow must leave alone, as bytes."""
    training = zoo.build(model, device)
    versions, losses = [], []

    def steps() -> None:
        for _ in range(1 if model == "lstm_tagger" else 2):
            losses.append(training.step().cpu())
            versions.append([p._version for p in training.model.parameters()])

    if shadow:
        with trueup.shadow(training.model, quiet=True, **shadow) as run:
            steps()
        assert run.result.counts["accurate"] > 50
    else:
        steps()
    state = {name: t.cpu() for name, t in training.model.state_dict().items()}
    gradients = {name: p.grad.cpu() for name, p in training.model.named_parameters() if p.grad is not None}
    return {
        "losses": losses, "state": state, "gradients": gradients, "versions": versions, "random": torch.get_rng_state(),
        "buffers": [b._version for b in training.model.buffers()],
    }  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(("model", "device"), [("bert", "cpu"), ("bert", "npu"), ("resnet", "cpu"), ("lstm_tagger", "npu")])
def test_training_is_bitwise_untouched(model: str, device: str, tmp_path: Path) -> None:
    plain = trained(model, device)
    assert same(plain, trained(model, device, directory=tmp_path / "run"))


def test_memory_of_the_graph_is_untouched() -> None:
    """What autograd saved is the very memory that it saves without a shadow: nothing was replaced by a copy."""
    x, layer = torch.randn(4, 8, requires_grad=True), nn.Linear(8, 8)

    def saved() -> list[int]:
        seen: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t):
            layer(x).sin().sum().backward()
        return seen

    before = saved()
    with trueup.shadow(layer, quiet=True):
        during = saved()
    assert len(during) == len(before)
    assert {x.data_ptr(), layer.weight.data_ptr()} & set(before) == {x.data_ptr(), layer.weight.data_ptr()} & set(during)


@pytest.mark.parametrize(
    ("model", "fault", "op", "phase", "scope"),
    [
        ("bert", "layer-norm-epsilon", "aten::native_layer_norm", "forward", "bert.embeddings.LayerNorm"),
        ("bert", "gelu-backward", "aten::gelu_backward", "backward", "bert.encoder.layer.1.intermediate.intermediate_act_fn"),
        ("gpt2-eager", "softmax-backward", "aten::_softmax_backward_data", "backward", "transformer.h.1.attn"),
        ("gpt2-eager", "adam-second-moment-value", "aten::addcmul_", "optimizer", ""),
        ("lstm_tagger", "lstm-backward-cell-gate", "aten::_thnn_fused_lstm_cell_backward_impl", "backward", "lstm"),
        ("resnet", "conv-weight-grad-last-tile", "aten::convolution_backward", "backward", "stages.2.shortcut.1"),
        ("resnet", "max-pool-ties", "aten::max_pool2d_with_indices", "forward", "stem.3"),
    ],
)
def test_culprit_is_found_in_one_step(model: str, fault: str, op: str, phase: str, scope: str) -> None:
    training = zoo.build(model, "npu")
    with simdev.inject(fault), trueup.shadow(training.model, quiet=True) as shadow:
        training.step()
    result = shadow.result
    assert result.verdict == "wrong", result.sentence
    assert (result.culprit.op, result.culprit.phase, result.culprit.scope) == (op, phase, scope)
    assert {(b.op, b.phase) for b in result.culprits} == {(op, phase)}
    assert result.exit_code == 1


def found(step: Any, **options: Any) -> ShadowResult:
    with trueup.shadow(quiet=True, **options) as shadow:
        step()
    return shadow.result


def test_an_ill_conditioned_call_is_not_blamed() -> None:
    n = 9
    hilbert = torch.tensor([[1 / (i + j + 1) for j in range(n)] for i in range(n)])
    result = found(lambda: torch.linalg.inv(hilbert))
    assert result.culprits == []
    assert result.counts.get("ill-conditioned") == 1, result.sentence
    assert "one unit in the last place of the inputs explains" in result.sentence


def cancelling(kind: str, dtype: torch.dtype) -> Any:
    """Return a step whose results are what is left of numbers that nearly cancel, or nearly tie."""
    torch.manual_seed(0)
    x = (1000 + torch.randn(64, 256) * 1e-2).to(dtype).to("npu")
    y = (x + torch.randn(64, 256).to("npu") * 1e-3).to(dtype)
    steps: dict[str, Any] = {
        "difference": lambda: (x - y), "softmax": lambda: torch.softmax(x, 1), "log_softmax": lambda: torch.log_softmax(x, 1),
        "variance": lambda: x.var(1), "norm": lambda: nn.functional.layer_norm(x, (256,)), "sum": lambda: (x - x.mean()).sum(),
        "product": lambda: (x - y) @ (x + y).T, "logsumexp": lambda: torch.logsumexp(-x, 1), "cosine": lambda: torch.sin(x * 1e4),
    }  # fmt: skip
    return steps[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["difference", "softmax", "log_softmax", "variance", "norm", "sum", "product", "logsumexp", "cosine"]
)
def test_cancellation_is_not_blamed(kind: str, dtype: torch.dtype) -> None:
    simdev.install()
    with simdev.noise("reordered-reductions"):
        result = found(cancelling(kind, dtype))
    assert result.culprits == [], result.sentence
    assert result.counts.get("wrong", 0) == result.counts.get("suspicious", 0) == 0


@pytest.mark.parametrize(("kind", "fault"), [("norm", "layer-norm-epsilon"), ("sum", "sum-saturates-65504")])
def test_conditioning_excuses_no_more_than_it_explains(kind: str, fault: str) -> None:
    step = cancelling(kind, torch.float32) if kind != "sum" else lambda: torch.full((64, 4096), 100.0, device="npu").sum(1)
    with simdev.inject(fault):
        assert len({c.op for c in found(step).culprits}) == 1

    @torch.library.custom_op("trueup_test::bad_inverse", mutates_args=())
    def bad_inverse(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x) * 1.5

    hilbert = torch.tensor([[1 / (i + j + 1) for j in range(4)] for i in range(4)])  # condition 15,000: a unit moves it by 1e-3
    formula = {"trueup_test::bad_inverse": lambda a, _: {"output.0": torch.linalg.inv(a["x"])}}
    assert [c.op for c in found(lambda: bad_inverse(hilbert), formulas=formula).culprits] == ["trueup_test::bad_inverse"]


def test_rounding_of_bfloat16_is_not_blamed() -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).bfloat16()
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    result = found(lambda: layer(x).float().square().sum().backward())
    assert (result.verdict, result.culprits) == ("sound", [])


def test_lstm_of_onednn_is_judged_by_its_definition() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(8, 16, num_layers=2, bidirectional=True), torch.randn(5, 3, 8)
    result = found(lambda: layer(x)[0].sum().backward())
    judged = {row["op"] for row in result.calls.to_pylist() if row["state"] == "accurate"}
    assert result.verdict == "sound", result.sentence
    assert {"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"} <= judged


def test_what_has_no_reference_is_said() -> None:
    @torch.library.custom_op("trueup_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    result = found(lambda: twice(torch.ones(3)))
    assert (result.verdict, result.exit_code) == ("could not tell", 2)
    assert result.unknown == {"trueup_test::twice": "an operator of another library, for which no reference is known"}
    assert "trueup_test::twice: an operator of another library" in result.sentence
    known = found(lambda: twice(torch.ones(3)), formulas={"trueup_test::twice": lambda a, _: {"output.0": a["x"] * 2}})
    assert (known.verdict, known.unknown) == ("sound", {})
    other = found(lambda: twice(torch.ones(3)), formulas={"trueup_test::twice": lambda a, _: {"output.0": a["x"] * 3}})
    assert [b.op for b in other.culprits] == ["trueup_test::twice"]


def test_random_operators_and_large_tensors_are_counted() -> None:
    def step() -> None:
        torch.rand(3) + 1
        torch.ones(300_000).exp()

    result = found(step, largest_mb=1)
    assert result.left["random: another draw is as good"] == 1
    assert result.left["a tensor of more than 1 MB"] == 1
    assert result.verdict == "sound"


def test_dropout_is_judged_by_its_mask() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    layer = nn.Dropout(0.3)

    def step() -> None:
        layer(x.to("npu")).sum().backward()

    assert found(step).culprits == []
    with simdev.inject("dropout-no-rescale"):
        result = found(step)
    assert [b.op for b in result.culprits] == ["aten::native_dropout"]


def test_saturation_is_told() -> None:
    x = torch.full((4096,), 60000.0, device="npu")
    with simdev.inject("sum-saturates-65504"):
        assert [b.op for b in found(lambda: x.sum()).culprits] == ["aten::sum"]


def test_capture_holds_the_rows_that_were_judged(tmp_path: Path) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with trueup.shadow(layer, directory=tmp_path / "run", quiet=True) as shadow:
        layer(x).sum().backward()
    rows = trueup.open_capture(tmp_path / "run").records(["op", "slot", "l2"], level="aten").to_pylist()
    assert {("aten::addmm", "input.1"), ("aten::addmm", "output.0")} <= {(r["op"], r["slot"]) for r in rows}
    read = open_result(tmp_path / "run")
    assert read.counts == shadow.result.counts
    assert next(r["api"] for r in read.calls.to_pylist() if r["op"] == "aten::addmm") == "torch.nn.functional.linear"


def test_options_that_cannot_be_are_refused() -> None:
    for bad, said in [
        ({"reference": "cpu:float16"}, "no reference"), ({"sample": 0}, "no share"), ({"time": "soon"}, "no limit"),
        ({"largest_mb": -1}, "no size"), ({"reference": "xla"}, "cannot compute"),
    ]:  # fmt: skip
        with pytest.raises(TrueupError, match=said):
            trueup.shadow(**bad)


def test_one_run_at_a_time() -> None:
    with trueup.shadow(quiet=True), pytest.raises(TrueupError, match="already running"), trueup.shadow(quiet=True):
        pass
