"""A real small training: GPT-2 of `transformers` (2 layers, width 32) that learns the next word of this repository's LICENSE."""

from __future__ import annotations

import torch
from torch import nn

from zoo import text


class Training:
    """A model, its optimizer and its batches; `step` trains on the next one."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        words = len(text.vocabulary())
        config = GPT2Config(vocab_size=words, n_positions=32, n_embd=32, n_layer=2, n_head=2, attn_implementation="eager")
        self.model: nn.Module = GPT2LMHeadModel(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        rows = [[text.ids(one) for one in some] for some in text.batches(8, 4)]
        self.batches = [text.padded(tokens, text.PAD) for tokens in rows]
        self.steps = 0

    def step(self) -> float:
        """Train one step and return its loss."""
        tokens = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        self.optimizer.zero_grad()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())
