"""Models and loops with one planted anomaly each, for the tests of watching: `train(PLANTED["exp"], steps=4)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
BAD_STEP = 2
BAD_BATCH = torch.zeros(6, 8)
BAD_BATCH[3, 2] = float("nan")


class Net(nn.Module):
    """Linear, batch norm, dropout, linear: buffers and random numbers, as a re-execution has to meet them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, 4)
        self.bad = ""
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.drop(self.norm(self.up(x)))
        if self.bad == "forward":
            h = torch.exp(h * 1e3)
        if self.bad == "backward":
            h = torch.sqrt(h * 0.0)  # its slope at zero is infinite
        return self.down(h)


@dataclass
class Loop:
    """One iteration a call; ``bad`` plants the anomaly in it."""

    model: Net
    optimizer: torch.optim.Optimizer
    device: str = "cpu"
    micro: int = 1

    def __call__(self, bad: str = "") -> Tensor:
        self.model.bad = bad
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for k in range(self.micro):
            x, y = torch.randn(6, 8, device=self.device), torch.arange(6) % 4
            logits = self.model(BAD_BATCH if bad == "data" and k == self.micro - 1 else x)
            loss = self.loss(logits, y.to(self.device), bad if k == self.micro - 1 else "") / self.micro
            loss.backward()
            total = total + loss.detach()
        if bad == "update":
            for group in self.optimizer.param_groups:
                group["lr"] = 1e30
        self.optimizer.step()
        return total

    @staticmethod
    def loss(logits: Tensor, y: Tensor, bad: str) -> Tensor:
        if bad == "loss":
            return -torch.log(F.softmax(logits * 0.0 - 1e4 * F.one_hot(y, 4), -1)).gather(1, y[:, None]).mean()
        if bad == "norm":
            return ((logits * 0.0) / (logits * 0.0).norm(dim=1, keepdim=True)).sum()
        return F.cross_entropy(logits, y)


def build(device: str = "cpu", micro: int = 1, make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> Loop:
    torch.manual_seed(0)
    model = Net().to(device)
    return Loop(model, make(model.parameters(), lr=1e-3), device, micro)


PLANTED = {
    "forward": ("", "torch.exp", "forward", "overflow"),
    "backward": ("", "torch.sqrt", "backward", "overflow"),
    "loss": ("", "torch.log", "forward", "overflow"),
    "norm": ("", "torch.Tensor.div", "forward", "nan"),
    "data": ("up", "torch.nn.functional.linear", "forward", "input"),
}
"""What is planted -> scope, operator, phase and kind of the first call that is to be named."""
