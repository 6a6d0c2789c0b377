from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trueup import simdev


@pytest.fixture(autouse=True)
def _healthy() -> Iterator[None]:
    torch.set_num_threads(1)
    simdev.heal()
    yield
    simdev.heal()
