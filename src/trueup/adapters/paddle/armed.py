"""An armed process: a session that begins with Paddle, or with the process's part in a parallel run, and survives a fork.

A process that multiprocessing started has no rank that can be trusted before it initialises its part in a parallel run
(``paddle.distributed.spawn`` sets its variables there). Until then nothing is installed in it but a wrapper around that function.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.adapters.paddle.environment import rank_and_world
from trueup.model import TrueupError

if TYPE_CHECKING:
    from trueup.adapters.paddle.session import Session

NO_GROUP = "it initialised no parallel run, and a child of multiprocessing is captured from the moment it does"


class Armed:
    """The capture of this process, present or future.

    Args:
        directory: the capture.
        options: what to keep, an encoded `CaptureOptions`.
        root: what all processes of the run say in the capture's manifest.
        policy: path and text of the policy to apply; there is none for Paddle.
        watch: encoded `WatchOptions`; there is no watching for Paddle.

    Raises:
        TrueupError: what is asked for is not there for Paddle.
    """

    def __init__(
        self, directory: Path, options: str, root: dict[str, Any], policy: object = None, watch: object = None
    ) -> None:
        for name, asked in (("a policy", policy), ("watch", watch)):
            if asked is not None:
                raise TrueupError(f"{name} is not there for PaddlePaddle yet (docs/paddle.md says what there is)")
        self._directory, self._options, self._root = directory, options, root
        self._session: Session | None = None

    def begin(self, *, at_once: bool) -> None:
        """Capture from now on, or from the moment this process initialises its part in a parallel run."""
        os.register_at_fork(after_in_child=self._forked)
        if at_once:
            self._start()
        else:
            _when_initialised(self._joined)

    def finish(self, ending: str | None) -> None:
        """Write what is left; ``ending`` is a note on how the process ended."""
        if self._session is not None:
            if ending is not None:
                self._session.recorder.note(ending)
            self._session.finish()

    def report(self) -> dict[str, Any]:
        """Say what was recorded, or why nothing."""
        session = self._session
        if session is None:
            return {"process_rank": None, "why": NO_GROUP}
        from trueup.recorder.options import in_ranges
        from trueup.recorder.seen import unused

        rank = rank_and_world()[0] or 0
        recorder = session.recorder
        chosen = in_ranges(rank, recorder.options.ranks)
        return session.report() | {
            "process_rank": rank,
            "selected": recorder.selected,
            "displaced": recorder.displaced,
            "unused": unused(recorder.options, recorder.seen()) if chosen else {},
        }

    def _start(self) -> None:
        from trueup.adapters.paddle import capturing as running
        from trueup.adapters.paddle.session import Session
        from trueup.recorder.options import CaptureOptions

        session = Session(self._directory, CaptureOptions.from_json(self._options), self._root)
        self._session = running._current = session
        session.start()

    def _joined(self) -> None:
        if self._session is not None:
            return
        running = sys.modules.get("trueup.adapters.paddle.capturing")
        if getattr(running, "_current", None) is not None:
            return  # the worker's own code captures it
        try:
            self._start()
        except Exception as error:  # noqa: BLE001 - the training goes on
            print(f"trueup: process {os.getpid()} is not captured: {error}", file=sys.stderr, flush=True)

    def _forked(self) -> None:
        """Let go of the parent's capture, which `capturing` has taken off; a parallel run begins one of its own."""
        if self._session is not None:
            self._session = None
            _when_initialised(self._joined)


def _when_initialised(callback: Callable[[], None]) -> None:
    """Call ``callback`` when this process has initialised its part in a parallel run (Paddle 2.4 to 3.3)."""
    from trueup.adapters.paddle.replacing import Sweep

    module = sys.modules.get("paddle.distributed.parallel")
    original = getattr(module, "init_parallel_env", None)
    if original is None:
        return

    @wraps(original)
    def initialise(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        callback()
        return result

    Sweep([(original, initialise)]).install()
