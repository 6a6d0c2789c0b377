"""A session of Paddle's that watches: rows are looked at before an optimizer changes the parameters and at a step's end."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trueup.analysis.watch.again import CannotRerun, Rerun
from trueup.analysis.watch.session import WatchedSession
from trueup.analysis.watch.watcher import Watcher
from trueup.recording.adapters.paddle.scaling import skipped
from trueup.recording.adapters.paddle.session import Session
from trueup.recording.recorder import Call, CaptureOptions
from trueup.recording.recorder.keeping import Keeper
from trueup.recording.recorder.watch_options import WatchOptions

NO_REPLAY = (
    "that is not there for PaddlePaddle; for its tensors run `trueup capture --steps {step}:{following} --detail tensor --stop` "
    "with the same command"
)


class WatchSession(WatchedSession, Session):
    """A session whose recorder keeps the present step.

    Args:
        directory: where hits are saved; nothing is written there before the first.
        options: what is seen.
        watch: when to stop, how much to save.
        root: what all processes of the run say of it.
    """

    recorder_type = Keeper

    def __init__(self, directory: Path, options: CaptureOptions, watch: WatchOptions, root: dict[str, Any]) -> None:
        super().__init__(directory, options, root)
        assert isinstance(self.recorder, Keeper)
        self.keeper = self.recorder
        self.watcher = Watcher(self, self.keeper, self._again, watch)

    def _again(self, calls: Sequence[Call], numbered: Sequence[Call]) -> Rerun:  # noqa: ARG002
        raise CannotRerun(NO_REPLAY.format(step=self.keeper.step, following=self.keeper.step + 1))

    def updates(self, optimizer: Any, *, scaled: bool) -> None:
        """Look, as the parameters are about to change.

        Args:
            optimizer: what changes them.
            scaled: whether a GradScaler steps it, which tells it to skip by an auxiliary variable (Paddle 2.4 to 3.3).
        """
        if threading.get_ident() != self._thread or self.over or self.threads.state.passes:
            return
        skips = False
        with self.observing(self.threads.state, "what a GradScaler found"):
            skips = scaled and bool(optimizer._get_auxiliary_var("found_inf"))
        self.look("the step", scaler_skips=skips)
        self.watcher.stop_if_due(self.keeper.step)

    def scaled(self, scaler: Any, scale: Any, *, stepped: bool) -> None:
        """Note the loss scale of a step; look at one that never came to its optimizer."""
        if not self.active or threading.get_ident() != self._thread:
            return
        with self.observing(self.threads.state, "the loss scale"):
            self.watcher.scaled(scale, skipped=skipped(scaler))
        if not stepped:
            self.look("the step", scaler_skips=True)
            self.watcher.stop_if_due(self.keeper.step)


def armed(directory: Path, options: CaptureOptions, watch: str, root: dict[str, Any]) -> WatchSession:
    """Make the session of a process that `trueup watch` armed; ``watch`` is an encoded `WatchOptions`."""
    return WatchSession(directory, options, WatchOptions(**json.loads(watch)), root)
