"""A short soak: memory does not grow with steps, idle or recording; `make soak` is the long form, and prints the figures."""

from __future__ import annotations

import pytest
import soak


@pytest.mark.parametrize(("name", "steps", "allowed"), [("idle", 300, 20.0), ("api stats", 60, 700.0), ("aten stats", 60, 700.0)])
def test_memory_stays_flat(name: str, steps: int, allowed: float) -> None:
    """Allowed are KB a step: so few steps show the allocator's noise (some MB), and a leak of a step's tensors (3 MB) all the same."""
    flat, said = soak.verdict(name, soak.in_process(name, steps), allowed)
    print(said)
    assert flat, said
