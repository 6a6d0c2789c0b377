"""The capture of TensorFlow that runs in this process, and `trueup.capture` for TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trueup.recording.adapters.tensorflow.scopes import layer_class
from trueup.recording.adapters.tensorflow.session import Session
from trueup.recording.recorder import CaptureOptions
from trueup.recording.recorder.running import Capture, Running, root_manifest, roots

running: Running[Session] = Running()


def capture(directory: str | Path, model: Any | Iterable[Any] | None, options: CaptureOptions) -> Capture[Session]:
    """Make a capture of what runs inside its ``with`` block; see `trueup.capture`."""
    session = Session(Path(directory), options, root_manifest(options))
    kind = layer_class()
    for root in roots(model, object if kind is None else kind):
        session.scopes.register(root)
    return Capture(session, running)
