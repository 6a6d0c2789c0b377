"""An armed process that imported Paddle: its session begins then, or with the process's part in a parallel run.

``paddle.distributed.spawn`` sets the variables that tell a child its rank where it initialises that part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from trueup.recording.engine.armed import BaseArmed
from trueup.recording.engine.environment import rank_and_world
from trueup.recording.registry import adapter


class Armed(BaseArmed):
    """The capture of this process, present or future."""

    adapter = adapter("paddle")
    no_group = "it initialised no parallel run, and a child of multiprocessing is captured from the moment it does"

    def rank(self) -> int | None:
        return rank_and_world()[0]

    def await_others(self, *, at_once: bool) -> None:
        """Arrange that `joined` is called when this process initialises its part in a parallel run."""
        if not at_once:
            _when_initialised(self.joined)

    def forked(self) -> None:
        """A parallel run that was forked begins a capture of its own."""
        _when_initialised(self.joined)


def _when_initialised(callback: Callable[[], None]) -> None:
    """Call ``callback`` when this process has initialised its part in a parallel run (Paddle 2.4 to 3.3)."""
    from trueup.recording.engine.replacing import Sweep

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
