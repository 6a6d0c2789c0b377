"""`PrecisionDebugger` of msprobe 26.x: dumps what runs between `start` and `stop`, as ``config.json`` says."""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trueup.foundation.model import PHASES
from trueup.recording.adapters.torch.context import paths
from trueup.recording.adapters.torch.environment import rank_and_world
from trueup.recording.recorder import CaptureOptions
from trueup_compat.msprobe.config import Config, ConfigError, enabled_now, read
from trueup_compat.msprobe.entries import asked
from trueup_compat.msprobe.gradients import Gradients
from trueup_compat.msprobe.loading import Loading
from trueup_compat.msprobe.saving import Saved, can_be_saved
from trueup_compat.msprobe.selection import wanted
from trueup_compat.msprobe.tree import Tree
from trueup_compat.naming import Names
from trueup_compat.only_one import OnlyOne
from trueup_compat.recording import Recording, models_of

NATIVE = "trueup"
"""Name of the native capture in the dump's folder."""
SAVED_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,150}")
"""Names of variables, which are files' names, too."""


class PrecisionDebugger(OnlyOne):
    """Dumps steps of a training.

        debugger = PrecisionDebugger(config_path="./config.json")
        for batch in loader:
            debugger.start(model)
            ...
            debugger.stop()
            debugger.step()

    Args:
        config_path: of ``config.json``.
        task: goes before the file's, as do the others: ``statistics``, ``tensor`` or ``structure``.
        dump_path: folder of the dump.
        level: ``L0``, ``L1``, ``mix`` or ``debug``.
        step: the steps to dump; none: all.

    Raises:
        ConfigError: the configuration cannot be read, has an unknown key, or asks for what is not there.
    """

    _error = ConfigError

    def __init__(
        self, config_path: str | os.PathLike[str] | None = None, task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None, level: str | None = None, step: Sequence[int | str] | None = None,
    ) -> None:  # fmt: skip
        if self._made:
            return
        path = None if dump_path is None else os.fspath(dump_path)
        self.config: Config = read(config_path, {"task": task, "dump_path": path, "level": level, "step": step})
        for said in self.config.said:
            _say(said)
        self._path = None if config_path is None else Path(config_path)
        self._file, self._enabled = _signature(self._path), self.config.enabled
        self._names = Names()
        self._number, self._rank = 0, None  # type: tuple[int, int | None]
        self._recording: Recording | None = None
        self._loading = None if self.config.load is None else Loading(self.config.load)
        self._saved: Saved | None = None
        self._gradients: Gradients | None = None
        type(self)._made = True

    @classmethod
    def start(
        cls, model: Any = None, token_range: Any = None, rank_id: int | None = None, scheduled_tokens: Any = None
    ) -> None:
        """Dump from here on, if the step is wanted.

        Args:
            model: gives modules their paths; level L0 and mix, and ``load``, need it.
            token_range: refused, as ``scheduled_tokens`` is: they are for inference services.
            rank_id: number of this process's folder, where the process group's is not it.
            scheduled_tokens: see ``token_range``.

        Raises:
            ConfigError: a level of modules has no model, or ranges of tokens are asked for.
            TrueupError: another capture is running in this process.
        """
        if token_range is not None or scheduled_tokens is not None:
            raise ConfigError("token_range and scheduled_tokens are for inference services: leave them out")
        if rank_id is not None and (type(rank_id) is not int or rank_id < 0):
            raise ConfigError(f"rank_id {rank_id!r}: expected a number from 0 on")
        cls._the()._start(model, rank_id)

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Say which number the present step has: of a training that was resumed.

        Raises:
            ConfigError: it is no number, or steps were dumped already.
        """
        one = cls._the()
        if type(step) is not int or step < 0 or one._recording is not None:
            raise ConfigError(f"set_init_step({step!r}): expected a number from 0 on, before the first start()")
        one._number = step

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:
        """Keep a variable of the script, at level ``debug``: in ``debug.json``, and its gradient when it comes.

        Args:
            variable: a tensor, number or text, or lists and dicts of them; anything else is left out, which is said.
            name: in the file, followed by how often it was saved in the step.
            save_backward: whether gradients are kept, too.

        Raises:
            ConfigError: there is no debugger.
            TrueupError: it cannot be written.
        """
        cls._the()._save(variable, name, save_backward)

    @classmethod
    def register_custom_api(cls, module: Any, api: str, api_prefix: str | None = None) -> None:  # noqa: ARG003 - the tool's
        """Say that a function of the script's is dumped by the functions that it calls.

        Raises:
            ConfigError: there is none of that name.
        """
        if not hasattr(module, api):
            raise ConfigError(f"register_custom_api: {module} has no {api}")
        _say(f"{api} needs no registration: the functions that it calls are dumped, under their own names")

    @classmethod
    def restore_custom_api(cls, module: Any, api: str) -> None:
        """Do nothing: nothing was replaced."""

    @classmethod
    def module_dump(cls, module: Any, name: str) -> None:
        """See `trueup_compat.msprobe.module_dump`."""
        recording = cls._the()._recording
        if not isinstance(module, torch.nn.Module) or not isinstance(name, str) or not name:
            raise ConfigError(f"module_dump: expected a torch.nn.Module and a name, got {type(module).__name__} and {name!r}")
        if "module" in cls._the().config.levels:
            _say(f"module_dump has no effect: level {cls._the().config.level} dumps each module")
        elif recording is not None:
            recording.dump_module(module, f"{name}.{type(module).__name__}")

    @classmethod
    def module_dump_end(cls) -> None:
        """See `trueup_compat.msprobe.module_dump_end`."""
        recording = cls._the()._recording
        if recording is not None:
            recording.dump_functions()

    def _is_wanted(self) -> bool:
        rank = self._rank if self._rank is not None else rank_and_world()[0] or 0
        return (not self.config.steps or self._number in self.config.steps) and (not self.config.ranks or rank in self.config.ranks)

    def _look_at_file(self) -> None:
        """Follow ``dump_enable`` in the file, where it was there at the beginning, as the tool does."""
        if self._path is None or self._file == (found := _signature(self._path)):
            return
        self._file = found
        enabled = enabled_now(self._path)
        if enabled is not None and enabled != self._enabled:
            self._enabled = enabled
            _say(f"step {self._number}: {self._path} says dump_enable {str(enabled).lower()} now; nothing else of it is read again")

    def _start(self, model: Any, rank_id: int | None) -> None:
        self._look_at_file()
        self._rank = rank_id if rank_id is not None else self._rank
        if not self._enabled or not self._is_wanted():
            return
        models = models_of(model)
        if self.config.dumps:
            self._dump(models)
        if self._loading is not None and self.config.load is not None and not self._loading.on:
            if not models:
                raise ConfigError("load gives modules other inputs: give start(model) the model")
            rank = self._rank if self._rank is not None else rank_and_world()[0] or 0
            if self.config.load.wants(self._number, rank):
                self._loading.start(models, self._number, self._place())

    def _dump(self, models: Sequence[torch.nn.Module]) -> None:
        if "module" in self.config.levels and not models and self._recording is None:
            raise ConfigError(f"level {self.config.level} dumps modules: give start(model) the model")
        if self._recording is None:
            self._recording = self._begin(models)
        if self._gradients is not None:
            for path, module in (pair for model in models for pair in paths(model)):
                self._gradients.await_those_of(path, module)
        if not self._recording.recorder.on:
            self._recording.switch_on(wanted(self.config))

    def _place(self) -> str:
        """Return the name of this process's folder in a step's."""
        rank, world = rank_and_world()
        if self._rank is not None:
            return f"rank{self._rank}"
        grouped = world > 1 or (torch.distributed.is_available() and torch.distributed.is_initialized())
        return f"rank{rank or 0}" if grouped else f"proc{os.getpid()}"

    def _begin(self, models: Sequence[torch.nn.Module]) -> Recording:
        """Begin with the first step that is wanted; the others cost nothing."""
        native = self.config.path / NATIVE
        held = ((path, named) for model in models for path, module in paths(model) for named in module._parameters.items())
        trained = {f"{path}.{name}" for path, (name, parameter) in held if parameter is not None and parameter.requires_grad}
        tree = Tree(self.config, native, self._place(), trained)
        steps = list(self.config.steps) or None
        phases = tuple(phase for phase in PHASES if phase != "optimizer")
        options = CaptureOptions.of(level=self.config.captured, detail=self.config.detail, phase=phases, steps=steps)
        all_modules = "module" in self.config.levels
        if "module" in self.config.levels and self.config.task != "structure" and asked(self.config.sides, "backward", "output"):
            self._gradients = Gradients(tree.tensors, self.config.summary, tree.keeps, self._dumped_step)
            tree.gradients = self._gradients.of_step
        recording = Recording(native, options, models, self._names, tree.write, all_modules=all_modules)
        for _ in range(self._number):
            recording.recorder.end_step()
        recording.start()
        recording.session.steps_by_hand()
        return recording

    def _dumped_step(self) -> int | None:
        on = self._recording is not None and self._recording.recorder.on
        return self._number if on else None

    def _stop(self) -> None:
        if self._loading is not None:
            self._loading.stop()
        if self._recording is not None and self._recording.recorder.on:
            self._recording.switch_off()

    def _step(self) -> None:
        self._stop()
        self._number += 1
        if self._loading is not None:
            self._loading.end_step()
        self._write_saved()
        if self._recording is not None:
            self._recording.end_step()
            self._names.reset()
        self._look_at_file()

    def _save(self, variable: Any, name: str, backward: bool) -> None:
        if self.config.level != "debug" or not self._enabled or not self._is_wanted():
            return
        if not can_be_saved(variable) or not isinstance(name, str) or not SAVED_NAME.fullmatch(name):
            kind = type(variable).__name__
            _say(f"save({kind}, {name!r}) is left out: expected tensors, numbers or text, in lists and dicts, and a name")
            return
        if self._saved is None:
            self._saved = Saved(self.config.path / f"step{self._number}" / self._place(), self.config.task)
            atexit.register(self._write_saved)
        self._saved.save(variable, name, backward=bool(backward))

    def _write_saved(self) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            atexit.unregister(self._write_saved)
            saved.write()

    def _finish(self) -> None:
        if self._loading is not None:
            self._loading.stop()
        self._write_saved()
        if self._gradients is not None:
            self._gradients.remove()
        if self._recording is not None:
            self._recording.finish()


def _signature(path: Path | None) -> tuple[int, int] | None:
    """Return what changes when a file does."""
    try:
        found = None if path is None else path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size)


def _say(text: str) -> None:
    print(f"trueup: {text}", file=sys.stderr, flush=True)
