"""Calls that the CPU recorded, executed on a second device (``tests/with_paddle/device``) that may compute one of them wrong."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import broken_host
import pytest
import replaying_models
from paddle import _C_ops

from end_to_end.executing import lines_of
from test_documentation import ROOT
from trueup.analysis.rerun.replay import Settings, run
from trueup.analysis.rerun.reproduce import reproduce
from trueup.doors.cli import app
from trueup.recording.engine.replacing import Sweep

PAGE = ROOT / "docs/paddle.md"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("recorded") / "ctc"
    replaying_models.capture("ctc", into)
    return into


def given(line: str, recorded: Path) -> list[str]:
    """Return a command of the page as it is written there, but for the name of the device; the folder has its capture then."""
    Path("runs").mkdir()
    Path("runs/cpu").symlink_to(recorded)
    assert "--device npu" in line
    return shlex.split(line.replace("--device npu", "--device host"))


def test_a_healthy_device_computes_as_well(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.run([*given(lines_of(PAGE)[-2], recorded), "--json", "found.json"]) == 0
    assert set(json.loads(Path("found.json").read_text())["counts"]) == {"accurate"}


def test_a_broken_kernel_of_it_is_blamed_and_nothing_else(recorded: Path) -> None:
    sweep = Sweep([(_C_ops.hardswish, broken_host._broken(_C_ops.hardswish))])
    sweep.install()
    try:
        found = run(Settings(str(recorded), "host", patterns=("backbone.*",)), processes=0)
    finally:
        sweep.remove()
    assert {o.kind for o in found.culprits} == {"paddle._C_ops.hardswish forward", "paddle._C_ops.hardswish backward"}
    assert found.sentence.startswith("host computes paddle._C_ops.hardswish")


def test_a_call_becomes_a_test_that_fails_there(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the last command of docs/paddle.md; the project's settings make the device known that is broken here."""
    monkeypatch.chdir(tmp_path)
    reproduced = given(lines_of(PAGE)[-1], recorded)
    Path("pyproject.toml").write_text('[tool.trueup.reproduce]\nimport = "broken_host"\n')
    monkeypatch.setenv("BROKEN_ON_HOST", "hardswish")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{replaying_models.SOURCE}")
    assert app.run(reproduced) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("paddle._C_ops.hardswish, backward, gives a wrong grad_input.0 on host: relative error 1e-2. ")
    assert "checked: the test fails with --device host and passes with --device cpu" in said
    assert sum(file.stat().st_size for file in Path("repro").glob("*.safetensors")) < 1000
    assert "import trueup" not in Path("repro/test_hardswish_backward.py").read_text()


def test_where_it_is_right_that_is_said(tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{replaying_models.SOURCE}")
    made = reproduce(recorded, "backbone.0/paddle._C_ops.conv2d#0", tmp_path / "test", phase="forward", device="host", check=False)
    assert (made.fails, made.exit_code) == (False, 2)
    assert "by itself the call is right on host" in made.notes[0]
