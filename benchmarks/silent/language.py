"""A small decoder of our own, whose parts a case replaces, and batches of real text for it and for models of `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import text
from zoo.language import next_word

WIDTH, HEADS, LAYERS = 32, 4, 2
Batch = dict[str, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend from each position to itself and those before it; all [batch, heads, tokens, width]."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    def __init__(self, attend: Attend = causal) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (t.view(batch, tokens, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(query, key, value).transpose(1, 2).reshape(batch, tokens, WIDTH))


class Block(nn.Module):
    def __init__(self, attend: Attend = causal) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(attend), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Embeddings, `LAYERS` blocks, a norm and an output layer: the logits of the next word."""

    def __init__(self, attend: Attend = causal) -> None:
        super().__init__()
        words = len(text.vocabulary())
        self.words, self.places = nn.Embedding(words, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches() -> Iterator[Batch]:
    """Yield batches of four sentences, padded on the right, again and again."""
    return cycle(next_word())


def shifted(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the words, and the word after each of them (`text.IGNORED` for padding)."""
    return batch["input_ids"][:, :-1], batch["labels"][:, 1:]


def next_word_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, labels = shifted(batch)
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=text.IGNORED)


def left_padded(batch: Batch) -> Batch:
    """Move the padding of a batch to the left."""
    shifts = (1 - batch["attention_mask"]).sum(1).tolist()
    return {name: torch.stack([row.roll(by) for row, by in zip(rows, shifts, strict=True)]) for name, rows in batch.items()}


def adamw(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    """Return AdamW as a loop over the parameters, so that each update is calls of its own."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, **options)
