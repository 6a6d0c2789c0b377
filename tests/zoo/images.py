"""Crops of the pictures that come with scikit-image: eight textures to tell apart, coins to segment."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch
from skimage import data, filters
from torch import Tensor

IGNORED = -100
TEXTURES = ("brick", "grass", "gravel", "coffee", "immunohistochemistry", "hubble_deep_field", "retina", "moon")


@functools.cache
def picture(name: str) -> np.ndarray:
    """Return the picture as uint8 [H, W, 3]."""
    pixels = getattr(data, name)()
    return np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels


def windows(pixels: np.ndarray, size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield size x size windows at random places, for ever."""
    while True:
        top, left = (int(rng.integers(extent - size + 1)) for extent in pixels.shape[:2])
        yield pixels[top : top + size, left : left + size]


def textures(count: int, size: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return `count` batches: one crop of every texture, float32 [8, 3, size, size] in -1..1, and its class [8]."""
    rng = np.random.default_rng(seed)
    sources = [windows(picture(name), 2 * size, rng) for name in TEXTURES]
    labels = torch.arange(len(TEXTURES))
    found = []
    for _ in range(count):
        crops = np.stack([next(source)[::2, ::2] for source in sources]).astype(np.float32)
        order = torch.from_numpy(rng.permutation(len(TEXTURES)))
        found.append((torch.from_numpy(crops / 127.5 - 1).permute(0, 3, 1, 2).contiguous()[order], labels[order]))
    return found


def coins(count: int, batch: int, size: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return `count` batches of grey crops, float32 [batch, 1, size, size] in 0..255, and masks [batch, size, size].

    The mask is 1 on a coin, 0 beside it (Otsu's threshold) and IGNORED where the two meet, as in Pascal VOC.
    """
    grey = picture("coins")[..., 0]
    coin = (filters.gaussian(grey, 2) > filters.threshold_otsu(grey) / 255).astype(np.int64)
    edge = (np.roll(coin, 1, 0) != coin) | (np.roll(coin, 1, 1) != coin)
    source = windows(np.dstack([grey, np.where(edge, IGNORED, coin)]), size, np.random.default_rng(seed))
    found = []
    for _ in range(count):
        crops = torch.from_numpy(np.stack([next(source) for _ in range(batch)]))
        found.append((crops[:, None, :, :, 0].float(), crops[..., 1].contiguous()))
    return found
