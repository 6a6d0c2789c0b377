"""The capture of Paddle that runs in this process, and `trueup.capture` for Paddle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import paddle

from trueup.recording.adapters.paddle.session import Session
from trueup.recording.recorder import CaptureOptions
from trueup.recording.recorder.running import Capture, Running, root_manifest, roots

running: Running[Session] = Running()


@contextmanager
def aside() -> Iterator[None]:
    """Take a running capture out of the operators' places for a moment: what is put there meanwhile lies below it.

    For whatever stands in for kernels (a broken one, in an example): in front of the capture it would change results that were
    recorded already.
    """
    session = running.session
    if session is not None:
        session.take_off()
    try:
        yield
    finally:
        if session is not None:
            session.put_on()


def capture(
    directory: str | Path, model: paddle.nn.Layer | Iterable[paddle.nn.Layer] | None, options: CaptureOptions
) -> Capture[Session]:
    """Make a capture of what runs inside its ``with`` block; see `trueup.capture`."""
    session = Session(Path(directory), options, root_manifest(options))
    for root in roots(model, paddle.nn.Layer):
        session.scopes.register(root)
    return Capture(session, running)
