"""A plugin: what is there once the tests are collected is left alone by garbage collection, which took a tenth of the time.

Modules and tests are a million objects, and a full collection looks at each. What a test makes is collected as ever.
"""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
