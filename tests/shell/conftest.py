"""Two captures of a small network, one of them broken, with all that a call has; and a shell over them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import trueup
from trueup.doors.shell.prompt import execute
from trueup.doors.shell.session import Session
from trueup.foundation.model import TrueupError


def train(out: Path, detail: str, *, broken: bool, steps: int = 2) -> Path:
    """Record a training; broken, the gradient of the head's ReLU goes through where it must not, and half of its results turn."""
    import torch
    from torch import nn

    torch.set_num_threads(1)

    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad.roll(1, 1) if broken else grad * (x > 0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(Clipped.apply(self.encoder(x)))

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, foreach=False)
    with trueup.capture(out, model=model, level=("module", "api"), detail=detail, on_error="stop"):
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.arange(8) % 3).backward()
            optimizer.step()
    return out


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``base`` and ``cand`` of detail tensor, ``base-stats`` and ``cand-stats``."""
    folder = tmp_path_factory.mktemp("runs")
    for detail, tail in (("tensor", ""), ("stats", "-stats")):
        train(folder / f"base{tail}", detail, broken=False)
        train(folder / f"cand{tail}", detail, broken=True)
    return folder


@dataclass
class Shell:
    """Lines in, text and exit codes out."""

    session: Session
    file: io.StringIO

    def __call__(self, line: str) -> tuple[int, str]:
        self.file.seek(0)
        self.file.truncate()
        code = execute(self.session, line)
        return code, "\n".join(row.rstrip() for row in self.file.getvalue().splitlines())

    def fails(self, line: str) -> str:
        with pytest.raises(TrueupError) as caught:
            self(line)
        return str(caught.value)


MakeShell = Callable[..., Shell]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> MakeShell:
    """Make a shell over captures, 100 columns wide."""

    def make(baseline: Path, candidate: Path | None = None, width: int = 100) -> Shell:
        file = io.StringIO()
        return Shell(Session(baseline, candidate, Console(file=file, width=width, highlight=False)), file)

    return make


def seq_of(text: str, name: str) -> int:
    """Return the seq that `ls` shows of a call."""
    found = re.search(rf"^ *(\d+)  .*{re.escape(name)}", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])
