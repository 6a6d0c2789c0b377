"""What `trueup monitor` takes of collectives that Python calls, in steps that have everything: how many, of how many elements, and
the norm of what goes in. What DDP and FSDP send themselves passes no Python: gradients before DDP are `local_gradient_norm`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from trueup.recording.adapters.torch.monitored_layers import TorchLayers
from trueup.recording.engine.monitored_step import FRAMEWORKS, callers
from trueup.recording.engine.replacing import Sweep

SENT = {
    "all_reduce": 0, "broadcast": 0, "reduce": 0, "send": 0, "isend": 0, "all_gather": 1, "all_gather_into_tensor": 1,
    "gather": 0, "scatter": 1, "reduce_scatter": 1, "reduce_scatter_tensor": 1, "all_to_all": 1, "all_to_all_single": 1,
}  # fmt: skip
"""Place of what goes in among the arguments."""


def collectives(layers: TorchLayers) -> list[Sweep]:
    """Return what stands in for the collectives while a monitor runs."""
    if not torch.distributed.is_available():
        return []
    held = [(name, place, getattr(torch.distributed, name, None)) for name, place in SENT.items()]
    pairs = [(call, wraps(call)(partial(_sends, layers, name, place, call))) for name, place, call in held if call is not None]
    return [Sweep(pairs)]


def _sends(layers: TorchLayers, name: str, place: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() and layers.takes:
        layers.guarded("a collective", _take, layers, name, place, args, kwargs)
    return original(*args, **kwargs)


def _take(layers: TorchLayers, name: str, place: int, args: Any, kwargs: Any) -> None:
    given = args[place] if len(args) > place else next((kwargs[key] for key in NAMES if kwargs.get(key) is not None), None)
    tensors = [one for one in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(one, torch.Tensor)]
    floats = [one for one in tensors if one.is_floating_point()]
    if floats:
        layers.carried(name, floats)
        if layers.wants("modules") and f"collective {name}" not in layers.seen:
            layers.seen[f"collective {name}"] = {"class": name, "called by": callers(FRAMEWORKS)}


NAMES = ("input", "input_tensor", "input_list", "scatter_list", "input_tensor_list", "tensor")
"""Keywords of what goes in."""
