"""`trueup.watch` for TensorFlow: rows are looked at before an optimizer changes the weights and at a step's end."""

from __future__ import annotations

import threading
from typing import Any

from trueup.analysis.watch.watcher import WatchedSession
from trueup.recording.adapters.tensorflow.session import Session


class WatchSession(WatchedSession, Session):
    """A session whose recorder keeps the present step; see `WatchedSession`."""

    def updates(self, optimizer: Any) -> None:
        """Look, as the weights are about to change, or where they have in a function. A ``LossScaleOptimizer`` makes no step
        where a gradient is not finite: what is bad in such a step is no hit."""
        if threading.get_ident() == self._thread and not self.over and not self.threads.state.passes:
            self.look_before_update(scaler_skips=type(optimizer).__name__ == "LossScaleOptimizer")
