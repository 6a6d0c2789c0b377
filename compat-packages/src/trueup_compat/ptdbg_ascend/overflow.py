"""The overflow check: a watch of the run, whose hits become ptdbg_ascend's files and its exception."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueup.analysis.watch.saving import each
from trueup.analysis.watch.watcher import Found, Watcher
from trueup.foundation.store import open_capture
from trueup.recording.adapters.torch.environment import rank_and_world
from trueup.recording.adapters.torch.session import running
from trueup.recording.adapters.torch.watching import WatchSession
from trueup.recording.engine.replacing import Replacement
from trueup.recording.engine.session import root_manifest
from trueup.recording.recorder import Call
from trueup.recording.recorder.options import WatchOptions, capture_options
from trueup.recording.recorder.recorder import Recent
from trueup.recording.recorder.rows import Rows
from trueup_compat.files import frames_of, payload_of, savable
from trueup_compat.naming import NamedOp, NamingKeeper, lose_the_loss
from trueup_compat.ptdbg_ascend.errors import CompareException
from trueup_compat.ptdbg_ascend.layout import Layout
from trueup_compat.ptdbg_ascend.tree import in_tree
from trueup_compat.recording import leave_place, take_place

OVERFLOWED = 101
"""The flag of an overflow's rows, which have five fields and no statistics."""


class OverflowCheck:
    """Watches a run from `start` on.

    Args:
        layout: of the files.
        path: the dump's folder.
        tag: the dump's tag.
        rank: of the tool's folder.
        models: whose modules' paths name the scopes.
        most: overflows after which the training is ended by a ValueError; -1: never.
        filtered: whether integers, booleans and scalars are left out of the files.
    """

    def __init__(
        self, layout: Layout, path: Path, tag: str, rank: int, models: Sequence[torch.nn.Module], most: int, filtered: bool
    ) -> None:
        self._layout, self._most, self.filtered = layout, most, filtered
        self._folder = layout.folder(layout.root(path, tag), 0, rank)
        self._native = layout.native(path, tag)
        options = capture_options(None, None)
        self.session = _Session(self._native, options, WatchOptions(), root_manifest(options, "tensor"), self)
        for model in models:
            self.session.scopes.register(model)
        self.found = 0
        """Overflows so far."""
        self.last: Path | None = None
        """File of the last one."""

    def start(self) -> None:
        """Begin.

        Raises:
            CompareException: the folder cannot be written.
            TrueupError: a capture is running in this process.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # said before the run, not when something was found
        except OSError as error:
            said = f"overflows cannot be saved in {self._folder}: {error.strerror}; set_dump_path to a folder that may be written"
            raise CompareException(CompareException.WRITE_FILE_ERROR, said) from None
        take_place(self.session)
        if rank_and_world()[1] == 1 and self._native.exists() and any(self._native.glob("step-*/manifest.json")):
            shutil.rmtree(self._native)  # of an earlier run, as the tool does with what has the same tag
        self.keeper.on = True
        self.session.start()
        atexit.register(self._at_exit)

    @property
    def keeper(self) -> NamingKeeper:
        """The recorder, which can be switched on and off."""
        assert isinstance(self.session.keeper, NamingKeeper)
        return self.session.keeper

    def finish(self) -> None:
        """Look at what is left and end."""
        if running.session is self.session:
            leave_place(self.session)
            self.session.stop()
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if running.session is self.session:
            self.session.finish()

    # ---------------------------------------------------------------- a hit
    def add(self, found: Sequence[Found], rows: Rows, saved: str | None) -> None:
        """Write the files of what a look has found."""
        for one in found:
            if self._most < 0 or self.found < self._most:
                self._write(one.call, rows, saved)

    def raise_if_due(self) -> None:
        """End the training where that was asked for.

        Raises:
            ValueError: now.
        """
        if 0 < self._most <= self.found:
            raise ValueError(f"[overflow {self.found} times]: dump file is saved in '{self.last}'.")

    def _write(self, call: Call, rows: Rows, saved: str | None) -> None:
        self.found += 1
        separator = self._layout.separator
        named = call.kind.op.name if isinstance(call.kind.op, NamedOp) else None
        name = named.text(separator) if named is not None else call.op.replace("::", separator)
        now = datetime.now(timezone.utc).strftime("%Y%m%d_%H%M%S")
        stem = f"{name}_{self.found}" if self._layout.has_steps else f"Overflow_info_{now}_{self.found}"
        tensors = self._folder / stem
        self.last = tensors.with_name(f"{stem}.pkl")
        frames, text = self.keeper.sites.known().get(-1 if call.site is None else call.site, ((), None))
        said = f"module name :'{name}' is overflow and dump file is saved in '{self.last}'"
        try:
            tensors.mkdir(parents=True, exist_ok=True)
            lines = self._rows(call, name, rows, saved, tensors)
            lines.append([f"{name}{separator}stack_info", frames_of(frames, text)])
            self.last.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        except OSError as error:
            said = f"module name :'{name}' is overflow and dump file '{self.last}' cannot be written: {error.strerror}"
        print(f"[overflow {self.found} times]: {said}", flush=True)

    def _rows(self, call: Call, name: str, rows: Rows, saved: str | None, folder: Path) -> list[list[Any]]:
        """Return the rows of a call; their bytes go into ``folder`` as far as the watch saved them.

        What the filter would leave out is there where nothing that the call made is left: of a loss that overflows.
        """
        kept, rank, separator = {}, 0, self._layout.separator
        if saved is not None:
            capture = open_capture(saved)
            rank = rank_and_world()[0] or 0
            kept = {row["slot"]: row for row in capture.records(rank=rank, seq=call.seq).to_pylist()}
        slots = [slot for _, other, slot, _, _, _ in each(rows) if other.seq == call.seq and slot.tensor is not None]
        named = _named(call, slots, filtered=self.filtered)
        if not any(one.startswith("output.") for one in named):
            named = _named(call, slots, filtered=False)
        lines = []
        for one, slot in named.items():
            whole = f"{name}{separator}{one}"
            lines.append([whole, OVERFLOWED, [], f"torch.{slot.tensor.dtype}", list(slot.tensor.shape)])
            if slot.name in kept and (array := payload_of(capture, rank, kept[slot.name])) is not None:
                np.save(folder / f"{whole}.npy", savable(array), allow_pickle=False)
        return sorted(lines, key=lambda line: (f"{separator}output." in line[0], line[0]))


def _named(call: Call, slots: Sequence[Any], *, filtered: bool) -> dict[str, Any]:
    """Return slots by the tool's names."""
    found = {}
    for slot in slots:
        tensor = slot.tensor
        described = {"op": call.op, "slot": slot.name, "phase": call.phase, "dtype": tensor.dtype, "numel": tensor.numel,
                     "shape": list(tensor.shape)}  # fmt: skip
        if (name := in_tree(described, filtered, ("all",))) is not None:
            found[name] = slot
    return found


class _Session(WatchSession):
    """Looks when a backward pass has ended, too: the tool raised inside the call, whatever optimizer the script has.

    Not sooner: an Inf is a mask, and no overflow, if all that read it heal it. And not where a GradScaler scales: it decides.
    """

    recorder_type = NamingKeeper
    watcher: _Watcher

    def __init__(self, directory: Path, options: Any, watch: WatchOptions, root: dict[str, Any], check: OverflowCheck) -> None:
        super().__init__(directory, options, watch, root)
        self.watcher = _Watcher(self, self.keeper, self.again, watch)
        self.watcher.check = check
        assert isinstance(self.keeper, NamingKeeper)
        lose_the_loss(self, self.keeper)
        self._always.append(Replacement(torch.amp.grad_scaler.GradScaler, "scale", self._scale))
        self._scaled, self._looking = False, False

    def enter_model(self, module: torch.nn.Module) -> None:
        """Look at what an evaluation has done so far: no backward pass will end it."""
        if not torch.is_grad_enabled():
            self._look_and_raise("the forward before")
        super().enter_model(module)

    def end_step(self) -> None:
        """Look at the step, then finish it."""
        super().end_step()
        self._scaled = False

    def _run_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._run_backward(original, *args, **kwargs)
        if torch._C._current_graph_task_id() == -1:
            self._look_and_raise("the backward pass")
        return result

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self._scaled = self._scaled or scaler.is_enabled()
            return original(scaler, *args, **kwargs)

        return scale

    def _look_and_raise(self, when: str) -> None:
        if self._looking or self._scaled or not self.active or self.threads.state.busy or threading.get_ident() != self._thread:
            return
        self._looking = True  # calls that are executed again have backward passes of their own
        try:
            self.look(when)
        finally:
            self._looking = False
        self.watcher.check.raise_if_due()


class _Watcher(Watcher):
    check: OverflowCheck

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._harmless = Recent(0)  # it knows calls by the object that says where they stand, and each has its own here

    def _hit(self, found: Sequence[Found], rows: Rows, *, execute: bool) -> None:
        super()._hit(found, rows, execute=execute)
        self.check.add(found, rows, self.hits[-1].path if self.hits else None)

    def stop_if_due(self, step: int) -> None:
        """End the training after as many overflows as were allowed."""
        super().stop_if_due(step)
        self.check.raise_if_due()
