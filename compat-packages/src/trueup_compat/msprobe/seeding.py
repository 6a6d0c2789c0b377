"""`seed_all` of msprobe, and its ``rm_dropout``: it changes what is computed, where a script asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from trueup.doors.training import seed_all as seed_everything
from trueup.recording.engine.replacing import Replacement

DROPOUTS = ("dropout", "dropout2d", "dropout3d")
"""Functions of `torch.nn.functional` whose probability the tool sets to 0; modules call them."""
_removed: list[Replacement] = []


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False, is_enhanced: bool = False) -> None:
    """Seed Python, NumPy and PyTorch.

    Args:
        seed: from 0 to 2**32 - 1.
        mode: asks for deterministic algorithms.
        rm_dropout: from now on dropout keeps every element, which is said.
        is_enhanced: asks for deterministic algorithms; the tool also gave each random call a state of its own, which is not done.

    Raises:
        TrueupError: the seed is out of range.
    """
    seed_everything(seed, deterministic=bool(mode or is_enhanced))
    if rm_dropout and not _removed:
        print("trueup: seed_all(rm_dropout=True): dropout keeps every element from now on, in this process", flush=True)
        _removed.extend(Replacement(torch.nn.functional, name, _keeping_all) for name in DROPOUTS)
        for replacement in _removed:
            replacement.install()


def restore_dropout() -> None:
    """Undo ``rm_dropout``."""
    for replacement in _removed:
        replacement.remove()
    _removed.clear()


def _keeping_all(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a dropout that checks its probability and drops nothing."""

    @functools.wraps(original)
    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        return original(input, 0.0, training, inplace)

    return dropout
