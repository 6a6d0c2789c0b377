"""Loading what writing takes (Arrow, the store) beside the training, once there is something to write.

It takes 150 ms, most of what a capture would make an import of the adapter cost. A process that is forked in the middle of an
import would wait for ever where it imports the same: the thread that holds the import's lock did not come along. So a fork waits.
"""

from __future__ import annotations

import os
import threading

_loading = threading.RLock()


def load() -> None:
    """Import what the writer's thread needs; later calls cost nothing."""
    with _loading:
        from trueup.foundation.store import Writer as Writer
        from trueup.recording.recorder import columns as columns


def _forked() -> None:
    global _loading
    _loading = threading.RLock()


os.register_at_fork(before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_forked)
