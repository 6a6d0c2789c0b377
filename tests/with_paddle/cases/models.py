"""Small real models of Paddle's own parts, trained for a few steps on fixed data: `build(name)` returns a `Training`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F


@dataclass
class Training:
    """A model, its optimizer, and what one step computes a loss from."""

    model: nn.Layer
    optimizer: paddle.optimizer.Optimizer
    loss: Callable[[int], paddle.Tensor]

    def step(self, number: int) -> paddle.Tensor:
        """Train one step; return the loss."""
        loss = self.loss(number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return loss


def _random(number: int) -> np.random.Generator:
    return np.random.default_rng(number + 1)


def transformer() -> Training:
    """A language-model-like encoder: embedding, two post-norm blocks with GELU and dropout, AdamW with clipping."""

    class Encoder(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(40, 64)
            block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, activation="gelu")
            self.encoder = nn.TransformerEncoder(block, 2)
            self.head = nn.Linear(64, 40)

        def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
            return self.head(self.encoder(self.embedding(tokens)))

    model = Encoder()
    optimizer = paddle.optimizer.AdamW(
        1e-3, parameters=model.parameters(), weight_decay=0.01, grad_clip=nn.ClipGradByGlobalNorm(1.0)
    )

    def loss(number: int) -> paddle.Tensor:
        tokens = _random(number).integers(0, 40, (4, 9))
        logits = model(paddle.to_tensor(tokens[:, :-1]))
        return F.cross_entropy(logits.reshape([-1, 40]), paddle.to_tensor(tokens[:, 1:].reshape(-1)))

    return Training(model, optimizer, loss)


def resnet() -> Training:
    """paddle.vision's ResNet-18 on 64 x 64 images, with Momentum."""
    model = paddle.vision.models.resnet18(num_classes=5)
    optimizer = paddle.optimizer.Momentum(0.01, 0.9, parameters=model.parameters(), weight_decay=1e-4)

    def loss(number: int) -> paddle.Tensor:
        random = _random(number)
        images = paddle.to_tensor(random.standard_normal((4, 3, 64, 64), dtype=np.float32))
        return F.cross_entropy(model(images), paddle.to_tensor(random.integers(0, 5, 4)))

    return Training(model, optimizer, loss)


def lstm() -> Training:
    """A tagger: embedding, two bidirectional LSTM layers, tanh, linear; Adam."""

    class Tagger(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 24)
            self.lstm = nn.LSTM(24, 32, num_layers=2, direction="bidirect")
            self.dense = nn.Linear(64, 64)
            self.head = nn.Linear(64, 7)

        def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
            states, _ = self.lstm(self.embedding(tokens))
            return self.head(F.tanh(self.dense(states)))

    model = Tagger()
    optimizer = paddle.optimizer.Adam(1e-3, parameters=model.parameters())

    def loss(number: int) -> paddle.Tensor:
        random = _random(number)
        logits = model(paddle.to_tensor(random.integers(0, 30, (3, 10))))
        return F.cross_entropy(logits.reshape([-1, 7]), paddle.to_tensor(random.integers(0, 7, 30)))

    return Training(model, optimizer, loss)


def ctc() -> Training:
    """A text recogniser in the small: convolutions with batch norm, an LSTM over the columns, and the CTC loss."""

    class Recogniser(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2D(1, 16, 3, padding=1, bias_attr=False), nn.BatchNorm2D(16), nn.ReLU(), nn.MaxPool2D(2, 2),
                nn.Conv2D(16, 32, 3, padding=1, bias_attr=False), nn.BatchNorm2D(32), nn.Hardswish(), nn.MaxPool2D((2, 1), (2, 1)),
                nn.AdaptiveAvgPool2D((1, None)),
            )  # fmt: skip
            self.neck = nn.LSTM(32, 24, direction="bidirect")
            self.head = nn.Linear(48, 11)

        def forward(self, images: paddle.Tensor) -> paddle.Tensor:
            columns = self.backbone(images).squeeze(2).transpose([0, 2, 1])
            return self.head(self.neck(columns)[0])

    model = Recogniser()
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters(), weight_decay=0.05)

    def loss(number: int) -> paddle.Tensor:
        random = _random(number)
        images = paddle.to_tensor(random.standard_normal((3, 1, 16, 40), dtype=np.float32))
        words = paddle.to_tensor(random.integers(1, 11, (3, 4)), dtype="int32")
        logits = model(images).transpose([1, 0, 2])
        lengths = paddle.full([3], logits.shape[0], "int64"), paddle.to_tensor([4, 3, 2], dtype="int64")
        return F.ctc_loss(logits, words, *lengths, blank=0)

    return Training(model, optimizer, loss)


MODELS = {"transformer": transformer, "resnet": resnet, "lstm": lstm, "ctc": ctc}


def build(name: str) -> Training:
    """Build a model; the same weights each time."""
    paddle.seed(7)
    return MODELS[name]()
