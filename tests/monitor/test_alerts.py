"""Alerts: none in healthy noise, and each planted fault within its delay, the earliest layer named first."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import trueup
from trueup.analysis.monitor.alerts import WINDOW, Alert, Alerts
from trueup.recording.engine.monitoring import Block

LAYERS = 6
GRADIENTS = tuple(f"gradient_norm/l{k}" for k in range(LAYERS))
UPDATES = tuple(f"update_ratio/l{k}" for k in range(LAYERS))
OUTPUTS = tuple(f"activation_{kind}/l{k}" for k in range(LAYERS) for kind in ("rms", "zeros"))
LOSS, TOTAL, ROUTER, SKIPPED = ("loss",), ("gradient_norm",), ("router_load/l3",), ("skipped",)
Spoil = Callable[[int, dict[str, np.ndarray]], None]


def run(spoil: Spoil = lambda *_: None, steps: int = 400, seed: int = 0) -> list[Alert]:
    random, alerts, found = np.random.default_rng(seed), Alerts(None, 0, 1), []
    for step in range(steps):
        trend = -0.5 * math.log1p(step / 100)
        held = {
            "gradients": np.exp(0.15 * random.standard_normal(LAYERS) + trend),
            "loss": np.array([2 + math.exp(trend) + 0.03 * random.standard_normal()]),
            "updates": np.exp(0.1 * random.standard_normal(LAYERS)) * 1e-3,
            "outputs": np.stack([np.exp(0.05 * random.standard_normal(LAYERS)), np.full(LAYERS, 0.5)], 1).ravel(),
            "router": np.exp(0.05 * random.standard_normal(1)) * 1.3,
        }
        spoil(step, held)
        total = np.sqrt(np.sum(held["gradients"] ** 2, keepdims=True))
        blocks: list[Block] = [
            (LOSS, held["loss"]), (OUTPUTS, held["outputs"]), (TOTAL, total), (GRADIENTS, held["gradients"]),
            (UPDATES, held["updates"]), (ROUTER, held["router"]), (SKIPPED, held.get("skipped", np.zeros(1))),
        ]  # fmt: skip
        found += alerts.take(step, blocks)
    return found


AT = 300


def scaled(what: str, place: int, factor: Callable[[int], float]) -> Spoil:
    def spoil(step: int, held: dict[str, np.ndarray]) -> None:
        if step >= AT:
            held[what][place] *= factor(step - AT)

    return spoil


def once(factor: float) -> Callable[[int], float]:
    return lambda after: factor if after == 0 else 1.0


FAULTS: dict[str, tuple[Spoil, str, str, int]] = {
    # fault: what it does, rule, series, steps until it is known at most
    "a spike of the loss": (scaled("loss", 0, once(2.5)), "spike", "loss", 0),
    "a spike of one gradient": (scaled("gradients", 2, once(8)), "spike", "gradient_norm/l2", 0),
    "a gradient that drifts up by 2 % a step": (scaled("gradients", 4, lambda n: 1.02**n), "drift", "gradient_norm/l4", 60),
    "a loss that drifts up by 1 % a step": (scaled("loss", 0, lambda n: 1.01**n), "spike or drift", "loss", 80),
    "an exploding router": (scaled("router", 0, lambda n: 1.03**n), "spike or drift", "router_load/l3", 40),
    "a dead layer": (
        lambda step, held: held["outputs"].__setitem__(5, 1.0) if step >= AT else None, "dead", "activation_zeros/l2", 2
    ),
    "a frozen layer": (scaled("updates", 1, lambda n: 0.0), "frozen", "update_ratio/l1", 2),
    "a gradient that vanishes": (scaled("gradients", 3, lambda n: 1e-9), "vanishing", "gradient_norm/l3", 2),
    "a flipped bit of an exponent": (scaled("outputs", 6, once(2.0**16)), "spike", "activation_rms/l3", 0),
    "a NaN": (scaled("gradients", 5, once(math.nan)), "not finite", "gradient_norm/l5", 0),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault: str) -> None:
    spoil, rule, series, delay = FAULTS[fault]
    found = run(spoil)
    assert found, "no alert"
    first = found[0]
    assert AT <= first.step <= AT + delay, first
    assert first.rule in rule.split(" or ")
    assert series in (first.series, *first.others)


def test_healthy_noise_gives_none() -> None:
    assert run(steps=800, seed=1) == []


def test_steps_that_only_add_up_gradients_freeze_nothing() -> None:
    def accumulate(step: int, held: dict[str, np.ndarray]) -> None:
        held["skipped"] = np.array([float(step % 4 < 3)])
        held["updates"] *= step % 4 == 3

    def freeze(step: int, held: dict[str, np.ndarray]) -> None:
        accumulate(step, held)
        held["updates"][2] *= step < AT

    assert run(accumulate, steps=900) == []
    assert [(one.rule, one.series, one.step) for one in run(freeze)] == [("frozen", "update_ratio/l2", AT + 11)]


def test_the_earliest_layer_is_named_first() -> None:
    def spoil(step: int, held: dict[str, np.ndarray]) -> None:
        if step == AT:
            held["gradients"][[5, 1, 3]] *= 20
            held["loss"] *= 5

    (found, *_) = run(spoil)
    assert found.series == "gradient_norm/l1"
    assert found.others[:3] == ("gradient_norm/l3", "gradient_norm/l5", "loss")
    assert found.said.startswith("step 300, rank 0: gradient_norm of l1 spikes to ")
    assert "series after it" in found.said


def test_ranks_that_part(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        (tmp_path / f"rank-{rank:05d}").mkdir()
        ranks.append(Alerts(tmp_path, rank, 2))
    names, found = ("digest/a", "digest/b", "digest/shard"), []
    for step in range(6):
        for rank, alerts in enumerate(ranks):
            values = np.array([step, 7.0 + (rank if step >= 3 else 0), rank])
            found += alerts.take(step * 100, [(names, values)])
    assert [(one.step, one.rank, one.rule, one.series) for one in found] == [(400, 1, "desync", "digest/b")]
    assert found[0].said == "step 400, rank 1: the parameter b is no longer the same on ranks 0 and 1"


def test_actions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    told = tmp_path / "told.json"
    monitor = trueup.monitor(
        model, optimizer, tmp_path / "m", on_alert=("stop", "capture"), command=f"tee {told}",
    )  # fmt: skip
    with pytest.raises(trueup.WatchStopped) as stopped:
        for step in range(WINDOW + 20):
            loss = model(torch.randn(16, 4)).square().mean() * (1e3 if step == WINDOW + 9 else 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    assert stopped.value.code == 3
    (alert,) = monitor.alerts
    assert (alert.rule, alert.step) == ("spike", WINDOW + 9)
    (line,) = (tmp_path / "m/rank-00000/alerts.jsonl").read_text().splitlines()
    assert json.loads(line)["said"] == alert.said
    said = capfd.readouterr().err
    assert f"trueup: {alert.said}" in said
    assert "the run was stopped by an alert, as asked" in said
    until = time.monotonic() + 60
    while not (told.exists() and told.stat().st_size) and time.monotonic() < until:
        time.sleep(0.01)  # the command runs beside the training
    assert json.loads(told.read_text())["directory"] == str(tmp_path / "m")
