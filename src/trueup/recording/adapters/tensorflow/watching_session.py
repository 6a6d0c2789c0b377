"""A session of TensorFlow's that watches: rows are looked at before an optimizer changes the weights and at a step's end."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trueup.analysis.watch.again import CannotRerun, Rerun
from trueup.analysis.watch.session import WatchedSession
from trueup.analysis.watch.watcher import Watcher
from trueup.recording.adapters.tensorflow.session import Session
from trueup.recording.recorder import Call, CaptureOptions
from trueup.recording.recorder.keeping import Keeper
from trueup.recording.recorder.watch_options import WatchOptions

NO_REPLAY = (
    "that is not there for TensorFlow; for its tensors run `trueup capture --steps {step}:{following} --detail tensor --stop` "
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

    def updates(self, optimizer: Any) -> None:
        """Look, as the weights are about to change, or where they have in a function.

        A ``LossScaleOptimizer`` makes no step where a gradient is not finite: what is bad in such a step is no hit.
        """
        if threading.get_ident() != self._thread or self.over or self.threads.state.passes:
            return
        self.look("the step", scaler_skips=type(optimizer).__name__ == "LossScaleOptimizer")
        self.watcher.stop_if_due(self.keeper.step)


def armed(directory: Path, options: CaptureOptions, watch: str, root: dict[str, Any]) -> WatchSession:
    """Make the session of a process that `trueup watch` armed; ``watch`` is an encoded `WatchOptions`."""
    return WatchSession(directory, options, WatchOptions(**json.loads(watch)), root)
