"""A small residual network with the pooling layers of the real ones (ResNet-D shortcuts: He et al. 2018)."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut that averages before it projects; activations and sum in place."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
                nn.Conv2d(inputs, outputs, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Images [N, 3, H, W] to logits [N, classes]."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.stages = nn.Sequential(
            Block(width, width, 1),
            Block(width, 2 * width, 2),
            Block(2 * width, 4 * width, 2),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.pool(self.stages(self.stem(images))).flatten(1))
