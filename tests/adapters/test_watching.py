"""Watching names the bad call, executes it again with the same result, changes nothing, and writes nothing while all is well."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trueup
from adapters import subjects, watched
from adapters.test_observer import content, random_states
from adapters.watched import BAD_STEP, PLANTED, Loop
from trueup import simdev
from trueup.analysis.watch import watcher
from trueup.analysis.watch.saving import Hit
from trueup.analysis.watch.watcher import Found
from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture
from trueup.recording.recorder import recorder
from trueup.recording.recorder.recorder import Keeper
from trueup.recording.recorder.rows import FIELDS, Rows

STEPS = 3
DONE_AGAIN = "executed again with the same result"


# ---------------------------------------------------------------- observe, never change
def trained(name: str, device: str, directory: Path | None) -> tuple[dict[str, Any], list[Hit]]:
    """Train a subject and return all that must not depend on the watch, and the hits."""
    training = subjects.build(name, device)
    trueup.seed_all(1)
    hits: list[Hit] = []
    if directory is None:
        losses = [training.step() for _ in range(STEPS)]
    else:
        with trueup.watch(training.model, directory) as watch:
            losses = [training.step() for _ in range(STEPS)]
        hits = watch.hits
        assert watch._session.failure.text is None
    state = training.model.state_dict(keep_vars=True)
    return random_states() | {
        "losses": [content(loss) for loss in losses],
        "state": {key: content(tensor) for key, tensor in state.items()},
        "gradients": {key: None if p.grad is None else content(p.grad) for key, p in training.model.named_parameters()},
        "optimizer": [
            content(value) for part in training.optimizer.state.values() for value in part.values() if torch.is_tensor(value)
        ],
    }, hits


@functools.cache
def unwatched(name: str, device: str) -> dict[str, Any]:
    return trained(name, device, None)[0]


def changed(name: str, device: str, observed: dict[str, Any]) -> list[str]:
    expected = unwatched(name, device)
    return [key for key in expected if observed[key] != expected[key]]


@pytest.mark.parametrize("name", subjects.SUBJECTS)
def test_a_watch_changes_nothing_and_writes_nothing(name: str, device: str, path: Path) -> None:
    observed, hits = trained(name, device, path)
    assert (changed(name, device, observed), hits, path.exists()) == ([], [], False)


def some_of_each(rows: Rows, *_: Any, **__: Any) -> list[Found]:
    """Blame calls that are healthy, forward, recomputed and backward, first and last ones."""
    calls = list({call.seq: call for call in rows[1::FIELDS]}.values())
    left_out = ("torch.Tensor.backward", "torch.rand")
    forward = [call for call in calls if call.phase == "forward" and not call.op.startswith(left_out)]
    backward = [call for call in calls if call.phase in ("backward", "recompute")]
    chosen = [forward[len(forward) // 2], forward[-1], backward[len(backward) // 2], backward[-1]]
    return [Found("nan", call, "planted", True) for call in chosen]


@pytest.fixture
def blamed_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Keeper.counts
    monkeypatch.setattr(Keeper, "counts", lambda self, rows: np.ones_like(original(self, rows)))
    monkeypatch.setattr(watcher, "found_in", some_of_each)
    monkeypatch.setattr(watcher, "ALIKE", STEPS)


@pytest.mark.usefixtures("blamed_in_each_step")
@pytest.mark.parametrize(("name", "device"), [(name, ("cpu", "npu")[k % 2]) for k, name in enumerate(subjects.SUBJECTS)])
def test_hits_change_nothing_and_are_reproduced(name: str, device: str, path: Path) -> None:
    observed, hits = trained(name, device, path)
    assert changed(name, device, observed) == []
    assert {hit.step for hit in hits} == set(range(STEPS))
    first = {hit.step: hit.tensors for hit in reversed(hits)}  # later ones are of a look after the optimizer
    assert [said for said in first.values() if not said.startswith(DONE_AGAIN) or "ended early" in said or "not met" in said] == []


# ---------------------------------------------------------------- what is found
def watch(loop: Loop, path: Path, bad: str, steps: int = BAD_STEP + 1, **options: Any) -> list[Hit]:
    with trueup.watch(loop.model, path, **options) as running:
        for step in range(steps):
            loop(bad if step == BAD_STEP else "")
    assert running._session.failure.text is None
    return running.hits


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("bad", PLANTED)
def test_the_bad_call_is_named_and_its_tensors_are_saved(bad: str, micro: int, path: Path) -> None:
    scope, op, phase, kind = PLANTED[bad]
    (hit,) = watch(watched.build(micro=micro), path, bad)
    name = f"{scope}/{op}" if scope else op
    assert (hit.step, hit.name, hit.kind) == (BAD_STEP, f"{name}, {phase}", kind)
    assert hit.source is not None
    assert "watched.py" in hit.source
    assert hit.tensors.startswith(DONE_AGAIN)
    capture = open_capture(Path(hit.path or ""))
    assert capture.problems == []
    rows = [row for row in capture.records(step=BAD_STEP, phase=phase, op=op).to_pylist() if row["numel"]]
    assert rows
    last = max(row["seq"] for row in rows if row["payload_key"])
    assert all(row["payload_key"] for row in rows if row["seq"] == last)
    assert all(torch.isfinite(torch.tensor(row["l2"])) for row in rows if row["slot"].startswith("input.1"))


def test_what_is_bad_afterwards_is_counted_and_not_saved_again(path: Path) -> None:
    hits = watch(watched.build(), path, "forward", steps=BAD_STEP + 4)
    assert [hit.kind for hit in hits] == ["overflow", "follows", "follows", "follows"]
    assert [hit.path is not None for hit in hits] == [True, False, False, False]


def test_an_optimizer_that_leaps_is_blamed_for_the_overflow_after_it(path: Path) -> None:
    loop = watched.build()
    with trueup.watch(loop.model, path) as running:
        for bad in ("", "update", ""):
            loop(bad)
    assert [hit.kind for hit in running.hits][:1] == ["parameters"]


def test_a_device_that_saturates(path: Path) -> None:
    loop = watched.build("npu")
    loop.model.half()
    del loop
    x = torch.full((4, 40_000), 3.0, dtype=torch.float16, device="npu")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    simdev.inject("sum-saturates-65504")
    with trueup.watch(model, path) as running:
        total = x.sum(1)
        model(total.float().cpu()[None] * 1e-5).sum().backward()
        optimizer.step()
    assert [(hit.kind, hit.name) for hit in running.hits][:1] == [("saturated", "torch.Tensor.sum, forward")]


class Attention(nn.Module):
    """A causal mask of minus infinity, softmax, max-pool with its padding: infinities that are meant."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        scores = h @ h.transpose(-1, -2)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        h = scores.masked_fill(mask, float("-inf")).softmax(-1) @ h
        return self.outlet(torch.nn.functional.max_pool1d(h.transpose(1, 2), 3, 1, 1).mean(-1))


def test_masks_are_silent_and_judged_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []
    original = watcher.found_in
    monkeypatch.setattr(watcher, "found_in", lambda *a, **k: (judged.append(1), original(*a, **k))[1])
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trueup.watch(model, path) as running:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(2, 5, 8)).square().mean().backward()
            optimizer.step()
    assert (running.hits, path.exists(), len(judged)) == ([], False, 1)


# ---------------------------------------------------------------- what cannot be done is said
def test_inputs_changed_in_place_are_not_given_again(path: Path) -> None:
    loop = watched.build()
    batch = torch.randn(6, 8)
    with trueup.watch(loop.model, path) as running:
        loop.model.bad = "forward"
        with torch.no_grad():
            loop.model(batch)
        batch.zero_()
        loop.optimizer.step()
    assert "a tensor that it was given was changed in place since" in running.hits[0].tensors


def test_a_result_that_does_not_come_again_is_said(path: Path) -> None:
    noise = np.random.default_rng(0)

    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(super().forward(x) * 1e4 + noise.random())

    model = Noisy(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trueup.watch(model, path) as running:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert "NOT the same" in running.hits[0].tensors
    assert (path / "step-000000.again").exists()


def test_parameters_that_changed_are_not_used(path: Path) -> None:
    """An optimizer in the backward: the hit is seen when they are others already."""
    model = nn.Linear(4, 4)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with trueup.watch(model, path) as running:
        torch.exp(model(torch.ones(2, 4)) * 1e4).sum().backward()
    assert "the optimizer had changed its parameters" in running.hits[0].tensors


# ---------------------------------------------------------------- stopping, budgets, memory
def test_the_run_stops_after_the_hits_that_were_asked_for(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = watched.build()
    with pytest.raises(trueup.WatchStopped) as stopped:
        watch(loop, path, "forward", steps=6, stop_after=1)
    assert stopped.value.code == 3
    assert f"everything is in {path}, the last hit in {path}/step-000002 (exit code 3)" in capsys.readouterr().err
    assert loop.model.calls == BAD_STEP + 1
    assert all(torch.isfinite(p).all() for p in loop.model.parameters())  # stopped before the optimizer's step


def test_a_budget_that_is_spent_saves_no_more(path: Path) -> None:
    loop, constructor = watched.build(), Namespace.__init__
    with trueup.watch(loop.model, path, budget="1KB") as running:
        for bad in ("data", "", "", "loss"):
            loop(bad)
            with torch.no_grad():
                loop.model.norm.reset_running_stats()
                for p in loop.model.parameters():
                    p.nan_to_num_(0.0)
    assert [hit.path is not None for hit in running.hits] == [True, False]
    assert "the budget of 0 MB is spent" in running.hits[1].tensors
    assert Namespace.__init__ is constructor  # executing a call again leaves nothing of ours


def test_memory_is_bounded_in_a_step_without_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_ROWS", 1000)
    model = nn.Linear(4, 4)
    with trueup.watch(model, path) as running, torch.no_grad():
        for k in range(2000):
            model(torch.full((1, 4), float("nan") if k == 100 else 1.0))
        keeper = running._session.keeper
        assert len(keeper.rows()) // FIELDS <= 1500
        assert keeper.dropped > 4000
    assert len(running.hits) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_after": 0}, "stop_after 0 is unknown"),
        ({"frames": -1}, "frames -1 is too small"),
        ({"budget": "x"}, "budget 'x' cannot"),
    ],
)
def test_options_that_mean_nothing(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrueupError, match=message):
        trueup.watch(None, path, **options)


# ---------------------------------------------------------------- loss scaling
def test_a_step_that_the_scaler_skips_is_no_hit(path: Path) -> None:
    loop = watched.build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=100)
    with trueup.watch(loop.model, path) as running:
        for step in range(6):
            loop.optimizer.zero_grad()
            loss = loop.model(torch.randn(6, 8)).square().mean()
            if step == 2:
                loss = loss * torch.tensor(3e38)
            scaler.scale(loss).backward()
            scaler.step(loop.optimizer)
            scaler.update()
    watcher = running._session.watcher
    assert (running.hits, watcher.transients) == ([], 1)
    assert watcher.scale.changes == [(0, 2.0**40, False), (2, 2.0**40, True), (3, 2.0**39, False)]
    assert watcher.scale.sentence().endswith("1 of 6 steps skipped")


def test_a_scale_that_falls_to_one_is_a_hit_with_the_call_that_overflows(path: Path) -> None:
    loop = watched.build()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with trueup.watch(loop.model, path) as running:
        for step in range(5):
            loop.optimizer.zero_grad()
            loop.model.bad = "backward" if step else ""
            scaler.scale(loop.model(torch.randn(6, 8)).square().mean()).backward()
            scaler.step(loop.optimizer)
            scaler.update()
    assert [(hit.step, hit.kind) for hit in running.hits] == [(3, "loss_scale"), (4, "loss_scale")]
    assert "what overflowed: torch.sqrt, backward, step 3" in running.hits[0].said
    assert running.hits[0].tensors.startswith(DONE_AGAIN)
    assert running._session.watcher.transients == 2


# ---------------------------------------------------------------- no wait inside a step
def test_a_step_waits_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One transfer a look with something to look at: before the optimizer's step, and when the step has ended."""
    from trueup.recording.adapters.torch import buffers

    monkeypatch.delitem(buffers.KERNELS, "npu")
    ring = buffers.on_device(torch.ones(3, device="npu"), "stats").values.ring
    training = subjects.build("in-place", "npu")
    training.step()
    with trueup.watch(training.model, path, phase=["forward", "backward"]):
        before = ring.fetches
        for _ in range(4):
            training.step()
        assert ring.fetches - before <= 2 * 4
    assert not path.exists()
