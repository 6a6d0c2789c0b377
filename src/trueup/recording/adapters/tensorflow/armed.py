"""An armed process that imported TensorFlow: its session begins then."""

from __future__ import annotations

from trueup.recording.engine.armed import BaseArmed
from trueup.recording.registry import adapter


class Armed(BaseArmed):
    """The capture of this process."""

    adapter = adapter("tensorflow")
    no_group = "it is a child of multiprocessing, and TensorFlow does not tell which of those train"

    def rank(self) -> int | None:
        from trueup.recording.adapters.tensorflow.session import rank_and_world  # loads what records

        return rank_and_world()[0]

    def await_others(self, *, at_once: bool) -> None:
        """Do nothing: the environment describes a cluster of TensorFlow's when the process begins."""
