"""What stands in for the parameters and buffers of a module while it is executed once more, and what is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trueup.analysis.watch.again import CannotRerun
from trueup.recording.adapters.torch.watching_tape import mapped

SHARDED = "its parameters are sharded over ranks, which would all have to execute it again"


class StandIns:
    """A tensor of the same memory for each tensor that requires a gradient: neither ``.grad`` nor hooks of the original are met."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands in for a tensor; one without gradient stands for itself."""
        if not tensor.requires_grad:
            return tensor
        known = self._of.get(id(tensor))
        if known is not None:
            return known[1]
        alias = tensor.detach()
        alias = torch.nn.Parameter(alias) if isinstance(tensor, torch.nn.Parameter) else alias.requires_grad_()
        alias.register_post_accumulate_grad_hook(_let_go)
        self._of[id(tensor)] = tensor, alias  # held, it keeps its address
        return alias


def _let_go(tensor: torch.Tensor) -> None:
    """Free the gradient of a stand-in, which nobody will read, as soon as it is there."""
    tensor.grad = None


def innermost(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module inside wrappers that communicate, or compile.

    Raises:
        CannotRerun: executing it on this rank alone is not possible.
    """
    while True:
        name = type(module).__name__
        if name in ("DistributedDataParallel", "OptimizedModule"):
            module = module.module if name.startswith("Dist") else module._orig_mod
        elif name == "DataParallel" and len(module.device_ids) <= 1:
            module = module.module
        elif name.startswith(("DataParallel", "FullySharded", "FSDP")) or any(map(_is_sharded, module.parameters())):
            raise CannotRerun(SHARDED)
        else:
            return module


def moved(module: torch.nn.Module, value: Any) -> Any:
    """Return arguments on the device to which DistributedDataParallel brings them."""
    devices = getattr(module, "device_ids", None)
    if not devices or type(module).__name__ != "DistributedDataParallel":
        return value
    kind = torch.device(getattr(module, "device_type", "cuda"), devices[0])
    return mapped(value, lambda tensor: tensor.to(kind))


def _is_sharded(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "_local_tensor") or hasattr(parameter, "ds_id")  # DTensor; DeepSpeed ZeRO 3


@contextmanager
def swapped(module: torch.nn.Module, stand_ins: StandIns) -> Iterator[None]:
    """Give a module stand-ins for the time of a block; then put all its attributes back, buffers and modes included.

    The block is to last until the backward passes are over: checkpointed functions run again in them.

    Args:
        module: the root.
        stand_ins: for parameters, wherever its modules hold them.
    """
    saved = [_Saved(one) for one in module.modules()]
    try:
        for one in saved:
            one.stand_in(stand_ins)
        yield
    finally:
        for one in saved:
            one.put_back()


def begin_as(module: torch.nn.Module, buffers: Sequence[tuple[dict[str, Any], str, torch.Tensor]], *, training: bool) -> None:
    """Bring a swapped module to where it was before an event.

    Args:
        module: the root.
        buffers: the dict that holds each, its name there, what it was.
        training: whether the root was in training mode.
    """
    for owner, name, tensor in buffers:
        owner[name] = tensor.clone()
    if module.training is not training:
        module.train(training)


class _Saved:
    """The attributes of one module, and the content of those that are plain containers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._attributes = dict(module.__dict__)
        self._contents = [(value, value.copy()) for value in self._attributes.values() if isinstance(value, (list, dict, set))]
        self._tensors = [
            (value, value._version, value.detach().clone())
            for name, value in self._attributes.items()
            if isinstance(value, torch.Tensor) and not value.requires_grad and not value.is_inference()
        ]

    def stand_in(self, stand_ins: StandIns) -> None:
        held = self._module.__dict__
        held["_parameters"] = {name: None if p is None else stand_ins.of(p) for name, p in self._module._parameters.items()}
        for name, value in self._attributes.items():  # the flat weights of recurrent modules
            if isinstance(value, (list, tuple)) and any(isinstance(item, torch.nn.Parameter) for item in value):
                held[name] = [stand_ins.of(item) if isinstance(item, torch.nn.Parameter) else item for item in value]
            elif isinstance(value, torch.nn.Parameter):
                held[name] = stand_ins.of(value)

    def put_back(self) -> None:
        held = self._module.__dict__
        held.clear()
        held.update(self._attributes)
        for value, before in self._contents:
            if isinstance(value, list):
                value[:] = before
            else:
                value.clear()
                value.update(before)
        for tensor, version, before in self._tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(before)
