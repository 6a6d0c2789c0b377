"""What the four scripts train on: handwritten digits of scikit-learn, and the Python manual that comes with Python."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

LENGTH = 32


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set: images float32 [n, 1, 8, 8] in 0..1, and their class int64 [n]."""
    found = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(found.target).long()
    return TensorDataset(images[:1600], labels[:1600]), TensorDataset(images[1600:], labels[1600:])


def classifier() -> nn.Module:
    """Build a small convolutional network: [n, 1, 8, 8] -> [n, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 10),
    )  # fmt: skip


class Manual(Dataset[dict[str, Tensor]]):
    """Windows of LENGTH characters of one topic, as a causal language model wants them."""

    def __init__(self, topic: str) -> None:
        codes = [min(ord(character), 127) for character in topics[topic]]
        self._windows = torch.tensor(codes[: len(codes) // LENGTH * LENGTH]).view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._windows[index], "labels": self._windows[index]}
