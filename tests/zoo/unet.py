"""A small U-Net (Ronneberger et al. 2015) with group normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Double(nn.Sequential):
    """Twice convolution, group normalisation, SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(inplace=True),
        )


class UNet(nn.Module):
    """Grey images [N, 1, H, W] in 0..255 to logits [N, classes, H, W]; H and W multiples of 8.

    The first level works at half the resolution; the logits are scaled up bilinearly.
    """

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.shrink = nn.Conv2d(1, width, 2, stride=2)
        self.down1 = Double(width, width)
        self.down2 = Double(width, 2 * width)
        self.bottom = Double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = Double(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = Double(2 * width, width)
        self.classify = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        # Each picture against its own brightness. A sum over thousands of pixels passes 65504, the limit of half
        # precision, long before it is divided.
        brightness = images.sum(dim=(1, 2, 3), keepdim=True) / images[0].numel()
        x1 = self.down1(self.shrink((images - brightness) / 64))
        x2 = self.down2(F.max_pool2d(x1, 2))
        x = self.bottom(F.max_pool2d(x2, 2))
        x = self.join2(torch.cat([self.up2(x), x2], dim=1))
        x = self.join1(torch.cat([self.up1(x), x1], dim=1))
        return F.interpolate(self.classify(x), scale_factor=2, mode="bilinear", align_corners=False)
