"""`trueup capture --shadow` and `--inputs-from`, as a user runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import trueup
from launch.running import cli, trueup_run

TRAIN = """
import torch
from torch import nn
from trueup import simdev
simdev.install()
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 3)
    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])
net = Net().to("npu")
x, y = torch.randn(4, 5, 8).to("npu"), torch.randint(0, 3, (4,)).to("npu")
nn.functional.cross_entropy(net(x), y).backward()
"""


@pytest.fixture
def script(tmp_path: Path, warm: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_a_broken_device_is_found_without_a_baseline(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    command = "capture", "--shadow", "cpu:float64", "--shadow-exit", "-o", out, "--", sys.executable, script
    run = trueup_run(*command, TRUEUP_SIMDEV_FAULT="lstm-backward-cell-gate")
    assert run.returncode == 1, run.stderr
    assert "WRONG  first: lstm, backward, step 0, rank 0  (torch.lstm / aten::_thnn_fused_lstm_cell_backward_impl)" in run.stderr
    assert "your code:" in run.stderr
    assert "train.py:12 in forward" in run.stderr
    code, said, _ = cli(capsys, "shadow-report", out, "--json", out / "found.json")
    found = json.loads((out / "found.json").read_text())
    assert (found["schema"], found["exit_code"], found["culprits"][0]["scope"]) == ("trueup-shadow", 1, "lstm")
    assert code == 1
    assert "aten::_thnn_fused_lstm_cell_backward_impl" in said
    assert "largest error" in said
    code, said, _ = cli(capsys, "show", out, "--op", "_thnn_fused_lstm_cell_backward_impl")
    assert code == 0
    assert "lstm" in said


def test_exit_code_is_the_commands_own_unless_asked(script: Path, tmp_path: Path) -> None:
    script.write_text(TRAIN + "raise SystemExit(7)\n")
    run = trueup_run("capture", "--shadow", "cpu", "--shadow-exit", "-o", tmp_path / "run", "--", sys.executable, script)
    assert run.returncode == 7
    assert "NOTHING WRONG  judged" in run.stderr


def test_wrong_options_are_told_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    for options, said in [
        (("--shadow", "cpu:int8"), "is no reference"), (("--shadow", "cpu", "--shadow-time", "soon"), "is no limit"),
        (("--shadow", "cpu", "--compile", "through"), "leave out --compile=through"), (("--inputs-from", tmp_path), "capture"),
    ]:  # fmt: skip
        code, _, err = cli(capsys, "capture", *options, "-o", out, "--", "true")
        assert code == (2 if said == "capture" else 64), err
        assert said in err, err
        assert not out.exists()


def test_report_of_an_ordinary_capture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trueup.capture(tmp_path / "run"):
        torch.ones(2).exp()
    code, _, err = cli(capsys, "shadow-report", tmp_path / "run")
    assert code == 2
    assert "is no capture of a shadow run" in err
