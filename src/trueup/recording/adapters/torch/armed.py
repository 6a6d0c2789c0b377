"""An armed process that imported PyTorch: its session begins then, or when it joins a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trueup.recording.adapters import adapter
from trueup.recording.adapters.torch.environment import rank_and_world
from trueup.recording.recorder.armed import BaseArmed

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session
    from trueup.recording.recorder.options import CaptureOptions


class Armed(BaseArmed):
    """The capture of this process, present or future, or its watch."""

    adapter = adapter("torch")
    no_group = "it joined no process group, and a child of multiprocessing is captured from the moment it does"

    def rank(self) -> int | None:
        """Return this process's rank; None when nothing says so."""
        return rank_and_world()[0]

    def await_others(self, *, at_once: bool) -> None:  # noqa: ARG002
        """Have `joined` called whenever this process gets a default process group.

        Also where it is captured before: a short run ends before the first flush asks for the rank.
        """
        _when_group_is_set(self.joined)

    def open(self, options: CaptureOptions) -> Session:
        """Make the session, of a capture or of a watch."""
        from trueup.recording.adapters.torch.session import Session

        if self._watch is None:
            return Session(self._directory, options, self._root)
        from trueup.recording.adapters.torch.watching_session import armed

        return armed(self._directory, options, self._watch, self._root)

    def started(self, session: Any) -> None:
        """Apply the policy."""
        if self._policy is not None:
            from trueup.recording.adapters.torch.policies import AppliedPolicy
            from trueup.recording.policies import parse

            AppliedPolicy(parse(self._policy[1], self._policy[0]), session.scopes).start()

    def rejoined(self, session: Any, rank: int | None) -> None:
        """Take note of the rank while there is a group to ask."""
        if session.rank not in (None, rank):
            session.recorder.note(f"rank {session.rank} is rank {rank} of its process group, which it joined too late")
        session._update_active()


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
