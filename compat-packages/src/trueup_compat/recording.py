"""A native capture that an old tool's switches turn on and off; what reached the disk is handed to whoever writes the old files."""

from __future__ import annotations

import atexit
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch

from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout
from trueup.recording.adapters.torch.environment import rank_and_world
from trueup.recording.adapters.torch.session import Session, running
from trueup.recording.engine.session import root_manifest
from trueup.recording.recorder import CaptureOptions
from trueup_compat.clearing import remove
from trueup_compat.names import CallName
from trueup_compat.naming import Names, NamingRecorder, lose_the_loss

Written = Callable[[int, dict[int, CallName]], None]
"""Is told the rank and the names of calls, by their `seq`, that a capture holds now."""

WAIT = timedelta(seconds=60)
"""How long a rank waits for rank 0 to remove what an earlier run left."""
HANDED_ON = 1000
"""Calls on the disk whose files are written when a step ends, as the tool wrote after as many rows."""
_cleared: defaultdict[str, Iterator[int]] = defaultdict(count)
"""How often each directory was cleared."""


class NamingSession(Session):
    """A session whose calls bear the names of the old tools."""

    recorder_type = NamingRecorder
    after_step: Callable[[], None] | None = None

    def end_step(self) -> None:
        """Finish the present step, and hand on what it left."""
        super().end_step()
        if self.after_step is not None:
            self.after_step()


class Recording:
    """Counts calls from `start` on, records them while it is on.

    Args:
        directory: the native capture. One that an earlier run left there is removed when the first call is recorded: the old tools
            write over what has the same tag.
        options: what to keep.
        models: whose modules' paths name the scopes.
        names: counts the calls.
        all_modules: whether each module is recorded, where the level is; else those that `dump_module` is given.
        written: is told what reached the disk, whenever it is switched off and at the end.
    """

    def __init__(
        self, directory: Path, options: CaptureOptions, models: Iterable[torch.nn.Module], names: Names, written: Written,
        *, all_modules: bool = True,
    ) -> None:  # fmt: skip
        self.session = NamingSession(directory, options, root_manifest(options))
        assert isinstance(self.session.recorder, NamingRecorder)
        self.recorder: NamingRecorder = self.session.recorder
        self.recorder.names, self.recorder.all_modules = names, all_modules
        lose_the_loss(self.session, self.recorder)
        for model in models:
            self.session.scopes.register(model)
        self._written, self.used, self._over = written, False, False
        self.session.after_step = self._after_step

    @property
    def directory(self) -> Path:
        """The native capture."""
        return self.recorder.directory

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over

    def start(self) -> None:
        """Begin to count.

        Raises:
            TrueupError: another capture is running in this process.
        """
        take_place(self.session)
        self.session.start()
        atexit.register(self._at_exit)

    def switch_on(self, wanted: Callable[[CallName | None], bool] | None = None) -> None:
        """Record from now on: all calls, or those that ``wanted`` wants.

        Raises:
            TrueupError: the capture cannot be written, or what is in its place is not to be removed.
        """
        if not self.used:
            try:
                run = clear(self.directory)
                self.session._root |= {"run": run} if run is not None else {}
                self.session.claim()
            except OSError as error:
                said = f"the dump cannot be written to {self.directory}: {error.strerror}"
                raise TrueupError(f"{said}\n  next:     give the script a folder that it may write to") from None
            self.used = True
        self.recorder.wanted, self.recorder.on = wanted, True

    def switch_off(self) -> None:
        """Record no more, go on to count, and hand on what was recorded."""
        self.recorder.on = False
        self.recorder.flush()
        self._hand_on()

    def dump_module(self, module: torch.nn.Module, name: str) -> None:
        """Record a module under a name, and no function, until `dump_functions`; its backward is recorded whenever it comes."""
        scopes = self.session.scopes
        scopes.register(module, f"module_dump.{name}")  # without effect where its model is known
        self.recorder.names.call(scopes.path(module, None), name)

    def dump_functions(self) -> None:
        """Go on with functions."""
        self.recorder.names.uncall()

    def end_step(self) -> None:
        """End the present step; from now on nothing else does."""
        self.session.step()

    def finish(self) -> None:
        """End the capture and hand on what was recorded since it was switched off last."""
        if self._over or not self._ours():
            return
        self._over = True
        leave_place(self.session)
        self.session.stop()
        self._hand_on()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if not self._over and self._ours():
            self._over = True
            self.session.finish()
            try:
                self._hand_on()
            except TrueupError as error:  # nobody is left to take it
                print(f"trueup: {error}", file=sys.stderr, flush=True)

    def _after_step(self) -> None:
        """Hand on where there is much: a killed process is to lose a step or two, not all since the switch was turned on."""
        if self.recorder.on and self.recorder.told >= HANDED_ON:
            self.recorder.flush()
            self._hand_on()

    def _ours(self) -> bool:
        """Tell whether this is the process that began it, and not a child that was forked off."""
        return running.session is self.session

    def _hand_on(self) -> None:
        names = self.recorder.take_names()
        if names and self.session.rank is not None:
            self._written(self.session.rank, names)


def take_place(session: Session) -> None:
    """Make a session the one that runs in this process.

    Raises:
        TrueupError: there is one.
    """
    if running.session is not None:
        raise TrueupError(
            f"the script's own dump cannot begin: a capture into {running.session.recorder.directory} is running in this process;\n"
            "  next:     run the script without `trueup capture`, or leave its dump calls out"
        )
    running.session = session


def leave_place(session: Session) -> None:
    """Undo `take_place`."""
    if running.session is session:
        running.session = None


def clear(directory: Path) -> str | None:
    """Remove a capture that an earlier run left, once for all ranks; return an id that they share.

    Ranks of a process group agree through its store: rank 0 removes, the others wait for its word.

    Raises:
        TrueupError: what is there is no capture, or was left by an earlier run and nobody may remove it.
    """
    rank, world = rank_and_world()
    if world == 1:
        remove(directory)
        return None
    store = _store()
    if store is not None:
        key = f"trueup-compat/{directory.absolute()}/{next(_cleared[str(directory.absolute())])}"
        if rank == 0:
            remove(directory)
            store.set(key, os.urandom(8).hex())
        with suppress(RuntimeError):  # rank 0 does not dump
            store.wait([key], WAIT)
            return str(store.get(key).decode())
    if (directory / layout.rank_name(rank or 0)).exists():
        raise TrueupError(
            f"{directory} holds a dump of an earlier run of {world} processes, and siblings may be writing there by now:\n"
            "  next:     remove it before the run begins, or choose another tag"
        )
    return None


def _store() -> Any | None:
    """Return the store of the process group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def rank_of(model: Any, given: int | None) -> int:
    """Return the number of a tool's rank folder: as given, else of the process group, else of the model's device.

    The tools took the device's index even in a job of several machines, where two processes then wrote one folder.
    """
    rank, world = rank_and_world()
    if given is not None:
        return given
    if rank is not None and (world > 1 or "RANK" in os.environ):
        return rank
    parameter = next((p for m in models_of(model) for p in m.parameters()), None)
    index = None if parameter is None else parameter.device.index
    return rank or 0 if index is None else int(index)


def models_of(model: Any) -> list[torch.nn.Module]:
    """Return the modules among what a script gave as its model."""
    given = model if isinstance(model, (list, tuple)) else [model]
    return [one for one in given if isinstance(one, torch.nn.Module)]
