"""Formats of the device: each way into blocks and back gives the elements, and what cannot be told is refused."""

from __future__ import annotations

import numpy as np
import pytest

from trueup.exchange.readers.dump import UnreadableError
from trueup.exchange.readers.kernel_dump import convert

IMAGES = np.arange(2 * 19 * 3 * 5, dtype=np.float16).reshape(2, 19, 3, 5)  # 19 channels: a block and three elements


def blocked(values: np.ndarray, edge: int = 16) -> np.ndarray:
    """N C H W to N C1 H W C0, by hand."""
    n, c, h, w = values.shape
    found = np.zeros((n, -(-c // edge), h, w, edge), values.dtype)
    for channel in range(c):
        found[:, channel // edge, :, :, channel % edge] = values[:, channel]
    return found


def test_blocks_of_channels_become_images() -> None:
    five = blocked(IMAGES)
    assert np.array_equal(convert(five, "NC1HWC0", "NCHW", IMAGES.shape), IMAGES)
    assert np.array_equal(convert(five, "NC1HWC0", "NHWC", (2, 3, 5, 19)), IMAGES.transpose(0, 2, 3, 1))
    assert np.array_equal(convert(five, "NC1HWC0", "ND", IMAGES.shape), IMAGES)
    assert convert(five, "NC1HWC0", "NCHW").shape == (2, 32, 3, 5)  # nobody said how many channels there are
    films = np.stack([five, five + 1], axis=1)
    assert np.array_equal(convert(films, "NDC1HWC0", "NCDHW", (2, 19, 2, 3, 5)), np.stack([IMAGES, IMAGES + 1], axis=2))


@pytest.mark.parametrize("layout", ["NCHW", "HWCN", "NHWC"])
def test_weights_go_into_blocks_and_back(layout: str) -> None:
    weights = convert(IMAGES, "NCHW", layout)
    packed = convert(weights, layout, "FRACTAL_Z")
    assert packed.shape == (2 * 3 * 5, 1, 16, 16)
    assert packed[15 + 4, 0, 1, 2] == IMAGES[1, 18, 0, 4]  # block 1 of channels, row 0, column 4
    assert np.array_equal(convert(packed, "FRACTAL_Z", layout, weights.shape), weights)


def test_matrices_are_put_together() -> None:
    rows = np.arange(2 * 18 * 20, dtype=np.float32).reshape(2, 18, 20)
    padded = np.pad(rows, ((0, 0), (0, 14), (0, 12)))
    nz = padded.reshape(2, 2, 16, 2, 16).transpose(0, 3, 1, 2, 4)
    assert np.array_equal(convert(nz, "FRACTAL_NZ", "ND", rows.shape), rows)
    assert np.array_equal(convert(nz[0], "FRACTAL_NZ", "ND", (18, 20)), rows[0])


@pytest.mark.parametrize(
    ("values", "source", "target", "shape", "said"),
    [
        (blocked(IMAGES), "NC1HWC0", "NCHW", (2, 3, 5, 19), "C has 32 elements"),
        (blocked(IMAGES), "NC1HWC0", "NCDHW", (), "different axes"),
        (convert(IMAGES, "NCHW", "FRACTAL_Z"), "FRACTAL_Z", "NCHW", (), "is to be named"),
        (np.zeros((2, 2, 16, 16)), "FRACTAL_NZ", "ND", (64, 64), "does not hold"),
        (IMAGES, "FRACTAL_Z_C04", "NCHW", (), "no way leads"),
        (IMAGES[0], "NC1HWC0", "NCHW", (), "3 dimensions, the format 5"),
    ],
)
def test_what_cannot_be_told_is_refused(
    values: np.ndarray, source: str, target: str, shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(UnreadableError, match=said):
        convert(values, source, target, shape)
