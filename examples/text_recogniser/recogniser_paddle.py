"""The recogniser in PaddlePaddle: backbone, neck, and a head of two branches, CTC and an attention decoder."""

from __future__ import annotations

import math

import paddle
from paddle import nn
from paddle.nn import functional as F
from words import BLANK, CLASSES, CTC_CLASSES, LONGEST


class ConvNorm(nn.Layer):
    """Convolution, batch norm and, if asked for, ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int | tuple[int, int] = 1, groups: int = 1, act: bool = True
    ):
        super().__init__()
        self.conv = nn.Conv2D(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias_attr=False)
        self.bn = nn.BatchNorm2D(outputs)
        self.act = nn.ReLU() if act else None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.bn(self.conv(x))
        return x if self.act is None else self.act(x)


class ChannelGate(nn.Layer):
    """Each channel scaled by what its mean over the picture says."""

    def __init__(self, channels: int):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2D(1)
        self.conv = nn.Conv2D(channels, channels, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x * F.sigmoid(self.conv(self.pool(x)))


class GatheringBlock(nn.Layer):
    """Convolutions one after the other; what each made is gathered, mixed by 1x1 convolutions and gated."""

    def __init__(self, inputs: int, middle: int, outputs: int, layers: int = 3):
        super().__init__()
        self.layers = nn.LayerList([ConvNorm(inputs if k == 0 else middle, middle, 3) for k in range(layers)])
        self.mix = ConvNorm(inputs + layers * middle, outputs, 1)
        self.gate = ChannelGate(outputs)
        self.identity = inputs == outputs

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(made[-1]))
        y = self.gate(self.mix(paddle.concat(made, axis=1)))
        return x + y if self.identity else y


class Backbone(nn.Layer):
    """A picture (N, 1, 32, 128) becomes features (N, 64, 1, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(1, 16, 3, 2), ConvNorm(16, 32, 3))
        self.stage1 = GatheringBlock(32, 16, 48)
        self.down1 = ConvNorm(48, 48, 3, (2, 1), groups=48, act=False)
        self.stage2 = GatheringBlock(48, 24, 64)
        self.down2 = ConvNorm(64, 64, 3, (2, 1), groups=64, act=False)
        self.stage3 = GatheringBlock(64, 24, 64)
        self.pool = nn.AvgPool2D((4, 2), (4, 2), exclusive=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.down1(self.stage1(self.stem(x)))
        return self.pool(self.stage3(self.down2(self.stage2(x))))


class Recurrent(nn.Layer):
    """A neck: the columns (N, T, C) through a bidirectional LSTM."""

    def __init__(self, channels: int, hidden: int, outputs: int):
        super().__init__()
        self.lstm = nn.LSTM(channels, hidden, direction="bidirect")
        self.linear = nn.Linear(2 * hidden, outputs)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.linear(self.lstm(x)[0])


class Mixing(nn.Layer):
    """A neck: the columns (N, T, C) through transformer blocks, which look at all columns at once."""

    def __init__(self, channels: int, outputs: int, dropout: float):
        super().__init__()
        self.reduce = nn.Linear(channels, outputs)
        block = nn.TransformerEncoderLayer(outputs, 4, 2 * outputs, dropout, activation="gelu", normalize_before=True)
        self.blocks = nn.TransformerEncoder(block, 2)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(self.blocks(self.reduce(x)))


class Decoder(nn.Layer):
    """Says a word letter by letter: given the letters so far, which one comes next."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, width)
        self.layer = nn.TransformerDecoderLayer(width, 4, 2 * width, dropout, activation="relu")
        self.out = nn.Linear(width, CLASSES)
        self.width = width
        self.register_buffer("positions", _positions(LONGEST + 1, width), persistable=False)
        future = paddle.full([LONGEST + 1, LONGEST + 1], -1e4)
        self.register_buffer("mask", paddle.triu(future, 1), persistable=False)

    def forward(self, memory: paddle.Tensor, given: paddle.Tensor) -> paddle.Tensor:
        x = self.embedding(given) * math.sqrt(self.width) + self.positions
        return self.out(self.layer(x, memory, self.mask))


class MultiHead(nn.Layer):
    """Two readings of the same columns: CTC's, and the decoder's, which guides the training alone."""

    def __init__(self, channels: int, neck: str, width: int, dropout: float):
        super().__init__()
        self.ctc_encoder = Recurrent(channels, width // 2, width) if neck == "lstm" else Mixing(channels, width, dropout)
        self.ctc_head = nn.Linear(width, CTC_CLASSES)
        self.before_gtc = nn.Linear(channels, width, bias_attr=False)
        self.gtc_head = Decoder(width, dropout)

    def forward(self, x: paddle.Tensor, given: paddle.Tensor | None = None) -> dict[str, paddle.Tensor]:
        columns = x.squeeze(2).transpose([0, 2, 1])
        encoded = self.ctc_encoder(columns)
        outputs = {"ctc_neck": encoded, "ctc": self.ctc_head(encoded)}
        if given is not None:
            outputs["gtc"] = self.gtc_head(self.before_gtc(columns), given)
        return outputs


class Recogniser(nn.Layer):
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

    def forward(self, image: paddle.Tensor, given: paddle.Tensor | None = None) -> dict[str, paddle.Tensor]:
        return self.head(self.backbone(image), given)


def losses(outputs: dict[str, paddle.Tensor], batch: dict[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
    """Return CTC's loss, the decoder's, and ``loss``, their sum."""
    logits = outputs["ctc"].transpose([1, 0, 2])
    columns = paddle.full([logits.shape[1]], logits.shape[0], "int64")
    ctc = F.ctc_loss(logits, batch["letters"].astype("int32"), columns, batch["length"], blank=0, reduction="none")
    # Paddle's mean leaves ignored labels out only where ignore_index is not negative: with -1 or -100 each counts as a zero.
    gtc = F.cross_entropy(outputs["gtc"].reshape([-1, CLASSES]), batch["wanted"].reshape([-1]), ignore_index=BLANK)
    terms = {"ctc": ctc.mean(), "gtc": gtc}
    return {"loss": terms["ctc"] + terms["gtc"], **terms}


def _positions(count: int, width: int) -> paddle.Tensor:
    place = paddle.arange(count, dtype="float32").unsqueeze(1)
    speed = paddle.exp(paddle.arange(0, width, 2, dtype="float32") * (-math.log(10000.0) / width))
    return paddle.stack([paddle.sin(place * speed), paddle.cos(place * speed)], axis=2).reshape([count, width])
