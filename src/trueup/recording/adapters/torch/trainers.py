"""What the callbacks for trainers share: a capture that begins and ends with a training run."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

from trueup.recording.adapters.torch.capturing import capture, running
from trueup.recording.adapters.torch.session import Session
from trueup.recording.recorder import CaptureOptions
from trueup.recording.recorder.running import Capture


class TrainingCapture:
    """A capture around one training run of a trainer.

    A process that is captured already (``trueup capture -- ...``) keeps that capture; then only its steps are ended here.

    Args:
        directory: where the capture goes; must not hold one yet.
        options: keywords of `trueup.capture`, checked at once.

    Raises:
        TrueupError: an option is unknown or selects nothing.
    """

    def __init__(self, directory: str | Path, options: dict[str, Any]) -> None:
        self._directory, self._options = directory, CaptureOptions.of(**options)
        self._capture: Capture[Session] | None = None

    def begin(self, model: Any) -> None:
        """Begin the capture; ``model`` names the scopes."""
        if running.session is None:
            self._capture = capture(self._directory, model, self._options)
            self._capture.__enter__()
            atexit.register(self.end)  # a training that raises tells no callback
        if (session := running.session) is not None:
            session.steps_by_hand()

    def step(self) -> None:
        """End a step: the optimizer has stepped."""
        running.step()

    def end(self) -> None:
        """End the capture, if it was begun here."""
        begun, self._capture = self._capture, None
        if begun is not None:
            atexit.unregister(self.end)
            begun.__exit__(None, None, None)
