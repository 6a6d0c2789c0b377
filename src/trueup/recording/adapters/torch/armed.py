"""An armed process that imported PyTorch: its session begins then, or when it joins a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trueup.recording.adapters.torch.environment import rank_and_world
from trueup.recording.engine.armed import BaseArmed
from trueup.recording.registry import adapter


class Armed(BaseArmed):
    """The capture of this process, present or future, or its watch."""

    adapter = adapter("torch")
    no_group = "it joined no process group, and a child of multiprocessing is captured from the moment it does"

    def rank(self) -> int | None:
        return rank_and_world()[0]

    def await_others(self, *, at_once: bool) -> None:  # noqa: ARG002
        """Arrange that `joined` is called whenever this process gets a default process group. Also where it is captured before:
        a short run ends before the first flush asks for the rank."""
        _when_group_is_set(self.joined)

    def rejoined(self, session: Any, rank: int | None) -> None:
        """Record the rank while there is a group to ask."""
        if session.rank not in (None, rank):
            session.recorder.note(f"rank {session.rank} is rank {rank} of its process group, which it joined too late")
        session.update_active()


def _when_group_is_set(callback: Callable[[], None]) -> None:
    """Call ``callback`` whenever this process gets a default process group, by `_update_default_pg`, which every way of
    initialising looks up when called (PyTorch 2.1 to 2.13); `init_process_group` itself may have been imported by name before."""
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
