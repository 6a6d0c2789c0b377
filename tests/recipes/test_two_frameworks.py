"""`trueup align --recipe` end to end: PyTorch and Paddle train in processes of their own, and a wrong operator is placed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nursery import nursery

pytestmark = pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="paddlepaddle is not installed")

TORCH = """
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(nn.functional.gelu(self.stem(x)))

numbers, net = np.random.RandomState(0), Net()
with torch.no_grad():
    for one in (net.stem, net.head):
        one.weight.copy_(torch.from_numpy(0.3 * numbers.randn(*one.weight.T.shape).T.astype("float32")))
        one.bias.zero_()
updates = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    net(torch.from_numpy(numbers.randn(4, 8).astype("float32"))).square().mean().backward()
    updates.step()
    updates.zero_grad()
"""
PADDLE = """
import sys
import numpy as np
import paddle
from paddle import nn

between = nn.functional.silu if "--wrong" in sys.argv else nn.functional.gelu

class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(between(self.stem(x)))

numbers, net = np.random.RandomState(0), Net()
for one in (net.stem, net.head):
    one.weight.set_value((0.3 * numbers.randn(*one.weight.shape)).astype("float32"))
    one.bias.set_value(np.zeros(one.bias.shape, "float32"))
updates = paddle.optimizer.SGD(0.1, net.parameters())
for _ in range(2):
    net(paddle.to_tensor(numbers.randn(4, 8).astype("float32"))).square().mean().backward()
    updates.step()
    updates.clear_grad()
"""


@pytest.fixture
def python() -> Iterator[str]:
    """What runs either side, and the command around it, with its framework in it already."""
    with nursery() as started:
        started.load("paddle")
        yield started.python


def trueup(python: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
    command = [python, "-m", "trueup", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_wrong_operator_between_two_modules_is_placed(python: str, tmp_path: Path) -> None:
    """The captures hold modules alone, so both commands are run again until the same call is named twice."""
    (tmp_path / "torch_side.py").write_text(TORCH, encoding="utf-8")
    (tmp_path / "paddle_side.py").write_text(PADDLE, encoding="utf-8")
    commands = [python, "torch_side.py"], [python, "paddle_side.py", "--wrong"]
    for side, command in zip(("base", "cand"), commands, strict=True):
        made = trueup(python, tmp_path, "capture", "-o", side, "--level", "module", "--", *command)
        assert made.returncode == 0, made.stderr
    again = ["--base-command", " ".join(commands[0]), "--", *commands[1]]
    found = trueup(python, tmp_path, "align", "base", "cand", "--recipe", "paddle", *again)
    assert found.returncode == 1, found.stderr
    said = [line.rstrip() for line in found.stdout.splitlines()]
    assert "forward        DEVIATES     between stem and head: silu, tensor 16 % off" in said
    assert "DEVIATES by recipe paddle, at: forward; it starts at paddle._C_ops.silu, forward, step 0, rank 0" in said
    rungs = [line.split()[:2] for line in said if line.startswith(("  stem", "  silu"))]
    assert rungs == [["stem", "pass"], ["silu", "DEVIATES"]]
    assert "verified: named by 2 of 2 pairs of runs" in found.stdout
