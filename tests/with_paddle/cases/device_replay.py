"""Calls that the CPU recorded, executed on a second device (``tests/with_paddle/device``) that may compute one of them wrong."""

from __future__ import annotations

from pathlib import Path

import broken_host
import pytest
import replaying_models
from paddle import _C_ops

from trueup.analysis.rerun.replay import Settings, run
from trueup.analysis.rerun.reproduce import reproduce
from trueup.recording.engine.replacing import Sweep


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("recorded") / "ctc"
    replaying_models.capture("ctc", into)
    return into


def test_a_healthy_device_computes_as_well(recorded: Path) -> None:
    found = run(Settings(str(recorded), "host", dedup=True), processes=0)
    assert found.exit_code == 0
    assert set(found.counts) == {"accurate"}


def test_a_broken_kernel_of_it_is_blamed_and_nothing_else(recorded: Path) -> None:
    sweep = Sweep([(_C_ops.hardswish, broken_host._broken(_C_ops.hardswish))])
    sweep.install()
    try:
        found = run(Settings(str(recorded), "host", patterns=("backbone.*",)), processes=0)
    finally:
        sweep.remove()
    assert {o.kind for o in found.culprits} == {"paddle._C_ops.hardswish forward", "paddle._C_ops.hardswish backward"}
    assert found.sentence.startswith("host computes paddle._C_ops.hardswish")


def test_a_call_becomes_a_test_that_fails_there(tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN_ON_HOST", "hardswish")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{replaying_models.SOURCE}")
    made = reproduce(
        recorded, "backbone.6/paddle._C_ops.hardswish#0", tmp_path / "test", phase="backward", device="host", imports="broken_host",
        minimise=True,
    )  # fmt: skip
    assert (made.fails, made.checked) == (True, True), made.notes
    assert made.sentence == "paddle._C_ops.hardswish, backward, gives a wrong grad_input.0 on host: relative error 1e-2."
    assert made.size < 1000
    assert "import trueup" not in made.test.read_text()


def test_where_it_is_right_that_is_said(tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{replaying_models.SOURCE}")
    made = reproduce(recorded, "backbone.0/paddle._C_ops.conv2d#0", tmp_path / "test", phase="forward", device="host", check=False)
    assert (made.fails, made.exit_code) == (False, 2)
    assert "by itself the call is right on host" in made.notes[0]
