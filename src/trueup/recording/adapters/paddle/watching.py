"""`trueup.watch` for Paddle: rows are looked at before an optimizer changes the parameters and at a step's end."""

from __future__ import annotations

import threading
from typing import Any

from trueup.analysis.watch.watcher import WatchedSession
from trueup.recording.adapters.paddle.optimizers import skipped
from trueup.recording.adapters.paddle.session import Session


class WatchSession(WatchedSession, Session):
    """A session whose recorder keeps the present step; see `WatchedSession`."""

    def updates(self, optimizer: Any, *, scaled: bool) -> None:
        """Look, as the parameters are about to change; ``scaled``: a GradScaler steps, which tells by an auxiliary variable to
        skip (Paddle 2.4 to 3.3)."""
        if threading.get_ident() != self._thread or self.over or self.threads.state.passes:
            return
        skips = False
        with self.observing(self.threads.state, "what a GradScaler found"):
            skips = scaled and bool(optimizer._get_auxiliary_var("found_inf"))
        self.look_before_update(scaler_skips=skips)

    def scaled(self, scaler: Any, scale: Any, *, stepped: bool) -> None:
        """Note the loss scale of a step; look at one that never came to its optimizer."""
        if not self.active or threading.get_ident() != self._thread:
            return
        with self.observing(self.threads.state, "the loss scale"):
            self.watcher.scaled(scale, skipped=skipped(scaler))
        if not stepped:
            self.look_before_update(scaler_skips=True)
