"""A watch in a ``with`` block; what it is made of is in the files ``watching_*`` beside this one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch

import trueup
from trueup.adapters.torch import capturing
from trueup.adapters.torch.watching_session import WatchSession
from trueup.adapters.torch.watching_telling import Hit
from trueup.model import TrueupError
from trueup.recorder import CaptureOptions
from trueup.watching import WatchOptions


class Watch:
    """A running watch: leaving the ``with`` block ends it; `hits` are what it found.

    Steps end as in a capture: by the optimizers, or by `step()` once it was called.
    """

    def __init__(
        self, directory: Path, models: Iterable[torch.nn.Module], options: CaptureOptions, watch: WatchOptions
    ) -> None:
        root = {
            "trueup_version": trueup.__version__, "command": sys.argv[:64], "levels": list(options.levels),
            "detail": "tensor", "config": json.loads(options.to_json()),
        }  # fmt: skip
        self._session = WatchSession(directory, options, watch, root)
        for model in models:
            self._session.scopes.register(model)

    @property
    def path(self) -> Path:
        """Where hits are saved."""
        return self._session.recorder.directory

    @property
    def hits(self) -> list[Hit]:
        """What was found so far, in order."""
        return list(self._session.watcher.hits)

    def step(self) -> None:
        """End the present step; from now on nothing else does."""
        self._session.step()

    def __enter__(self) -> Watch:
        if capturing._current is not None:
            raise TrueupError(
                f"a capture into {capturing._current.recorder.directory} is already running in this process; "
                "end it first (or run the script without `trueup capture` or `trueup watch`)"
            )
        if self.path.exists() and (not self.path.is_dir() or any(self.path.glob("step-*")) or (self.path / "stop").exists()):
            raise TrueupError(f"{self.path} is not empty: it holds what another run left; name another directory, or remove it")
        self._session.start()
        capturing._current = self._session
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if capturing._current is not self._session:  # a forked child leaves the block too
            return
        capturing._current = None
        if error is None:
            self._session.stop()
            self._session.watcher.stop_if_due(self._session.keeper.step)
        else:
            self._session.take_off()
            self._session.finish()
