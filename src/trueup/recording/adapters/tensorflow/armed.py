"""An armed process that imported TensorFlow: its session begins then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.recording.adapters import adapter
from trueup.recording.adapters.tensorflow.environment import rank_and_world
from trueup.recording.recorder.armed import BaseArmed

if TYPE_CHECKING:
    from trueup.recording.adapters.tensorflow.session import Session
    from trueup.recording.recorder.options import CaptureOptions


class Armed(BaseArmed):
    """The capture of this process."""

    adapter = adapter("tensorflow")
    no_group = "it is a child of multiprocessing, and TensorFlow does not tell which of those train"

    def rank(self) -> int | None:
        """Return this process's rank; None when nothing says so."""
        return rank_and_world()[0]

    def await_others(self, *, at_once: bool) -> None:
        """Do nothing: TensorFlow's clusters are told by the environment, when the process begins."""

    def open(self, options: CaptureOptions) -> Session:
        """Make the session, of a capture or of a watch."""
        from trueup.recording.adapters.tensorflow.session import Session

        if self._watch is None:
            return Session(self._directory, options, self._root)
        from trueup.recording.adapters.tensorflow.watching_session import armed

        return armed(self._directory, options, self._watch, self._root)
