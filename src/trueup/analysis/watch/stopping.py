"""Stopping a run on all its ranks, without a message that the training did not send itself, and without a hang.

The rank with the last hit that was allowed writes the file ``stop`` into the watch's directory and goes on for one step more. No
rank can finish that step before the first has sent its part of it, which it does after writing; so all find the file when they
look at that step, before its optimizer, and stop there. For ranks that never get there (they wait for one that is gone, or see a
file system late) a thread looks at the file too: it ends the process once three steps' time and 30 seconds have passed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from trueup.foundation.redaction import redacted
from trueup.recording.recorder.watch_options import STOPPED, WatchStopped

FILE = "stop"
LOOK_SECONDS = 2.0
GRACE = 30.0


class Stopper:
    """Stops this process when the run is to stop.

    Args:
        directory: of the watch, shared by all ranks.
        rank: of this process.
        world: how many ranks there are.
    """

    def __init__(self, directory: Path, rank: int, world: int) -> None:
        self._file = directory / FILE
        self._rank, self._world = rank, world
        self._longest, self._began = 0.0, time.monotonic()
        self._over = threading.Event()
        self.saying: list[str] = []

    def start(self) -> None:
        """Begin to look for ranks that stopped without this one."""
        if self._world > 1:
            threading.Thread(target=self._guard, name="trueup-stop", daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._over.set()

    def step(self) -> None:
        """Note that a step is over: how long they take tells how long to wait for one."""
        now = time.monotonic()
        self._longest, self._began = max(self._longest, now - self._began), now

    def ask(self, step: int, said: str) -> None:
        """Ask all ranks to stop: this one at once where it is alone, else all when they look at the next step."""
        at = step + (self._world > 1)
        temporary = self._file.with_name(f"{FILE}.{self._rank}.tmp")
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(redacted({"rank": self._rank, "step": step, "at": at, "said": said})))
        with suppress(FileExistsError):  # the first one counts
            os.link(temporary, self._file)
        temporary.unlink()

    def stop_if_due(self, step: int) -> None:
        """Stop where that was asked for, by whichever rank.

        Raises:
            WatchStopped: now.
        """
        order = self._order()
        if order is None or step < int(order["at"]):
            return
        self._over.set()
        if int(order["rank"]) == self._rank:
            who = ""
        else:
            who = f"rank {self._rank} stops because rank {order['rank']} had its last hit in step {order['step']}: "
        print(f"trueup: {who}{order['said']}", file=sys.stderr, flush=True)
        raise WatchStopped(STOPPED)

    def _order(self) -> dict[str, str | int] | None:
        try:
            order = json.loads(self._file.read_text())
            return order if {"rank", "step", "at", "said"} <= order.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def _guard(self) -> None:
        asked = None
        while not self._over.wait(LOOK_SECONDS):
            if asked is None and self._order() is not None:
                asked = time.monotonic()
            if asked is not None and time.monotonic() - asked > GRACE + 3 * self._longest:
                print(f"trueup: rank {self._rank} was asked to stop and reached no optimizer's step since: ended", file=sys.stderr,
                      flush=True)  # fmt: skip
                os._exit(STOPPED)
