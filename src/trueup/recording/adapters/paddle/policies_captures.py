"""A policy beside a capture of Paddle: what the capture is not to see, and who stands around whom."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session


def running() -> Session | None:
    """Return the capture that runs in this process."""
    capturing = sys.modules.get("trueup.recording.adapters.paddle.capturing")
    return None if capturing is None else capturing.running.session


class _Quiet(threading.local):
    depth = 0


_quiet = _Quiet()


def busy() -> bool:
    """Tell whether what executes is a capture's own work, or that of a policy."""
    session = running()
    return bool(_quiet.depth) or (session is not None and session.threads.state.busy)


@contextmanager
def quietly() -> Iterator[None]:
    """Let nothing that executes in a block be a call, nor be run in another way."""
    session = running()
    state = None if session is None else session.threads.state
    before = state is not None and state.busy
    _quiet.depth += 1
    if state is not None:
        state.busy = True
    try:
        yield
    finally:
        _quiet.depth -= 1
        if state is not None:
            state.busy = before


@contextmanager
def captures_aside() -> Iterator[None]:
    """Take what a capture put in Paddle's places away in a block, so that it stands around what is put there."""
    capturing = sys.modules.get("trueup.recording.adapters.paddle.capturing")
    if capturing is None:
        yield
        return
    with capturing.aside():
        yield
