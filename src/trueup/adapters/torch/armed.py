"""An armed process: a session that begins with PyTorch, or with the process group, and survives a fork.

A process that multiprocessing started has no rank that can be trusted before it joins a process group. Until then
nothing is installed in it but a wrapper around the assignment of the default group, so it pays nothing per call; nor
are the parts of Trueup loaded that record.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trueup.adapters.torch.environment import rank_and_world

if TYPE_CHECKING:
    from trueup.adapters.torch.session import Session

NO_GROUP = "it joined no process group, and a child of multiprocessing is captured from the moment it does"


class Armed:
    """The capture of this process, present or future.

    Args:
        directory: the capture.
        options: what to keep, an encoded `CaptureOptions`.
        root: what all processes of the run say in the capture's manifest.
        policy: path and text of the policy to apply, or None.
        watch: encoded `WatchOptions`, where the process is watched instead.
    """

    def __init__(
        self, directory: Path, options: str, root: dict[str, Any], policy: Sequence[str] | None = None, watch: str | None = None
    ) -> None:
        self._directory, self._options, self._root, self._policy, self._watch = directory, options, root, policy, watch
        self._session: Session | None = None

    def begin(self, *, at_once: bool) -> None:
        """Capture from now on, or from the moment this process joins a process group."""
        _when_group_is_set(self._joined)
        os.register_at_fork(after_in_child=self._forked)
        if at_once:
            self._start()

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
        from trueup.adapters.torch import capturing as running
        from trueup.adapters.torch.session import Session
        from trueup.recorder.options import CaptureOptions

        options = CaptureOptions.from_json(self._options)
        if self._watch is None:
            session = Session(self._directory, options, self._root)
        else:
            from trueup.adapters.torch.watching_session import armed

            session = armed(self._directory, options, self._watch, self._root)
        self._session = running._current = session
        session.start()
        if self._policy is not None:
            from trueup.adapters.torch.policies import AppliedPolicy
            from trueup.remedy import parse

            AppliedPolicy(parse(self._policy[1], self._policy[0]), session.scopes).start()

    def _joined(self) -> None:
        """Take note of the rank while there is a group to ask: a short run ends before the first flush asks for it."""
        rank, _ = rank_and_world()
        session = self._session
        if session is None:
            self._start_late()
            return
        if session.rank not in (None, rank):
            session.recorder.note(f"rank {session.rank} is rank {rank} of its process group, which it joined too late")
        session._update_active()

    def _start_late(self) -> None:
        running = sys.modules.get("trueup.adapters.torch.capturing")
        if getattr(running, "_current", None) is not None:
            return  # the worker's own code captures it
        try:
            self._start()
        except Exception as error:
            if self._policy is not None:  # a run without its policy would be taken for one with it
                raise
            print(f"trueup: process {os.getpid()} is not captured: {error}", file=sys.stderr, flush=True)

    def _forked(self) -> None:
        """Let go of the parent's capture; this process has none before it joins a process group of its own."""
        session, self._session = self._session, None
        if session is None:
            return
        from trueup.adapters.torch import capturing as running

        running._current = None
        session.abandon()
        session.take_off()


def _when_group_is_set(callback: Callable[[], None]) -> None:
    """Call ``callback`` whenever this process gets a default process group.

    `_update_default_pg` is what every way of initialising goes through, and is looked up when called (PyTorch 2.1 to
    2.13); `init_process_group` itself may have been imported by name before.
    """
    if not torch.distributed.is_available():
        return
    c10d: Any = torch.distributed.distributed_c10d
    name = "_update_default_pg" if hasattr(c10d, "_update_default_pg") else "init_process_group"
    original = getattr(c10d, name)

    def set_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if torch.distributed.is_initialized():
            callback()
        return result

    setattr(c10d, name, set_group)
