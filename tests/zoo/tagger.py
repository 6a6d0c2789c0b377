"""A bidirectional LSTM that tags every word of a sentence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.text import PAD


class Tagger(nn.Module):
    """Embedding and a learned table of places -> two LSTM layers -> the word and its sentence's last state -> tag."""

    def __init__(self, words: int, tags: int, width: int = 64, places: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=PAD)
        self.place = nn.Parameter(torch.randn(places, width) / 8)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.tag = nn.Linear(4 * width, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [N, T] to logits [N, T, tags]."""
        n, t = tokens.shape
        place = torch.arange(t, device=tokens.device).clamp(max=len(self.place) - 1).expand(n, t)
        # Indexing a parameter, not an Embedding: its backward is index_put with accumulation over repeated places.
        states, _ = self.lstm(self.dropout(self.embedding(tokens) + self.place[place]))
        # argmax returns the first of equal values: the first padding, whose left neighbour is the sentence's last word
        # (-1, the last of all, in a row without padding).
        last = (tokens == PAD).int().argmax(1) - 1
        sentence = states[torch.arange(n, device=tokens.device), last]
        return self.tag(torch.cat([states, sentence[:, None].expand_as(states)], dim=2))
