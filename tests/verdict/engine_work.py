"""What workers are given in tests; each of them imports this, and nothing else of the tests."""

from __future__ import annotations

import os
import signal

from trueup.foundation.model import TrueupError


def twice(number: int) -> int:
    """Double a number; 3 is more than a worker bears, and 5 is damaged."""
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5:
        raise TrueupError("5 is damaged")
    return 2 * number
