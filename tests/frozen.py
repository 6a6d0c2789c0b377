"""A plugin: what is there once the tests are collected is left alone by garbage collection, which took a tenth of the time.

Modules and tests are a million objects, and a full collection looks at each, as does a capture's search for what was built before
it. So it is with the modules that tests import later. What a test makes is collected, but not every 700 objects: the young that a
collection finds in use it looks at twice more.
"""

from __future__ import annotations

import gc
import sys

GREW = 100_000
"""Blocks of memory: PyTorch's optimizers import half a million with the first of them."""

gc.disable()  # until then next to nothing is garbage
_blocks = [0]


def pytest_collection_finish() -> None:
    gc.enable()
    _freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_logfinish() -> None:
    if sys.getallocatedblocks() > _blocks[0] + GREW:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    _blocks[0] = sys.getallocatedblocks()
