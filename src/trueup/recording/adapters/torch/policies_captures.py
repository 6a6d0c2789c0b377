"""A policy beside a capture: what the capture is not to see, and who stands around whom."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session


def running() -> Session | None:
    """Return the capture that runs in this process."""
    capturing = sys.modules.get("trueup.recording.adapters.torch.capturing")
    return None if capturing is None else capturing.running.session


def busy() -> bool:
    """Tell whether what executes is a capture's own work."""
    session = running()
    return session is not None and session.threads.state.busy


@contextmanager
def quietly() -> Iterator[None]:
    """Let nothing that executes in a block be recorded."""
    session = running()
    if session is None:
        yield
        return
    state = session.threads.state
    before, state.busy = state.busy, True
    try:
        yield
    finally:
        state.busy = before


@contextmanager
def captures_aside() -> Iterator[None]:
    """Take a capture's replacements away in a block, so that they stand around what is replaced in it."""
    session = running()
    if session is None:
        yield
        return
    with session.compiling.out_of_sight():
        yield
