"""GradScaler: its scale and its skipped steps are recorded, and a skipped step ends a step like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import trueup
from adapters.loops import build
from adapters.test_optimizers import ITERATIONS, skip_where_impossible

STEP, UPDATE = "torch.amp.GradScaler.step", "torch.amp.GradScaler.update"
SCALES = [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
"""Doubled after two good iterations, halved by the third, which overflows."""


OPTIONS = ({}, {"level": "module"}, {"include": "nothing"}, {"detail": "tensor"}, {"phase": "forward"})


@pytest.mark.parametrize(
    ("name", "options"),
    [*(("scaled fp16", options) for options in OPTIONS), ("scaled bf16", {}), ("scaled fused", {}), ("scaled fused", OPTIONS[2])],
)
def test_scale_is_recorded_each_step(name: str, options: dict, device: str, path: Path, rows) -> None:
    skip_where_impossible(name, device)
    loop = build(name, device)
    with trueup.capture(path, model=loop.models, on_error="stop", **options):
        for _ in range(ITERATIONS):
            loop.iterate()
    scales = [(row["step"], row["max"]) for row in rows(op=STEP) if row["slot"] == "input.scale"]
    assert scales == list(enumerate(SCALES[:-1]))
    found = [row["max"] for row in rows(op=STEP) if row["slot"] == "input.found_inf.0"]
    assert found == [0, 0, 1, 0, 0]
    said = [json.loads(row["value"]) for row in rows(op=STEP) if row["slot"] == "arguments"]
    assert [(one["scale"], one["skipped"]) for one in said] == [(s, k == 2) for k, s in enumerate(SCALES[:-1])]
    updates = [(row["step"], row["max"]) for row in rows(op=UPDATE) if row["slot"] == "output.scale"]
    assert updates == list(enumerate(SCALES[1:]))
    assert {row["phase"] for row in rows(op=STEP)} == {"optimizer"}


def test_digests_leave_the_scale_in_the_arguments(path: Path, rows) -> None:
    loop = build("scaled fp16", "cpu")
    with trueup.capture(path, model=loop.models, detail="digest", on_error="stop"):
        loop.iterate()
    assert [json.loads(row["value"])["scale"] for row in rows(op=STEP) if row["slot"] == "arguments"] == [1024.0]


def test_unscaling_is_of_phase_optimizer(device: str, path: Path, calls) -> None:
    loop = build("scaled fp16", device)
    with trueup.capture(path, model=loop.models, on_error="stop"):
        loop.iterate()
    assert {row["phase"] for row in calls(op="aten::_amp_foreach_non_finite_check_and_unscale_")} == {"optimizer"}
    assert {row["phase"] for row in calls(op="aten::_amp_update_scale_")} == {"optimizer"}


def test_what_unscaling_writes_is_recorded_of_functions_too(path: Path, rows) -> None:
    """It does not count in the versions of what it writes."""
    model = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), torch.amp.GradScaler("cpu", init_scale=8.0)
    with trueup.capture(path, model=model, level="api", on_error="stop"):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    found = {row["slot"]: row for row in rows(op="torch._amp_foreach_non_finite_check_and_unscale_")}
    assert {"output.written.0.0", "output.written.0.1", "output.written.1"} == {slot for slot in found if "written" in slot}
    assert found["output.written.0.0"]["l2"] == found["input.0.0"]["l2"] / 8
    read = next(row for row in rows(op="torch.Tensor.add_") if row["slot"] == "input.1")
    assert (read["l2"], read["producer_seq"]) == (found["output.written.0.0"]["l2"], found["input.0.0"]["seq"])


def test_scaler_that_is_off_is_no_call(path: Path, calls) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    with trueup.capture(path, model=model, on_error="stop"):
        for _ in range(2):
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert {row["step"] for row in calls()} == {0, 1}
    assert not calls(op=STEP)


def test_scaler_is_put_back(path: Path) -> None:
    before = torch.amp.GradScaler.step, torch.amp.GradScaler.update
    with trueup.capture(path):
        torch.ones(1).add(1)
        assert torch.amp.GradScaler.step is not before[0]
    assert (torch.amp.GradScaler.step, torch.amp.GradScaler.update) == before
