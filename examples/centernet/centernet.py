"""CenterNet (Zhou, Wang, Krähenbühl 2019, "Objects as Points") in a size that trains on one CPU core.

Image [N, 3, H, W] -> residual backbone, stride 16 -> neck: an LSTM along every row of the feature map -> upsampling
to stride 4 -> three heads: a heat map whose peaks are object centres, the object's size, and the sub-pixel offset.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Outputs = dict[str, Tensor]
Batch = dict[str, Tensor]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut; the additions and activations happen in place, as in torchvision."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class RowLSTM(nn.Module):
    """Reads every row of the feature map from both sides, so that a cell knows what stands left and right of it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(channels, channels // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(n * h, w, c)
        rows, _ = self.lstm(rows)
        return rows.reshape(n, h, w, c).permute(0, 3, 1, 2).contiguous()


def upsample(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def head(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, 32, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(32, outputs, 1))


class CenterNet(nn.Module):
    """The detector; `classes` heat maps, sizes and offsets in cells of the output grid (stride 4)."""

    stride = 4

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        self.backbone = nn.Sequential(
            ResidualBlock(width, width, 2),
            ResidualBlock(width, 2 * width, 2),
            ResidualBlock(2 * width, 4 * width, 2),
        )
        self.neck = RowLSTM(4 * width)
        self.up = nn.Sequential(upsample(4 * width, 4 * width), upsample(4 * width, 2 * width))
        self.heat = head(2 * width, classes)
        self.size = head(2 * width, 2)
        self.offset = head(2 * width, 2)
        nn.init.constant_(
            self.heat[-1].bias, -2.19
        )  # sigmoid(-2.19) = 0.1: most cells hold no object (paper, section 4)

    def forward(self, images: Tensor) -> Outputs:
        x = self.backbone(self.stem(images))
        x = self.up(self.neck(x))
        return {"heat": self.heat(x), "size": self.size(x), "offset": self.offset(x)}


def focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Penalty-reduced focal loss (paper, equation 1): alpha = 2, beta = 4, normalised by the number of objects."""
    p = torch.sigmoid(logits).clamp(1e-4, 1 - 1e-4)
    centre = target.eq(1).float()
    at_centre = torch.log(p) * (1 - p) ** 2 * centre
    elsewhere = torch.log(1 - p) * p**2 * (1 - target) ** 4 * (1 - centre)
    return -(at_centre.sum() + elsewhere.sum()) / centre.sum().clamp(min=1)


def masked_l1(prediction: Tensor, target: Tensor, cell: Tensor, mask: Tensor) -> Tensor:
    """L1 loss of [N, 2, h, w] at the objects' cells (indices [N, K] into h*w) against [N, K, 2]."""
    n, c = prediction.shape[:2]
    at_cells = prediction.flatten(2).gather(2, cell[:, None].expand(n, c, -1)).transpose(1, 2)
    error = F.l1_loss(at_cells * mask[..., None], target * mask[..., None], reduction="sum")
    return error / mask.sum().clamp(min=1)


def losses(outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
    """The three terms, and `loss`, their weighted sum (paper, equation 4)."""
    heat = focal_loss(outputs["heat"], batch["heat"])
    size = masked_l1(outputs["size"], batch["size"], batch["cell"], batch["mask"])
    offset = masked_l1(outputs["offset"], batch["offset"], batch["cell"], batch["mask"])
    return {"loss": heat + 0.1 * size + offset, "heat": heat, "size": size, "offset": offset}
