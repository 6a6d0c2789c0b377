"""Level debug: what a script hands to ``save``, in ``debug.json`` and, for task tensor, ``dump_tensor_data/*.pt``."""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trueup.foundation.model import TrueupError
from trueup_compat.msprobe.entries import NAMES

Path_ = Sequence[Any]
"""Keys and numbers that lead to a value inside a variable."""
PLAIN = (bool, int, float, str)


class Saved:
    """The variables of one step.

    Args:
        folder: of the step and process; made when the first variable comes.
        task: ``statistics`` or ``tensor``.
    """

    def __init__(self, folder: Path, task: str) -> None:
        self._folder, self._task = folder, task
        self._counts: Counter[str] = Counter()
        self._data: dict[str, Any] = {}
        self._tensors = folder / "dump_tensor_data"

    def save(self, variable: Any, name: str, *, backward: bool) -> None:
        """Take a tensor, a number, text, or lists and dicts of them, and their gradients when they come."""
        number = self._counts[name]
        self._counts[name] += 1
        forward, gradient = f"{name}.{number}.debug", f"{name}_grad.{number}.debug"
        self._data[forward] = _mapped(variable, functools.partial(self._leaf, forward))
        if backward:
            self._data[gradient] = _mapped(variable, lambda _value, _path: None)
            _mapped(variable, functools.partial(self._await, gradient))

    def write(self) -> None:
        """Write what there is so far.

        Raises:
            TrueupError: it cannot be written.
        """
        if not self._data:
            return
        where = str(self._tensors.absolute()) if self._task == "tensor" else None
        content = {"task": self._task, "level": "debug", "framework": "pytorch", "dump_data_dir": where, "data": self._data}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = self._folder / "debug.json.tmp"
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
            temporary.replace(self._folder / "debug.json")
        except OSError as error:
            raise TrueupError(f"what was saved cannot be written to {self._folder}: {error.strerror}") from None

    def _leaf(self, whole: str, value: Any, path: Path_) -> Any:
        if not isinstance(value, torch.Tensor):
            return {"type": type(value).__name__, "value": value}
        with torch.no_grad():
            leaf = described(value)
            if self._task == "tensor":
                leaf["data_name"] = f"{'.'.join((whole, *map(str, path)))}.pt"
                keep(value, self._tensors / leaf["data_name"])
        return leaf

    def _await(self, whole: str, value: Any, path: Path_) -> None:
        """Take the gradient when it comes; what needs none has a null."""
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(functools.partial(self._arrived, whole, tuple(path)))

    def _arrived(self, whole: str, path: Path_, gradient: torch.Tensor) -> None:
        """Put a gradient in its place; nothing raises inside a backward pass."""
        try:
            found = self._leaf(whole, gradient, path)
        except TrueupError as error:
            print(f"trueup: {error}", file=sys.stderr, flush=True)
            return
        if not path:
            self._data[whole] = found
            return
        place = self._data[whole]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = found


def can_be_saved(variable: Any) -> bool:
    """Tell whether a variable is made of tensors, numbers and text."""
    if isinstance(variable, dict):
        return all(isinstance(key, (str, int)) for key in variable) and all(map(can_be_saved, variable.values()))
    if isinstance(variable, (list, tuple)):
        return all(map(can_be_saved, variable))
    return isinstance(variable, (torch.Tensor, *PLAIN))


def _mapped(variable: Any, make: Callable[[Any, Path_], Any], path: Path_ = ()) -> Any:
    if isinstance(variable, dict):
        return {key: _mapped(value, make, (*path, key)) for key, value in variable.items()}
    if isinstance(variable, (list, tuple)):
        return [_mapped(value, make, (*path, k)) for k, value in enumerate(variable)]
    return make(variable, path)


def keep(value: torch.Tensor, file: Path) -> None:
    """Write a tensor.

    Raises:
        TrueupError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value.detach().to("cpu", copy=True).contiguous(), file)
    except OSError as error:
        raise TrueupError(f"what was saved cannot be written to {file.parent}: {error.strerror}") from None


def described(value: torch.Tensor) -> dict[str, Any]:
    """Return dtype, shape and the four numbers, taken in float64; nulls where they mean nothing."""
    held = value.detach()
    leaf: dict[str, Any] = {"type": "torch.Tensor", "dtype": str(value.dtype), "shape": list(value.shape)}
    numbers: list[float] | list[None] = [None] * 4
    if held.numel() and not held.is_complex() and held.dtype != torch.bool and not held.is_meta:
        wide = held.to("cpu").to(torch.float64)
        numbers = [float(number) for number in (wide.max(), wide.min(), wide.mean(), wide.norm())]
    return leaf | dict(zip(NAMES, numbers, strict=True)) | {"requires_grad": value.requires_grad}
