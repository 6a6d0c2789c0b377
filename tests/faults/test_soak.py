"""A short soak: nothing stays behind a step, idle or recording; `make soak` is the long form, in resident memory."""

from __future__ import annotations

import pytest

import soak


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("name", "steps", "allowed"), [("idle", 100, 2.0), ("api stats", 20, 16.0), ("aten stats", 20, 16.0)])
def test_memory_stays_flat(name: str, steps: int, allowed: float) -> None:
    """Allowed are KB a step; a step has some hundred rows of half a KB each, and a tensor counts as a MB."""
    flat, said = soak.verdict(name, soak.in_process(name, steps, "traced"), allowed)
    print(said)
    assert flat, said
