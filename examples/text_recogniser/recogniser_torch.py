"""The recogniser in PyTorch, part by part the one in recogniser_paddle.py and with the same names."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from words import BLANK, CLASSES, CTC_CLASSES, LONGEST


class ConvNorm(nn.Module):
    """Convolution, batch norm and, if asked for, ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int | tuple[int, int] = 1, groups: int = 1, act: bool = True
    ):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU() if act else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv(x))
        return x if self.act is None else self.act(x)


class ChannelGate(nn.Module):
    """Each channel scaled by what its mean over the picture says."""

    def __init__(self, channels: int):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.conv(self.pool(x)))


class GatheringBlock(nn.Module):
    """Convolutions one after the other; what each made is gathered, mixed by 1x1 convolutions and gated."""

    def __init__(self, inputs: int, middle: int, outputs: int, layers: int = 3):
        super().__init__()
        self.layers = nn.ModuleList([ConvNorm(inputs if k == 0 else middle, middle, 3) for k in range(layers)])
        self.mix = ConvNorm(inputs + layers * middle, outputs, 1)
        self.gate = ChannelGate(outputs)
        self.identity = inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(made[-1]))
        y = self.gate(self.mix(torch.cat(made, dim=1)))
        return x + y if self.identity else y


class Backbone(nn.Module):
    """A picture (N, 1, 32, 128) becomes features (N, 64, 1, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(1, 16, 3, 2), ConvNorm(16, 32, 3))
        self.stage1 = GatheringBlock(32, 16, 48)
        self.down1 = ConvNorm(48, 48, 3, (2, 1), groups=48, act=False)
        self.stage2 = GatheringBlock(48, 24, 64)
        self.down2 = ConvNorm(64, 64, 3, (2, 1), groups=64, act=False)
        self.stage3 = GatheringBlock(64, 24, 64)
        self.pool = nn.AvgPool2d((4, 2), (4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down1(self.stage1(self.stem(x)))
        return self.pool(self.stage3(self.down2(self.stage2(x))))


class Recurrent(nn.Module):
    """A neck: the columns (N, T, C) through a bidirectional LSTM."""

    def __init__(self, channels: int, hidden: int, outputs: int):
        super().__init__()
        self.lstm = nn.LSTM(channels, hidden, bidirectional=True, batch_first=True)
        self.linear = nn.Linear(2 * hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.lstm(x)[0])


class Mixing(nn.Module):
    """A neck: the columns (N, T, C) through transformer blocks, which look at all columns at once."""

    def __init__(self, channels: int, outputs: int, dropout: float):
        super().__init__()
        self.reduce = nn.Linear(channels, outputs)
        block = nn.TransformerEncoderLayer(
            outputs, 4, 2 * outputs, dropout, activation="gelu", batch_first=True, norm_first=True
        )  # fmt: skip
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(self.reduce(x)))


class Decoder(nn.Module):
    """Says a word letter by letter: given the letters so far, which one comes next."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, width)
        self.layer = nn.TransformerDecoderLayer(width, 4, 2 * width, dropout, activation="relu", batch_first=True)
        self.out = nn.Linear(width, CLASSES)
        self.width = width
        self.register_buffer("positions", _positions(LONGEST + 1, width), persistent=False)
        future = torch.full((LONGEST + 1, LONGEST + 1), -1e4)
        self.register_buffer("mask", torch.triu(future, 1), persistent=False)

    def forward(self, memory: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        x = self.embedding(given) * math.sqrt(self.width) + self.positions
        return self.out(self.layer(x, memory, self.mask))


class MultiHead(nn.Module):
    """Two readings of the same columns: CTC's, and the decoder's, which guides the training alone."""

    def __init__(self, channels: int, neck: str, width: int, dropout: float):
        super().__init__()
        self.ctc_encoder = Recurrent(channels, width // 2, width) if neck == "lstm" else Mixing(channels, width, dropout)
        self.ctc_head = nn.Linear(width, CTC_CLASSES)
        self.before_gtc = nn.Linear(channels, width, bias=False)
        self.gtc_head = Decoder(width, dropout)

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        columns = x.squeeze(2).transpose(1, 2)
        encoded = self.ctc_encoder(columns)
        outputs = {"ctc_neck": encoded, "ctc": self.ctc_head(encoded)}
        if given is not None:
            outputs["gtc"] = self.gtc_head(self.before_gtc(columns), given)
        return outputs


class Recogniser(nn.Module):
    """Reads the word in a picture.

    Args:
        neck: ``lstm`` or ``transformer``.
        width: features of neck and decoder.
        dropout: probability, in the transformer blocks of neck and decoder.
    """

    def __init__(self, neck: str = "lstm", width: int = 64, dropout: float = 0.1):
        super().__init__()
        self.backbone = Backbone()
        self.head = MultiHead(64, neck, width, dropout)

    def forward(self, image: torch.Tensor, given: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return self.head(self.backbone(image), given)


def losses(outputs: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return CTC's loss, the decoder's, and ``loss``, their sum."""
    logits = outputs["ctc"].transpose(0, 1)
    columns = torch.full((logits.shape[1],), logits.shape[0], dtype=torch.int64)
    chances = F.log_softmax(logits, dim=-1)  # Paddle's ctc_loss does this itself
    ctc = F.ctc_loss(chances, batch["letters"], columns, batch["length"], blank=0, reduction="none")
    gtc = F.cross_entropy(outputs["gtc"].reshape(-1, CLASSES), batch["wanted"].reshape(-1), ignore_index=BLANK)
    terms = {"ctc": ctc.mean(), "gtc": gtc}
    return {"loss": terms["ctc"] + terms["gtc"], **terms}


def _positions(count: int, width: int) -> torch.Tensor:
    place = torch.arange(count, dtype=torch.float32).unsqueeze(1)
    speed = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10000.0) / width))
    return torch.stack([torch.sin(place * speed), torch.cos(place * speed)], dim=2).reshape(count, width)
