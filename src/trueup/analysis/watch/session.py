"""A watch in a ``with`` block, and its session: it looks at a step's rows when the step ends, and when the run does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trueup.analysis.watch.saving import CannotRerun, Hit, Rerun
from trueup.analysis.watch.watcher import Watcher
from trueup.foundation.model import TrueupError
from trueup.recording.engine.session import BaseSession, Capture, running_of
from trueup.recording.recorder import Call, CaptureOptions
from trueup.recording.recorder.options import WatchOptions
from trueup.recording.recorder.recorder import Keeper

NO_RERUN = (
    "that is not there for {title}; for its tensors run `trueup capture --steps {step}:{following} --detail tensor --stop` "
    "with the same command"
)

W = TypeVar("W", bound="WatchedSession")


class WatchedSession(BaseSession):
    """Stands before an adapter's own session among the bases of its watched one; ``directory`` is made with the first hit."""

    recorder_type = Keeper

    def __init__(self, directory: Path, options: CaptureOptions, watch: WatchOptions, root: dict[str, Any]) -> None:
        super().__init__(directory, options, root)  # type: ignore[call-arg]
        assert isinstance(self.recorder, Keeper)
        self.keeper = self.recorder
        self.watcher = Watcher(self, self.keeper, self.again, watch)

    @classmethod
    def armed(cls: type[W], directory: Path, options: CaptureOptions, watch: str, root: dict[str, Any]) -> W:
        """Make the session of a process that `trueup watch` armed; ``watch`` is an encoded `WatchOptions`."""
        return cls(directory, options, WatchOptions(**json.loads(watch)), root)

    def again(self, calls: Sequence[Call], numbered: Sequence[Call]) -> Rerun:  # noqa: ARG002
        """Execute calls of the step once more; raises CannotRerun unless the adapter keeps what led to them."""
        step = self.keeper.step
        raise CannotRerun(NO_RERUN.format(title=self.adapter.title, step=step, following=step + 1))

    def stop(self) -> None:
        """Look at the last rows and stop watching."""
        self.look("the last step")
        super().stop()

    def finish(self) -> None:
        """Look at the last rows of a process that ends, and write the report."""
        if self.active:
            self.look("the last step", execute=False)
        super().finish()
        self.watcher.finish()

    def end_step(self) -> None:
        """Look at the step, then finish it."""
        self.look("the end of the step")
        ended = self.keeper.step
        super().end_step()
        self.watcher.end_step()
        self.watcher.stop_if_due(ended)

    def report(self) -> dict[str, Any]:
        """Say what this process saw."""
        return super().report() | {"calls": self.keeper.next_seq(), "why": None, "watch": self.watcher.report()}

    def look_before_update(self, *, scaler_skips: bool) -> None:
        """Look before the parameters change, and stop if that is due."""
        self.look("the step", scaler_skips=scaler_skips)
        self.watcher.stop_if_due(self.keeper.step)

    def look(self, when: str, *, scaler_skips: bool = False, execute: bool = True) -> None:
        """Look at the rows since the last look; nothing of it is a call. ``when`` is for messages, ``scaler_skips`` tells whether a
        GradScaler skips the optimizer's step, ``execute`` whether calls may be executed again."""
        if not self.active:
            return
        with self.observing(self.threads.state, f"a look at {when}"):
            self.watcher.look(scaler_skips=scaler_skips, execute=execute)


class Watch(Capture[WatchedSession]):
    """A running watch: leaving the ``with`` block ends it; `hits` are what it found, saved below `path`.

    Steps end as in a capture: by the optimizers, or by `step()` once it was called.
    """

    runs_by = "`trueup capture` or `trueup watch`"

    def __init__(self, session: WatchedSession, models: Iterable[Any]) -> None:
        super().__init__(session, running_of(session.adapter.name))
        for model in models:
            session.scopes.register(model)

    @property
    def hits(self) -> list[Hit]:
        """What was found so far, in order."""
        return list(self._session.watcher.hits)

    def prepare(self) -> None:
        """Refuse, by TrueupError, a directory that holds what another run left; it is made with the first hit."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.glob("step-*")) or (self.path / "stop").exists()):
            raise TrueupError(f"{self.path} is not empty: it holds what another run left; name another directory, or remove it")

    def end(self, error: BaseException | None) -> None:
        """End the watch, and the run if that is due."""
        if error is None:
            self._session.stop()
            self._session.watcher.stop_if_due(self._session.keeper.step)
        else:
            self._session.take_off()
            self._session.finish()
