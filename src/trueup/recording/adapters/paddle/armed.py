"""An armed process that imported Paddle: its session begins then, or with the process's part in a parallel run.

``paddle.distributed.spawn`` sets the variables that tell a child its rank where it initialises that part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from trueup.recording.adapters import adapter
from trueup.recording.adapters.paddle.environment import rank_and_world
from trueup.recording.recorder.armed import BaseArmed

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session
    from trueup.recording.recorder.options import CaptureOptions


class Armed(BaseArmed):
    """The capture of this process, present or future."""

    adapter = adapter("paddle")
    no_group = "it initialised no parallel run, and a child of multiprocessing is captured from the moment it does"

    def rank(self) -> int | None:
        """Return this process's rank; None when nothing says so."""
        return rank_and_world()[0]

    def await_others(self, *, at_once: bool) -> None:
        """Have `joined` called when this process initialises its part in a parallel run."""
        if not at_once:
            _when_initialised(self.joined)

    def open(self, options: CaptureOptions) -> Session:
        """Make the session, of a capture or of a watch."""
        from trueup.recording.adapters.paddle.session import Session

        if self._watch is None:
            return Session(self._directory, options, self._root)
        from trueup.recording.adapters.paddle.watching_session import armed

        return armed(self._directory, options, self._watch, self._root)

    def started(self, session: Any) -> None:
        """Apply the policy."""
        if self._policy is not None:
            from trueup.recording.adapters.paddle.policies import AppliedPolicy
            from trueup.recording.policies import parse

            AppliedPolicy(parse(self._policy[1], self._policy[0]), session.scopes).start()

    def forked(self) -> None:
        """A parallel run that was forked begins a capture of its own."""
        _when_initialised(self.joined)


def _when_initialised(callback: Callable[[], None]) -> None:
    """Call ``callback`` when this process has initialised its part in a parallel run (Paddle 2.4 to 3.3)."""
    from trueup.recording.adapters.paddle.replacing import Sweep

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
