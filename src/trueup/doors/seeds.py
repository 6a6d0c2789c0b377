"""Seeding everything a training run draws random numbers from."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import numpy as np

from trueup.foundation.model import TrueupError


def seed_all(seed: int = 1234, *, deterministic: bool = False) -> None:
    """Seed Python, NumPy and every framework that is already imported, on every device it knows.

    Args:
        seed: 0 to 2**32 - 1.
        deterministic: also ask the frameworks for deterministic kernels (slower; PyTorch raises where it has none).

    Example:
        >>> import trueup
        >>> trueup.seed_all(1234)

    Raises:
        TrueupError: the seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise TrueupError(f"seed {seed} is out of range: expected 0 to {2**32 - 1}")
    os.environ["PYTHONHASHSEED"] = str(seed)  # for processes started from here; this one has its hash seed already
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        _seed_torch(torch, seed, deterministic)
    if (paddle := sys.modules.get("paddle")) is not None:
        paddle.seed(seed)
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        tensorflow.random.set_seed(seed)
        if deterministic:
            tensorflow.config.experimental.enable_op_determinism()


def _seed_torch(torch: Any, seed: int, deterministic: bool) -> None:
    torch.manual_seed(seed)  # reaches CUDA, MPS, XPU and a registered PrivateUse1 device too
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
