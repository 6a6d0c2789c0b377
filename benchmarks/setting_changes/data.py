"""The sentences that all trainings of `settings` learn from: token numbers of uneven lengths, padded; the label is one of four."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from setting_changes.options import Options

SAMPLES, LENGTH, TOKENS, CLASSES, PADDING = 14, 8, 20, 4, 0
EPOCHS = 1


def samples() -> list[tuple[list[int], int]]:
    """Return token numbers and label of each sample."""
    numbers = np.random.RandomState(3)
    lengths = numbers.randint(3, LENGTH + 1, SAMPLES)
    tokens = [numbers.randint(1, TOKENS, length).tolist() for length in lengths]
    return [(one, int(sum(one)) % CLASSES) for one in tokens]


def padded(tokens: Sequence[int], options: Options) -> list[int]:
    """Return token numbers with padding."""
    padding = [PADDING] * (LENGTH - len(tokens))
    return [*padding, *tokens] if options.pads_left else [*tokens, *padding]
