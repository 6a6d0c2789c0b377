"""Small models with random weights, each with a batch and a loss, that between them use what real training uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    bitwise: bool = True
    """Whether a healthy npu runs the very operators of the CPU, so that every bit has to be the same."""


def _hf_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (2, 12))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _bert(dropout: float = 0.0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
            max_position_embeddings=32, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout, initializer_range=0.1,
        )
    )  # fmt: skip


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16,
            patch_size=4, num_labels=5, initializer_range=0.2,
        )
    )  # fmt: skip


class Tagger(nn.Module):
    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.rnn = cell(16, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, 7)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(words))[0])


def _tags() -> dict[str, Tensor]:
    return {"words": torch.randint(0, 30, (3, 9)), "tags": torch.randint(0, 7, (3, 9))}


def _tag_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["words"]).flatten(0, 1), batch["tags"].flatten())


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.pool, self.head = nn.AvgPool2d(3, 2, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.pool(self.blocks(self.stem(x))), 1).flatten(1))


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.randint(0, 5, (3,))}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.InstanceNorm2d(16, affine=True)
        self.up, self.mix = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(32, 8, 3, padding=1)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.relu(self.norm1(self.down1(x)))
        coarse = F.silu(self.norm2(self.down2(fine)))
        wide = F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(F.leaky_relu(self.mix(torch.cat([fine, self.up(coarse), wide], 1)), inplace=True))


def _masks() -> dict[str, Tensor]:
    return {"image": torch.randn(2, 3, 16, 16), "mask": torch.randint(0, 2, (2, 16, 16))}


CASES: dict[str, Case] = {
    "bert": Case(_bert, _tokens, _hf_loss),
    "bert-dropout": Case(lambda: _bert(0.1), _tokens, _hf_loss, bitwise=False),
    "gpt2": Case(_gpt2, _tokens, _hf_loss),
    "llama": Case(_llama, _tokens, _hf_loss),
    "vit": Case(_vit, _images, _hf_loss),
    "lstm-tagger": Case(lambda: Tagger(nn.LSTM), _tags, _tag_loss, bitwise=False),
    "gru-tagger": Case(lambda: Tagger(nn.GRU), _tags, _tag_loss, bitwise=False),
    "resnet": Case(
        ResNet, _images, lambda model, batch: F.cross_entropy(model(batch["pixel_values"]), batch["labels"])
    ),
    "unet": Case(UNet, _masks, lambda model, batch: F.cross_entropy(model(batch["image"]), batch["mask"])),
}

Optimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass
class Run:
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]


def train(case: Case, device: str, steps: int = 3, optimizer: Optimizer | None = None) -> Run:
    """Train on ``device`` from fixed seeds; everything comes back on the CPU."""
    torch.manual_seed(7)
    model = case.build().to(device).train()
    batch = {name: value.to(device) for name, value in case.batch().items()}
    steps_of = (optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)))(model.parameters())
    run = Run([], [], {})
    for _ in range(steps):
        steps_of.zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        run.gradients.append({name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None})
        steps_of.step()
        run.losses.append(loss.item())
    run.state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    return run
