"""Small trainings that are recorded with all that a replay needs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import trueup
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls


class Block(nn.Module):
    """A block with what a replay has to get right: views, in-place, dropout, norms, autocast, buffers, lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 24), nn.Linear(24, 12)
        self.norm, self.batch = nn.LayerNorm(12), nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute ``(8, 12)`` of ``(8, 12)``."""
        first, second = x[:, ::2], x[..., 1::2]
        x = torch.cat([first * 2, second], dim=-1).mul_(0.5)
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.nn.functional.relu(self.inner(self.norm(x)), inplace=True)
        y = nn.functional.dropout(y.float(), 0.25, self.training)
        y = self.batch(self.outer(y)) + x.expand(8, 12)
        return y / y.pow(2).mean(1, keepdim=True).add(1e-6).sqrt() + torch.rand(8, 1, device=x.device)


def record(into: Path, *, detail: str = "tensor", steps: int = 2, device: str = "cpu") -> RecordedCalls:
    """Train a block under a capture of levels api and aten."""
    torch.manual_seed(0)
    model = Block().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    data = torch.randn(8, 12).to(device)
    with trueup.capture(into, model=model, detail=detail, level=["api", "aten"], on_error="stop") as capture:
        for _ in range(steps):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            capture.step()
    return RecordedCalls(trueup.open_capture(into))


def all_calls(calls: RecordedCalls) -> list[RecordedCall]:
    """Return the calls of rank 0 that compute something."""
    return [c for step in calls.capture.steps for c in calls.of_step(0, step) if c.outputs]
