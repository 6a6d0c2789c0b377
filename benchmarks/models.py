"""Three training steps of a size that people know from their own first runs: a small GPT and ResNet-18 in plain PyTorch,
and a small Llama of `transformers`.

GPT: 6 layers, width 256, 8 heads, 4 x 128 tokens of a vocabulary of 4096 (6.9 M parameters), explicit softmax attention, AdamW.
ResNet-18: 4 x 3 x 64 x 64 images, 100 classes (11.2 M parameters), in-place ReLU, SGD with momentum.
Llama: 4 layers, width 384, 6 heads on 2 of keys and values, 4 x 128 words of Python's help texts (9.4 M parameters), AdamW.
All float32.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LAYERS, TOKENS = 4096, 256, 8, 6, 128


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (t.view(batch, tokens, HEADS, -1).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=2))
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(WIDTH // HEADS))
        causal = torch.tril(torch.ones(tokens, tokens, dtype=torch.bool, device=x.device))
        weights = F.softmax(scores.masked_fill(~causal, float("-inf")), dim=-1)
        return self.proj((weights @ v).transpose(1, 2).contiguous().view(batch, tokens, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.lnf, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.lnf(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


class BasicBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.c2, self.b2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or inner != outer:
            self.down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.down is None else self.down(x)
        return self.relu(self.b2(self.c2(self.relu(self.b1(self.c1(x))))) + shortcut)


class ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.layers = nn.Sequential(*(BasicBlock(*size) for size in sizes))
        self.fc = nn.Linear(512, 100)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(self.layers(self.stem(images)), 1).flatten(1)
        return F.cross_entropy(self.fc(pooled), labels)


class Llama(nn.Module):
    """`transformers`' Llama from a configuration: nothing is downloaded."""

    def __init__(self) -> None:
        super().__init__()
        import transformers  # takes seconds, and only this model needs it

        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=TOKENS, use_cache=False,
        )  # fmt: skip
        self.llama = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.llama(input_ids=tokens, labels=targets).loss
        return loss


def text_batches(source: torch.Generator) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that gives windows of Python's own help texts, a token a word, rarer words as one unknown."""
    from pydoc_data.topics import topics

    words = re.findall(r"\w+|[^\w\s]", "\n".join(topics.values()))
    known = {word: k for k, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1))}
    text = torch.tensor([known.get(word, VOCABULARY - 1) for word in words])

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, len(text) - TOKENS, (4,), generator=source)
        tokens = torch.stack([text[k : k + TOKENS] for k in starts.tolist()])
        return tokens, tokens  # the model shifts the targets itself

    return batch


class Training:
    """One training step after the other on fresh batches: calling it runs a step and returns its loss."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self.model, self.optimizer, self._batch = model, optimizer, batch

    def __call__(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(*self._batch())
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def build(name: str) -> Training:
    """Return the training of ``gpt``, ``resnet`` or ``llama``, seeded: every process runs the same steps."""
    torch.manual_seed(1234)
    source = torch.Generator().manual_seed(7)

    def random_tokens() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, VOCABULARY, (4, TOKENS + 1), generator=source)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def random_images() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 3, 64, 64, generator=source), torch.randint(0, 100, (4,), generator=source)

    if name == "resnet":
        resnet = ResNet18()
        return Training(resnet, torch.optim.SGD(resnet.parameters(), lr=0.01, momentum=0.9), random_images)
    model = Llama() if name == "llama" else GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Training(model, optimizer, text_batches(source) if name == "llama" else random_tokens)
