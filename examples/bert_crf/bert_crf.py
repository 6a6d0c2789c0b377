"""BERT with a conditional random field on top: emissions for each word, and a table of how well tags follow one another."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel


class CRF(nn.Module):
    """Linear-chain CRF (Lafferty, McCallum, Pereira 2001): the negative log likelihood of a sentence's tags."""

    def __init__(self, tags: int, *, float32: bool = False) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(tags, tags) / 10)
        self.first = nn.Parameter(torch.zeros(tags))
        self.float32 = float32

    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """Map emissions ``(n, t, tags)``, tags and mask ``(n, t)`` to the mean loss of a sentence."""
        transitions, first = self.transitions, self.first
        if self.float32:
            emissions, transitions, first = emissions.float(), transitions.float(), first.float()
        return (self.partition(emissions, mask, transitions, first) - self.score(emissions, tags, mask, transitions, first)).mean()

    def score(self, emissions: Tensor, tags: Tensor, mask: Tensor, transitions: Tensor, first: Tensor) -> Tensor:
        """Sum emissions and transitions along the given tags."""
        told = emissions.gather(2, tags[:, :, None]).squeeze(2) * mask
        moved = transitions[tags[:, :-1], tags[:, 1:]] * mask[:, 1:]
        return first[tags[:, 0]] + told.sum(1) + moved.sum(1)

    def partition(self, emissions: Tensor, mask: Tensor, transitions: Tensor, first: Tensor) -> Tensor:
        """Sum over all taggings, in logarithms, from the first word to the last."""
        alpha = first + emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            following = (alpha[:, :, None] + transitions).logsumexp(1) + emissions[:, t]
            alpha = torch.where(mask[:, t, None], following, alpha)
        return alpha.logsumexp(1)


class BertCRF(nn.Module):
    """A small BERT with random weights, a linear layer and the CRF."""

    def __init__(self, words: int, tags: int, *, crf_float32: bool = False) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=words, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
        )  # fmt: skip
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, tags)
        self.crf = CRF(tags, float32=crf_float32)

    def forward(self, ids: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """Return the loss of a batch."""
        hidden = self.bert(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return self.crf(self.classifier(hidden), tags, mask)
