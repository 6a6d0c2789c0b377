"""``load`` of config.json: modules get the inputs that they had in an earlier dump, so that no error is handed on to them."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trueup.recording.engine.replacing import Replacement

ENTRY = re.compile(r"Module\.(?P<module>[\w.]+)\.forward\.\d{1,9}")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The section ``load``, checked."""

    path: Path
    modules: tuple[str, ...]
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    dump: bool
    """``dump_after_load``: whether the run is dumped, too."""

    def wants(self, step: int, rank: int) -> bool:
        """Tell whether anything is loaded in a step."""
        return (not self.steps or step in self.steps) and (not self.ranks or rank in self.ranks)


class _Loaded(torch.autograd.Function):  # type: ignore[misc] # of torch, which mypy does not follow here
    """Another value in the same place of the graph."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, value: list[torch.Tensor]) -> torch.Tensor:  # noqa: ARG004 - the interface
        return value[0]  # in a list, for an input that is returned would be a view, which nobody may write in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradient, None


class Loading:
    """Stands around the call of each module between `start` and `stop`.

    Args:
        options: what to load.
    """

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._names: dict[int, str] = {}
        self._counts: Counter[str] = Counter()
        self._met: set[str] = set()
        self._folder: Path | None = None
        self._replacement = Replacement(torch.nn.Module, "__call__", self._around)
        self.on = False
        """Whether it stands there."""

    def start(self, models: Sequence[torch.nn.Module], step: int, place: str) -> None:
        """Begin; ``place`` is this process's folder, ``rank0``, of which ``proc4711`` finds the one there is."""
        several = len(models) > 1
        for k, model in enumerate(models):
            for path, module in model.named_modules():
                name = ".".join(part for part in (str(k) if several else "", path, type(module).__name__) if part)
                self._names[id(module)] = f"Module.{name}"
        self._folder = _folder(self._options.path / f"step{step}", place)
        if self._folder is None:
            _say(f"load: {self._options.path / f'step{step}'} has no folder of this process: nothing is loaded in this step")
        self.on = True
        self._replacement.install()

    def stop(self) -> None:
        """End, and say what was asked for and never ran."""
        if not self.on:
            return
        self.on = False
        self._replacement.remove()
        if missing := sorted(set(self._options.modules) - self._met):
            known = ", ".join(sorted(self._names.values())[:5])
            _say(f"load: no call {', '.join(missing)} in this step, so nothing was loaded for it; the model has e.g. {known}")

    def end_step(self) -> None:
        """Count from 0 again."""
        self._counts.clear()
        self._met.clear()

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            name = self._names.get(id(module)) if self.on else None
            if name is not None:
                entry = f"{name}.forward.{self._counts[name]}"
                self._counts[name] += 1
                if entry in self._options.modules:
                    self._met.add(entry)
                    args = tuple(self._loaded(entry, ("input",), str(k), given) for k, given in enumerate(args))
                    kwargs = {key: self._loaded(entry, ("kwargs", "input"), key, given) for key, given in kwargs.items()}
            return original(module, *args, **kwargs)

        return call

    def _loaded(self, entry: str, groups: Sequence[str], place: str, given: Any) -> Any:
        """Return the tensor of the earlier dump in the place of one that is given; it stays where it was in the graph."""
        if not isinstance(given, torch.Tensor) or self._folder is None:
            return given
        files = [self._folder / "dump_tensor_data" / f"{entry}.{group}.{place}.pt" for group in groups]
        file = next((one for one in files if one.is_file()), None)
        if file is None:
            _say(f"load: there is no {files[0]}: {entry} keeps its own input {place}")
            return given
        try:
            value = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - whatever a foreign file does to the loader
            _say(f"load: {file} cannot be read ({type(error).__name__}): {entry} keeps its own input {place}")
            return given
        if not isinstance(value, torch.Tensor) or value.shape != given.shape or value.dtype != given.dtype:
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            _say(f"load: {file} holds {got}, expected {given.dtype} {list(given.shape)}: {entry} keeps its own input {place}")
            return given
        loaded = value.detach().to(given.device)
        return _Loaded.apply(given, [loaded]) if given.requires_grad and torch.is_grad_enabled() else loaded


def checked(told: Mapping[str, Any], steps: tuple[int, ...], ranks: tuple[int, ...]) -> LoadOptions | str:
    """Return the section as options, or why it is none."""
    unknown = [str(key)[:80] for key in told if key not in ("path", "modules", "step", "rank", "dump_after_load")]
    modules, path, dump = told.get("modules"), told.get("path"), told.get("dump_after_load", False)
    if unknown:
        return f"unknown keys {', '.join(unknown)}: expected path, modules, step, rank, dump_after_load"
    if not isinstance(modules, list) or not modules or not all(isinstance(one, str) and ENTRY.fullmatch(one) for one in modules):
        return "modules: expected a list of names such as Module.encoder.Linear.forward.0"
    if not isinstance(path, str) or not Path(path).is_dir():
        return f"path {path!r}: expected the folder of an earlier dump of task tensor, which holds step0"
    if not isinstance(dump, bool):
        return f"dump_after_load {dump!r}: expected true or false"
    return LoadOptions(Path(path), tuple(modules), steps, ranks, dump)


def _folder(step: Path, place: str) -> Path | None:
    """Return the process's folder in the earlier dump: the same rank's, or the only one of a run without ranks."""
    if (step / place).is_dir():
        return step / place
    found = sorted(step.glob("proc*")) if place.startswith("proc") else []
    return found[0] if len(found) == 1 else None


def _say(text: str) -> None:
    print(f"trueup: {text}", file=sys.stderr, flush=True)
