"""A plugin: what is there once the tests are collected is left alone by garbage collection, which took a tenth of the time.

Modules and tests are a million objects, and a full collection looks at each. What a test makes is collected, but not every 700
objects: the young that a collection finds in use it looks at twice more.
"""

from __future__ import annotations

import gc

gc.disable()  # until then next to nothing is garbage


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
