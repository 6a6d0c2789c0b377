"""A watch in a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from trueup.analysis.watch.session import WatchedSession
from trueup.analysis.watch.telling import Hit
from trueup.foundation.model import TrueupError
from trueup.recording.recorder.running import Running


class Watch:
    """A running watch: leaving the ``with`` block ends it; `hits` are what it found.

    Steps end as in a capture: by the optimizers, or by `step()` once it was called.
    """

    def __init__(self, session: Any, running: Running[Any], models: Iterable[Any]) -> None:
        self._session: WatchedSession = session
        self._running = running
        for model in models:
            session.scopes.register(model)

    @property
    def path(self) -> Path:
        """Where hits are saved."""
        return self._session.keeper.directory

    @property
    def hits(self) -> list[Hit]:
        """What was found so far, in order."""
        return list(self._session.watcher.hits)

    def step(self) -> None:
        """End the present step; from now on nothing else does."""
        self._session.step()

    def __enter__(self) -> Watch:
        self._running.refuse_second("`trueup capture` or `trueup watch`")
        if self.path.exists() and (not self.path.is_dir() or any(self.path.glob("step-*")) or (self.path / "stop").exists()):
            raise TrueupError(f"{self.path} is not empty: it holds what another run left; name another directory, or remove it")
        self._session.start()
        self._running.session = self._session
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._running.session is not self._session:  # a forked child leaves the block too
            return
        self._running.session = None
        if error is None:
            self._session.stop()
            self._session.watcher.stop_if_due(self._session.keeper.step)
        else:
            self._session.take_off()
            self._session.finish()
