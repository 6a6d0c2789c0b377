"""What a monitor takes of a PyTorch training is what it says, and the training is bitwise the one without it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

import trueup
from monitor.training import SIZE, WORDS, Model, train
from trueup.analysis.monitor.comparing import compare_series
from trueup.analysis.monitor.kinds import OTHER, kind_of
from trueup.foundation.store.series import SeriesReader
from trueup.recording.adapters.torch import monitoring
from trueup.recording.adapters.torch.monitored_layers import TorchLayers
from trueup.recording.engine.monitoring import Wanted


@pytest.mark.parametrize("scaled", [False, True])
def test_the_training_is_bitwise_the_same(tmp_path: Path, scaled: bool) -> None:
    plain, monitored = train(None, scaled=scaled), train(tmp_path / "m", scaled=scaled)
    assert monitored["monitor"].failure is None
    assert plain["losses"] == monitored["losses"]
    assert torch.equal(plain["random"], monitored["random"])
    for kind in ("gradients", "weights"):
        for one, other in zip(plain[kind], monitored[kind], strict=True):
            ones, others = (one, other) if kind == "gradients" else ([one], [other])
            assert all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def test_numbers_are_those_of_the_definitions(tmp_path: Path) -> None:
    run = train(tmp_path / "m", step=20)
    read = SeriesReader(tmp_path / "m")
    assert read.problems == []
    assert read.steps(0).tolist() == [20, 21, 22, 23, 24, 25]
    assert read.column(0, "loss").tolist() == run["losses"]
    assert read.column(0, "lr/0").tolist() == [1e-2] * 6
    assert read.column(0, "tokens").tolist() == [10] * 6
    whole = [math.sqrt(sum(float(g.double().square().sum()) for g in held)) for held in run["gradients"]]
    np.testing.assert_allclose(read.column(0, "gradient_norm"), whole, rtol=1e-6)
    before = read.column(0, "gradient_norm_before_clip")
    np.testing.assert_allclose(read.column(0, "clip_ratio"), np.minimum(1, 0.5 / before), rtol=1e-12)
    head = [math.sqrt(sum(float(g.double().square().sum()) for g in held[-2:])) for held in run["gradients"]]
    np.testing.assert_allclose(read.column(0, "gradient_norm/head"), head, rtol=1e-6)
    sampled = read.column(0, "update_ratio/head")
    assert np.isnan(sampled).tolist() == [False, True] * 3
    state = [run["optimizer"].state[p] for p in run["model"].head.parameters()]
    assert len(state) == 2
    named = {name.partition("/")[0] for name in read.names(0)}
    assert all(kind_of(name) is not OTHER for name in named)
    assert {"attention_largest_logit/block", "attention_entropy/block", "router_load/block.router"} <= set(read.names(0))
    assert "activation_saturated/block.act" in read.names(0)
    load = read.column(0, "router_load/block.router")
    assert (load[::2] >= 1).all()


def test_everything_is_taken_more_often_at_first() -> None:
    assert [step for step in range(62) if step % Wanted(every=10).apart(step) == 0] == [
        *range(20), 20, 22, 24, 26, 28, 30, 33, 36, 39, 40, 44, 48, 50, 55, 60,
    ]  # fmt: skip
    assert [Wanted(every=every).apart(step) for every, step in ((10, 100), (10, 12345), (1, 500), (50, 230))] == [10, 10, 1, 23]


def test_numbers_that_travel_for_a_step_are_of_the_step_that_made_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def synchronize(self) -> None: ...

    monkeypatch.setattr(monitoring, "streams", lambda *_: None)  # what is on the host needs no travel
    train(tmp_path / "at-once", step=20)
    monkeypatch.setattr(monitoring, "_event", lambda _: Event())  # as on a GPU
    train(tmp_path / "late", step=20)
    one, other = SeriesReader(tmp_path / "at-once"), SeriesReader(tmp_path / "late")
    assert one.steps(0).tolist() == other.steps(0).tolist() == [20, 21, 22, 23, 24, 25]
    assert one.names(0) == other.names(0)
    for name in one.names(0):
        np.testing.assert_array_equal(one.column(0, name), other.column(0, name), name)


def test_a_step_without_everything_asks_nothing_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    reads, norms = TorchLayers._reads, monitoring.TorchKernels.norms
    monkeypatch.setattr(TorchLayers, "_reads", lambda self: asked.append(self._probe._listener.step) or reads(self))
    train(tmp_path / "m", steps=12, every=10, step=100)
    assert set(asked) == {100, 110}
    asked.clear()
    monkeypatch.setattr(monitoring.TorchKernels, "norms", lambda *given: asked.append("norms") or norms(*given))
    train(tmp_path / "each", steps=3, every=1)
    assert asked.count("norms") == 1  # once there is momentum, one pass over the gradients takes their norms, too


@pytest.mark.parametrize("compiled", [True, False])
def test_moments_and_updates_of_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr("trueup.recording.adapters.torch.monitoring.streams", lambda *_: None)
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3, bias=False)
    model = torch.nn.Sequential(layer, torch.nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    monitor = trueup.monitor(model, optimizer, tmp_path / "m", every=1, alerts=False)
    for _ in range(3):
        before, held = layer.weight.detach().clone(), optimizer.state.get(layer.weight, {}).get("exp_avg")
        held = None if held is None else held.clone()
        out = model(torch.randn(5, 4))
        out.sum().backward()
        gradient = layer.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    read = SeriesReader(tmp_path / "m")
    last = {name: read.column(0, name)[-1] for name in read.names(0)}
    weight, state = layer.weight.detach(), optimizer.state[layer.weight]
    assert last["update_ratio/0"] == pytest.approx(float((weight - before).norm() / weight.norm()), rel=1e-5)
    assert last["momentum_norm/0"] == pytest.approx(float(state["exp_avg"].norm()), rel=1e-5)
    assert last["variance_norm/0"] == pytest.approx(float(state["exp_avg_sq"].norm()), rel=1e-5)
    cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), held.flatten(), dim=0)
    assert last["gradient_momentum_cosine/0"] == pytest.approx(float(cosine), abs=1e-5)
    above = (state["exp_avg"] ** 2 > state["exp_avg_sq"]).float().mean()
    assert last["momentum_above_variance/0"] == pytest.approx(float(above))
    assert last["activation_zeros/1"] == pytest.approx(float((out == 0).float().mean()))
    assert last["activation_rms/1"] == pytest.approx(float(out.detach().norm() / math.sqrt(out.numel())), rel=1e-5)
    assert last["activation_max/1"] == pytest.approx(float(out.detach().abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_that_lie_in_another_order(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Sigmoid()).to(dtype, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    with trueup.monitor(model, optimizer, tmp_path / "m", every=1, alerts=False) as monitor:
        for _ in range(3):
            before = [one.detach().double().clone() for one in model.parameters()]
            optimizer.zero_grad()
            out = model(torch.randn(2, 3, 5, 5, dtype=dtype))
            (40 * out).sum().backward()
            optimizer.step()
    assert monitor.failure is None
    read = SeriesReader(tmp_path / "m")
    last = {name: read.column(0, name)[-1] for name in read.names(0)}
    gradients = [one.grad.double() for one in model.parameters()]
    weights = [one.detach().double() for one in model.parameters()]
    assert last["gradient_norm/0"] == pytest.approx(float(torch.cat([g.flatten() for g in gradients]).norm()), rel=1e-5)
    change = torch.cat([(one - two).flatten() for one, two in zip(weights, before, strict=True)]).norm()
    assert last["update_ratio/0"] == pytest.approx(float(change / torch.cat([w.flatten() for w in weights]).norm()), rel=1e-2)
    assert last["activation_saturated/1"] == pytest.approx(float(((out < 0.01) | (out > 0.99)).float().mean()), abs=1e-6)
    assert last["activation_max/1"] == float(out.detach().abs().max())


def test_copies_of_large_and_small_weights_are_exact() -> None:
    probe = SimpleNamespace(_room=[])
    for _ in range(2):  # the second time into the memory of the first
        held = [torch.randn(300, 301), torch.randn(7), torch.randn(300, 301).t(), torch.randn(70_001).bfloat16()]
        copies = monitoring.TorchProbe.copied(probe, held)  # type: ignore[arg-type]
        assert all(torch.equal(one, other) for one, other in zip(held, copies, strict=True))
    assert copies is probe._room


class Held(torch.Tensor):
    """A tensor that is no memory of its own, as a `DTensor` is none: its address is zero."""

    held: torch.Tensor

    @staticmethod
    def of(held: torch.Tensor) -> Held:
        found: Held = torch.Tensor._make_wrapper_subclass(Held, held.shape, dtype=held.dtype)
        found.held = held
        return found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map(lambda one: one.held if isinstance(one, Held) else one, (args, kwargs or {}))
        return tree_map(lambda one: Held.of(one) if isinstance(one, torch.Tensor) else one, function(*given[0], **given[1]))


def test_a_tensor_without_memory_of_its_own_is_copied_by_its_class() -> None:
    probe = SimpleNamespace(_room=[])
    for seed in (0, 1):  # the second time into what the first left
        weight = torch.randn(300, 301, generator=torch.Generator().manual_seed(seed))
        (copied,) = monitoring.TorchProbe.copied(probe, [Held.of(weight)])  # type: ignore[arg-type]
        assert torch.equal(copied.held, weight)


def test_attention_is_that_of_its_definition(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, seen = Model(), []
    model.block.qkv.register_forward_hook(lambda *given: seen.append(given[2].detach()))
    with trueup.monitor(model, None, tmp_path / "m", alerts=False):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randint(0, WORDS, (2, 5))).sum().backward()
        optimizer.step()
    q, k, _ = seen[0].reshape(2, 5, 3, 2, SIZE // 2).permute(2, 0, 3, 1, 4)
    logits = (q[0] @ k[0].transpose(-1, -2) / math.sqrt(SIZE // 2)).masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
    weights = logits.softmax(-1)
    read = SeriesReader(tmp_path / "m")
    assert read.column(0, "attention_largest_logit/block")[0] == pytest.approx(float(logits.max()), rel=1e-5)
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1).mean()
    assert read.column(0, "attention_entropy/block")[0] == pytest.approx(float(entropy), rel=1e-5)


def test_what_is_taken_on_request(tmp_path: Path) -> None:
    also = ("moments", "spectrum", "output-gradients", "collectives", "modules")
    plain = train(None, 3)
    run = train(tmp_path / "m", 3, also=also, every=2)
    assert run["monitor"].failure is None
    assert plain["losses"] == run["losses"]
    assert torch.equal(plain["random"], run["random"])
    assert all(torch.equal(a, b) for a, b in zip(plain["weights"], run["weights"], strict=True))
    read = SeriesReader(tmp_path / "m")
    last = {name: read.column(0, name)[-1] for name in read.names(0)}
    assert all(kind_of(name) is not OTHER for name in last)
    weight = run["model"].block.qkv.weight.detach()
    singular = torch.linalg.svdvals(weight)
    assert last["spectral_norm/block.qkv.weight"] == pytest.approx(float(singular[0]), rel=0.02)
    assert last["stable_rank/block.qkv.weight"] == pytest.approx(float((singular**2).sum() / singular[0] ** 2), rel=0.04)
    rows = torch.nn.functional.normalize(run["model"].block.router.weight.detach(), dim=1)
    alike = (rows @ rows.T)[~torch.eye(4, dtype=torch.bool)].mean()
    assert last["router_similarity/block.router.weight"] == pytest.approx(float(alike), abs=1e-5)
    assert 0 < last["router_token_entropy/block.router"] <= 1
    assert 0.2 <= last["attention_largest_weight/block"] <= 1
    modules = json.loads((tmp_path / "m/rank-00000/modules.json").read_text())
    assert modules["block.qkv"]["class"] == "Linear"
    assert modules["block.qkv"]["output"] == [2, 5, 3 * SIZE]
    assert modules["block.qkv"]["called by"][0].endswith(" forward")
    assert "training.py:" in modules["block.qkv"]["called by"][0]
    assert "output_gradient_rms/block.norm" in last


@pytest.mark.parametrize("compiled", [True, False])
def test_inputs_extremes_micro_batches_and_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr("trueup.recording.adapters.torch.monitoring.streams", lambda *_: None)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    also = ("inputs", "extremes", "micro-batches", "updates")
    with trueup.monitor(model, optimizer, tmp_path / "m", every=1, alerts=False, also=also) as monitor:
        before = [one.detach().clone() for one in model.parameters()]
        norms, given = [], []
        for _ in range(3):
            given.append(torch.randn(5, 4))
            model(given[-1]).square().sum().backward()
            norms.append(float(torch.cat([one.grad.flatten() for one in model.parameters()]).norm()))
        gradients = [one.grad.clone() for one in model.parameters()]
        optimizer.step()
    assert monitor.failure is None
    read = SeriesReader(tmp_path / "m")
    last = {name: float(read.column(0, name)[-1]) for name in read.names(0)}
    assert all(kind_of(name) is not OTHER for name in last)
    assert [last[f"accumulated_gradient_norm/{k}"] for k in range(3)] == pytest.approx(norms, rel=1e-5)
    assert norms[2] == pytest.approx(last["gradient_norm"], rel=1e-5)
    assert last["input_rms/0"] == pytest.approx(float(given[-1].square().mean().sqrt()), rel=1e-5)
    assert [last["input_min/0"], last["input_max/0"]] == [float(given[-1].min()), float(given[-1].max())]
    for kind, held in (("gradient", gradients[2:]), ("weight", [one.detach() for one in model[1].parameters()])):
        flat = torch.cat([one.flatten() for one in held])
        assert [last[f"{kind}_min/1"], last[f"{kind}_max/1"]] == [float(flat.min()), float(flat.max())]
    change = torch.cat([((p - old).abs() / old.abs()).flatten() for p, old in zip(model[0].parameters(), before[:2], strict=True)])
    for edge in (1e-5, 1e-3, 1e-1):
        assert last[f"update_within_{edge:.0e}/0"] == pytest.approx(float((change.detach() <= edge).double().mean()), abs=1e-6)


def test_moments_output_gradients_and_collectives_are_those_of_their_definitions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, seen = torch.nn.Sequential(torch.nn.Linear(4, 3)), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        monitor = trueup.monitor(
            model, optimizer, tmp_path / "m", every=1, alerts=False, also=("moments", "output-gradients", "collectives")
        )
        out = model(torch.randn(5, 4))
        out.register_hook(seen.append)
        out.square().sum().backward()
        sent = [torch.ones(3), torch.full((4,), 2.0)]
        for one in sent:
            torch.distributed.all_reduce(one)
        optimizer.step()
        monitor.close()
    finally:
        torch.distributed.destroy_process_group()
    read = SeriesReader(tmp_path / "m")
    last = {name: read.column(0, name)[-1] for name in read.names(0)}
    held, (gradient,) = out.detach().double(), seen
    rest = held - held.mean()
    assert last["activation_mean/0"] == pytest.approx(float(held.mean()), abs=1e-6)
    assert last["activation_kurtosis/0"] == pytest.approx(float((rest**4).mean() / (rest**2).mean() ** 2), rel=1e-5)
    assert last["activation_not_finite/0"] == 0
    assert last["output_gradient_rms/0"] == pytest.approx(float(gradient.norm() / math.sqrt(15)), rel=1e-5)
    assert (last["collective_calls/all_reduce"], last["collective_elements/all_reduce"]) == (2, 7)
    assert last["collective_norm/all_reduce"] == pytest.approx(math.sqrt(3 + 16))
    assert not hasattr(torch.distributed.all_reduce, "func")  # the original is back


class Checkpointed(torch.nn.Module):
    """Keywords in, a reentrant checkpoint around a layer: as a model of transformers runs."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.emb, self.norm, self.fc = torch.nn.Embedding(WORDS, SIZE), torch.nn.LayerNorm(SIZE), torch.nn.Linear(SIZE, SIZE)

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, self.fc(self.norm(x)), x)

    def forward(self, *, words: torch.Tensor) -> torch.Tensor:
        x = self.emb(words)
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True) if self.checkpoints else self.layer(x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_changes_no_series(tmp_path: Path) -> None:
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(checkpoints)
        norms = [p for name, p in model.named_parameters() if "norm" in name]
        rest = [p for name, p in model.named_parameters() if "norm" not in name]
        optimizer = torch.optim.SGD([{"params": rest}, {"params": norms}], 0.1, momentum=0.9)
        with trueup.monitor(optimizer=optimizer, directory=tmp_path / f"{checkpoints}", every=1, alerts=False):
            for _ in range(2):
                words = torch.arange(2 * 3 * 5).reshape(6, 5) % WORDS
                model(words=words).square().sum().backward()
                with torch.no_grad():
                    model(words=words * 0)  # an evaluation
                optimizer.step()
                optimizer.zero_grad()
        read = SeriesReader(tmp_path / f"{checkpoints}")
        found.append({name: read.column(0, name).tolist() for name in read.names(0)})
    np.testing.assert_equal(found[1], found[0])
    assert found[0]["tokens"] == [30, 30]  # of the first call, too, which brings its words as a keyword
    assert {"activation_rms/fc", "activation_rms/norm"} <= set(found[0])
    layers = [name for name in found[0] if name.startswith("gradient_norm/")]
    assert layers == ["gradient_norm/emb", "gradient_norm/norm", "gradient_norm/fc"]  # in the model's order, not in that of groups


def test_layers_that_compute_in_another_dtype_are_said(tmp_path: Path) -> None:
    for name, enabled in (("a", False), ("b", True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            train(tmp_path / name, 2)
    said = "the candidate computes in bfloat16: 6 of 9 layers, float32 in the baseline; the first is block.qkv"
    assert said in compare_series(tmp_path / "a", tmp_path / "b").notes
    assert not any("computes in" in note for note in compare_series(tmp_path / "b", tmp_path / "b").notes)


def test_a_skipped_step_is_a_step(tmp_path: Path) -> None:
    run = train(tmp_path / "m", scaled=True, spoil=2)
    read = SeriesReader(tmp_path / "m")
    assert read.column(0, "skipped").tolist() == [0, 0, 1, 0, 0, 0]
    assert read.column(0, "loss").tolist() == run["losses"]
    assert not np.isfinite(read.column(0, "gradient_norm/head")[2])
    assert read.column(0, "loss_scale")[0] == 8


def test_the_switch_and_resuming(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def step(monitor: object) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    first = trueup.monitor(model, optimizer, tmp_path / "m", alerts=False)
    for words in ([], ["off"], [], ["on"], ["every", "7"]):
        first.obey(words)
        step(first)
    assert first.wanted.every == 7
    first.close()
    assert SeriesReader(tmp_path / "m").steps(0).tolist() == [0, 3, 4]
    second = trueup.monitor(model, optimizer, tmp_path / "m", alerts=False)
    assert second.step == 5  # as Adam's state says
    step(second)
    second.close()
    again = trueup.monitor(model, optimizer, tmp_path / "m", alerts=False, step=4)  # from an older checkpoint
    step(again)
    again.close()
    read = SeriesReader(tmp_path / "m")
    assert read.steps(0).tolist() == [0, 3, 4, 5]
    assert len(list((tmp_path / "m/rank-00000").glob("series-*.parquet"))) == 3


def test_a_step_is_captured_at_full_detail(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = trueup.monitor(model, optimizer, tmp_path / "m", alerts=False)
    for step in range(4):
        if step == 1:
            monitor.obey(["capture"])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    assert SeriesReader(tmp_path / "m").steps(0).tolist() == [0, 2, 3]
    held = trueup.open_capture(tmp_path / "m/captures/step-000001")
    assert "0" in held.records(["scope"])["scope"].to_pylist()
    assert held.root["detail"] == "tensor"


def test_what_fails_is_said_and_the_training_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = trueup.monitor(model, optimizer, tmp_path / "m", alerts=False)
    monitor._writer.append = lambda *_: (_ for _ in ()).throw(OSError("the disk is full"))  # type: ignore[union-attr, method-assign]
    before = model.weight.detach().clone()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    monitor.close()
    assert not torch.equal(before, model.weight)
    assert capfd.readouterr().err.count("the disk is full (in writing to") == 1
    assert SeriesReader(tmp_path / "m").problems == [
        "rank 0 stopped recording before the run ended (status 'stopped'): what ran later is missing"
    ]
