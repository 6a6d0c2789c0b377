"""Seven photographs that come with scikit-image, their objects annotated by hand, cropped at random.

Nothing is downloaded. A sample is cut from a photograph with a random window and flip drawn from a seed, so that sample
i of seed s is the same on every machine and device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import torch
from skimage import data as photographs
from skimage.transform import resize
from torch import Tensor

CLASSES = ("face", "cat", "cup", "spoon", "coin", "rocket", "wheel", "camera", "helmet")
MAX_OBJECTS = 24

# Pixel boxes (left, top, right, bottom) in the full photograph, read off by eye.
BOXES: dict[str, list[tuple[str, tuple[int, int, int, int]]]] = {
    "astronaut": [
        ("face", (175, 55, 275, 190)),
        ("rocket", (358, 0, 462, 292)),
        ("helmet", (280, 343, 511, 511)),
    ],
    "camera": [("face", (158, 62, 272, 200)), ("camera", (255, 137, 332, 203))],
    "chelsea": [("cat", (30, 0, 375, 290))],
    "coffee": [("cup", (172, 15, 403, 308)), ("spoon", (318, 65, 425, 325))],
    "coins": [
        ("coin", box)
        for box in (
            *((23, 34, 66, 74), (81, 39, 119, 76), (132, 29, 179, 75)),
            *((192, 29, 239, 74), (255, 35, 295, 74), (305, 16, 364, 72)),
            *((25, 104, 67, 145), (84, 108, 122, 145), (134, 109, 173, 145)),
            *((185, 105, 226, 145), (246, 95, 296, 144), (318, 105, 356, 144)),
            *((25, 178, 63, 216), (80, 174, 124, 216), (135, 179, 173, 215)),
            *((189, 170, 236, 217), (251, 173, 296, 216), (315, 156, 379, 219)),
            *((18, 233, 75, 287), (92, 245, 134, 287), (143, 236, 201, 287)),
            *((220, 240, 268, 287), (276, 239, 326, 288), (336, 247, 380, 290)),
        )
    ],
    "rocket": [("rocket", (308, 127, 335, 405))],
    "motorcycle": [("wheel", (122, 237, 285, 402)), ("wheel", (505, 262, 683, 450))],
}
NAMES = tuple(BOXES)


@functools.cache
def photograph(name: str) -> np.ndarray:
    """Return the photograph as float32 [H, W, 3] in 0..1; grey ones are repeated over the three channels."""
    pixels = photographs.stereo_motorcycle()[0] if name == "motorcycle" else getattr(photographs, name)()
    pixels = pixels.astype(np.float32) / 255
    return np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels


def crop(name: str, size: int, rng: np.random.Generator) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """Cut a random square window, flip it half of the time, resize it to size x size.

    Returns the pixels [size, size, 3] and (class, box) of every object at least half of which is inside; boxes in
    pixels of the crop, cut at its border.
    """
    image = photograph(name)
    height, width = image.shape[:2]
    side = int(min(height, width) * rng.uniform(0.7, 1.0))
    top, left = int(rng.integers(height - side + 1)), int(rng.integers(width - side + 1))
    pixels = resize(image[top : top + side, left : left + side], (size, size), anti_aliasing=True)
    flip = rng.random() < 0.5
    objects = []
    for label, box in BOXES[name]:
        moved = np.array(box, dtype=np.float64) - (left, top, left, top)
        inside = moved.clip(0, side)
        if area(inside) < 0.5 * area(moved):
            continue
        if flip:
            inside = np.array([side - inside[2], inside[1], side - inside[0], inside[3]])
        objects.append((CLASSES.index(label), inside * size / side))
    return np.ascontiguousarray(pixels[:, ::-1] if flip else pixels), objects


def area(box: np.ndarray) -> float:
    return float((box[2] - box[0]) * (box[3] - box[1]))


def gaussian_radius(height: float, width: float, overlap: float = 0.7) -> float:
    """Return how far the corners of a box may move before its IoU with itself falls below `overlap`.

    The smallest of three cases (CornerNet, Law and Deng 2018, section 3.2): shifted, shrunk and grown. Its released
    code, which CenterNet took over, has the wrong roots for the last two; these are the right ones.
    """
    around, inside = height + width, height * width
    shifted = (around - math.sqrt(around**2 - 4 * inside * (1 - overlap) / (1 + overlap))) / 2
    shrunk = (around - math.sqrt(around**2 - 4 * inside * (1 - overlap))) / 4
    grown = (-around + math.sqrt(around**2 + 4 * inside * (1 - overlap) / overlap)) / 4
    return min(shifted, shrunk, grown)


def draw_gaussian(heat: np.ndarray, x: int, y: int, radius: int) -> None:
    """Raise the map [h, w] in place to a Gaussian with its peak, 1, at (x, y)."""
    rows, columns = np.ogrid[: heat.shape[0], : heat.shape[1]]
    sigma = (2 * radius + 1) / 6
    bump = np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / (2 * sigma**2))
    bump[(abs(rows - y) > radius) | (abs(columns - x) > radius)] = 0
    np.maximum(heat, bump, out=heat)


def targets(objects: list[tuple[int, np.ndarray]], size: int, stride: int) -> dict[str, np.ndarray]:
    """Return heat [classes, g, g], and per object (padded to MAX_OBJECTS) size, offset [K, 2], cell and mask [K]."""
    grid = size // stride
    target = {
        "heat": np.zeros((len(CLASSES), grid, grid), np.float32),
        "size": np.zeros((MAX_OBJECTS, 2), np.float32),
        "offset": np.zeros((MAX_OBJECTS, 2), np.float32),
        "cell": np.zeros(MAX_OBJECTS, np.int64),
        "mask": np.zeros(MAX_OBJECTS, np.float32),
    }
    for k, (label, box) in enumerate(objects[:MAX_OBJECTS]):
        left, top, right, bottom = box / stride
        centre = np.array([(left + right) / 2, (top + bottom) / 2])
        x, y = np.minimum(centre.astype(np.int64), grid - 1)
        radius = max(0, int(gaussian_radius(math.ceil(bottom - top), math.ceil(right - left))))
        draw_gaussian(target["heat"][label], x, y, radius)
        target["size"][k] = right - left, bottom - top
        target["offset"][k] = centre - (x, y)
        target["cell"][k] = y * grid + x
        target["mask"][k] = 1
    return target


def sample(name: str, size: int, stride: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    pixels, objects = crop(name, size, rng)
    image = ((pixels - 0.45) / 0.25).transpose(2, 0, 1).astype(np.float32)
    return {"image": image, **targets(objects, size, stride)}


def batches(batch_size: int, seed: int, size: int = 96, stride: int = 4) -> Iterator[dict[str, Tensor]]:
    """Yield batches for ever: every photograph once, in random order, before any comes again."""
    rng = np.random.default_rng(seed)
    queue: list[str] = []
    while True:
        while len(queue) < batch_size:
            queue += [NAMES[i] for i in rng.permutation(len(NAMES))]
        drawn = [sample(queue.pop(0), size, stride, rng) for _ in range(batch_size)]
        yield {key: torch.from_numpy(np.stack([one[key] for one in drawn])) for key in drawn[0]}
