"""`trueup heal`: a gradient that overflows, healed by the modules whose tensors it is a gradient of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import trueup
from trueup.analysis.remedy.healing import Healed, heal
from trueup.foundation.model import TrueupError
from trueup.recording.recorder import launch

pytestmark = pytest.mark.usefixtures("warm")

TRAIN = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
with torch.no_grad():
    net[1].weight.mul_(300)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
for _ in range(2):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        y = net(torch.randn(4, 8))
    (y.float().sum() * 3000).backward()
    optimizer.step()
"""


def recorded_and_healed(script: str, root: Path) -> Healed:
    """Record a training and heal it."""
    return heal(root / "run", recorded(script, root))


def recorded(script: str, root: Path) -> list[str]:
    (root / "train.py").write_text(script, encoding="utf-8")
    command = [sys.executable, str(root / "train.py")]
    assert launch.run({"directory": str(root / "run")}, command) == 0
    return command


def test_the_backward_of_a_product_under_autocast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Healed by a search that is interrupted in its second run, and goes on there."""
    command, run = recorded(TRAIN, tmp_path), launch.run
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(launch, "run", lambda order, words: 130 if order["directory"].endswith("run-2") else run(order, words))
        heal(tmp_path / "run", command)
    kept = (tmp_path / "run-healed/run-1/manifest.json").stat().st_mtime_ns
    capsys.readouterr()
    healed = heal(tmp_path / "run", command)
    assert (tmp_path / "run-healed/run-1/manifest.json").stat().st_mtime_ns == kept
    assert "run-healed, where 1 run ended before the interruption; remove it if the training was changed" in capsys.readouterr().err
    with pytest.raises(TrueupError, match="is not empty"):  # there is an answer
        heal(tmp_path / "run", command)
    first = trueup.overflow(tmp_path / "run").anomalies[0]
    assert first.place.phase == "backward"
    assert healed.verdict == "healed"
    assert healed.policy is not None
    assert "none of them can be left out" in healed.sentence
    policy = healed.policy.read_text(encoding="utf-8")
    assert [line for line in policy.splitlines() if line.startswith("scope")] == [f'scope = "{k}"' for k in (2, 1, 0)]


FUNCTIONS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.scale = nn.Embedding(9, 8), nn.Parameter(torch.full((4, 8), 300.0))

    def forward(self, x):
        return F.linear(self.enc(x), self.scale)

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
for _ in range(2):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        y = net(torch.arange(4))
    (y.float().sum() * 3000).backward()
    optimizer.step()
"""


def test_the_backward_of_a_function_outside_modules(tmp_path: Path) -> None:
    healed = recorded_and_healed(FUNCTIONS, tmp_path)
    assert healed.verdict == "healed", healed.sentence
    assert healed.policy is not None
    policy = healed.policy.read_text(encoding="utf-8")
    assert policy == '[[rule]]\nscope = ""\nop = "torch.nn.functional.linear"\ndtype = "float32"\nreturns = "float32"\n'


SKIPS = """
import torch
from torch import nn

class Energy(nn.Module):
    def forward(self, x):
        x = x.half() * 1000
        return (x * x).float()

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), Energy(), nn.Linear(16, 3))
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = net(torch.randn(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_cast_in_the_code_of_a_module(tmp_path: Path) -> None:
    """A GradScaler skips every step of it, and no rule undoes the cast: both are said."""
    healed = recorded_and_healed(SKIPS, tmp_path)
    assert healed.verdict == "not healed", healed.sentence
    said = "its module runs in a wider dtype, and the code in it casts, which no rule undoes: change the cast, "
    assert healed.sentence.splitlines()[1].startswith(said)
    assert "train.py:8 in forward" in healed.sentence.splitlines()[1]


CASTS = """
import torch

torch.manual_seed(0)
inner, weight = (torch.nn.Parameter(torch.randn(8, 8) * k) for k in (1, 300))
with torch.autocast("cpu", torch.float16):
    h = torch.randn(4, 8) @ inner
    y = torch.nn.functional.linear(h.float().half(), weight)
(y.float().sum() * 3000).backward()
torch.optim.SGD([inner, weight], lr=1e-6).step()
"""


def test_a_cast_on_the_way_of_a_gradient(tmp_path: Path) -> None:
    healed = recorded_and_healed(CASTS, tmp_path)
    assert healed.verdict == "not healed", healed.sentence
    said = "the code casts the tensor whose gradient it is, which no rule undoes: change the cast, "
    assert healed.sentence.splitlines()[1].startswith(said), healed.sentence
    assert "train.py:8" in healed.sentence.splitlines()[1]
    assert not any("converts a tensor" in use for use in healed.uses)
