"""What the watched sessions of all adapters have in common: a step's rows are looked at when it ends, and when the run does."""

from __future__ import annotations

from typing import Any

from trueup.analysis.watch.watcher import Watcher
from trueup.recording.recorder.keeping import Keeper
from trueup.recording.recorder.session import BaseSession


class WatchedSession(BaseSession):
    """Stands before an adapter's own session among the bases of its watched one."""

    keeper: Keeper
    watcher: Watcher
    threads: Any

    def stop(self) -> None:
        """Look at what there is and stop to watch."""
        self.look("the last step")
        super().stop()

    def finish(self) -> None:
        """Look at what a process that ends has left, and write what was found."""
        if self.active:
            self.look("the last step", execute=False)
        super().finish()  # type: ignore[safe-super]
        self.watcher.finish()

    def end_step(self) -> None:
        """Look at the step, then finish it."""
        self.look("the end of the step")
        ended = self.keeper.step
        super().end_step()  # type: ignore[misc]
        self.watcher.end_step()
        self.watcher.stop_if_due(ended)

    def report(self) -> dict[str, Any]:
        """Say what this process saw."""
        return super().report() | {"calls": self.keeper.next_seq(), "why": None, "watch": self.watcher.report()}

    def look(self, when: str, *, scaler_skips: bool = False, execute: bool = True) -> None:
        """Look at the rows since the last look; nothing of it is a call.

        Args:
            when: for messages.
            scaler_skips: whether a GradScaler skips the optimizer's step because of what is there.
            execute: whether calls may be executed again.
        """
        if not self.active:
            return
        with self.observing(self.threads.state, f"a look at {when}"):  # type: ignore[attr-defined]
            self.watcher.look(scaler_skips=scaler_skips, execute=execute)
