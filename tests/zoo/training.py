"""A model in training: what every test that needs a training run steps through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

Batch = dict[str, Tensor]


@dataclass
class Training:
    """A model, its optimizer and the fixed batches it cycles through; all on one device."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[nn.Module, Batch], Tensor]
    batches: Sequence[Batch]
    clip: float | None = None
    done: int = 0

    def step(self) -> Tensor:
        """Train one step (forward, backward, clipping, optimizer) on the next batch; return the detached loss."""
        self.optimizer.zero_grad()
        loss = self.loss(self.model, self.batches[self.done % len(self.batches)])
        loss.backward()
        if self.clip is not None:
            # foreach=False here and in every optimizer: PyTorch's default is chosen by device, and a test that plants a
            # fault wants the same operators on both.
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, foreach=False)
        self.optimizer.step()
        self.done += 1
        return loss.detach()


def on(device: str, batches: Sequence[Batch]) -> list[Batch]:
    """Copy the batches to the device."""
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
