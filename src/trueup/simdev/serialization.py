"""`torch.save` and `torch.load` for the simulated device, in the file format that a real device writes.

A storage is saved as bytes with the location tag ``npu:0``, so a file can be loaded with ``map_location="cpu"`` where
no simulated device is installed, with ``weights_only=True``, and storages shared by views stay shared.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from trueup.simdev.storage import NPUStorage
from trueup.simdev.tensor import NPUTensor


def reduce(tensor: NPUTensor) -> Any:
    """Return what `pickle` needs to rebuild an npu tensor: the tuple of ``torch._utils._rebuild_tensor_v2``."""
    inner = tensor._raw
    hooks: OrderedDict[Any, Any] = OrderedDict()
    if getattr(tensor, "_is_param", False):
        return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, hooks)
    storage = tensor.untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=inner.dtype, _internal=True)
    place = (inner.storage_offset(), tuple(inner.size()), inner.stride())
    return torch._utils._rebuild_tensor_v2, (typed, *place, tensor.requires_grad, hooks)


def _tag(storage: Any) -> str | None:
    inner = getattr(storage, "_untyped_storage", storage)
    return "npu:0" if isinstance(inner, NPUStorage) else None


def _restore(storage: Any, location: str) -> Any:
    if location.split(":")[0] != "npu":
        return None
    if location not in ("npu", "npu:0"):
        raise RuntimeError(
            f"Attempting to deserialize object on {location} but torch.npu.device_count() is 1. "
            "Use torch.load with map_location to map your storages to an existing device."
        )
    storage.__class__ = NPUStorage
    return storage


def register() -> None:
    """Teach `torch.load` the location ``npu``; asked before the built-in packages, whose devices need an allocator."""
    torch.serialization.register_package(5, _tag, _restore)
