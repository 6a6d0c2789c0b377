"""The tensors of a call in another dtype or on another device, and what the call wrote brought back.

A copy is an autograd operation, so gradients are cast back on their way. A tensor that is given twice is copied once: what is one
tensor stays one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from trueup.recording.policies import copies, nested

Change = Callable[[Any], Any]


def mapped(value: Any, change: Change, *, kind: type = torch.Tensor) -> Any:
    """Return a value with every tensor in it (or object of another kind) changed; what holds none changed is returned as it is."""
    return nested.mapped(value, change, lambda item: isinstance(item, kind), _packed)


def _packed(value: Any, inner: Change) -> Any:
    if not isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return NotImplemented
    names = ("data", "sorted_indices", "unsorted_indices")  # the batch sizes stay on the host
    old = [getattr(value, name) for name in names]
    new = [inner(item) for item in old]
    return nested.same_or(value, new, old, lambda new: value._replace(**dict(zip(names, new, strict=True))))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nested value, in order."""
    found: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(value, take)
    yield from found


WIDER = {
    wide: {getattr(torch, narrow): getattr(torch, to) for narrow, to in table.items()}
    for wide, table in copies.WIDER.items()
}


class TensorCopies(copies.Copies):
    """Copies of PyTorch's tensors.

    Args:
        dtype: of the policy, or None.
        device: likewise.
    """

    def __init__(self, dtype: str | None, device: str | None) -> None:
        super().__init__()
        self._wider = WIDER[dtype] if dtype is not None else {}
        self._device = None if device is None else torch.device(device)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in the rule's dtype and on its device."""
        dtype = self._wider.get(tensor.dtype, tensor.dtype)
        device = tensor.device if self._device is None or tensor.device.type == "meta" else self._device
        if dtype == tensor.dtype and device.type == tensor.device.type:
            return tensor
        return tensor.to(device=device, dtype=dtype)

    def version(self, tensor: torch.Tensor) -> int | None:
        """Return the version counter; an inference tensor has none."""
        return None if tensor.is_inference() else tensor._version

    def memory(self, tensor: torch.Tensor) -> int | None:
        """Return the address of the storage object; sparse tensors and some subclasses have none."""
        try:
            return int(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):
            return None

    def lies_alike(self, original: torch.Tensor, made: torch.Tensor) -> bool:
        """Compare strides."""
        return original.layout is not torch.strided or original.stride() == made.stride()

    def differs(self, original: torch.Tensor, made: torch.Tensor) -> bool:
        """Compare values."""
        return original.shape != made.shape or not torch.equal(original.to(dtype=made.dtype, device=made.device), made)


def bring_back(written: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write into the originals what a call wrote into their copies, by operations that autograd sees."""
    for original, made in written:
        if original.is_leaf and original.requires_grad and torch.is_grad_enabled():
            _bring_back_leaf(original, made)
            continue
        if original.shape != made.shape:  # an ``out=`` that was resized
            original.resize_(made.shape)
        original.copy_(made)


def _bring_back_leaf(original: torch.Tensor, made: torch.Tensor) -> None:
    """Write a parameter that a module changed, without gradients as the module had to; cuDNN's RNNs lay their weights out anew."""
    with torch.no_grad():
        if not torch.equal(original.to(dtype=made.dtype, device=made.device), made):
            original.copy_(made)
