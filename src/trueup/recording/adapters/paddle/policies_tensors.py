"""The tensors of a call in another dtype or on the CPU, and what the call wrote brought back (Paddle).

A cast is an operator that autograd knows. A copy from one place to another is none: ``Tensor.cpu`` and ``copy_to`` lose the
gradient (Paddle 3.3), so it is a PyLayer that sends the gradient back. Post-hooks on PyLayers do not run, so each begins behind an
``assign``, on whose node a capture sees the gradient that the call makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import _C_ops

from trueup.recording.adapters.paddle.buffers import Base, base_of
from trueup.recording.adapters.paddle.policies_captures import quietly
from trueup.recording.adapters.paddle.tensors import dtype_name, holds
from trueup.recording.policies import copies, nested

WIDER = {
    wide: {narrow: to for narrow, to in table.items() if hasattr(paddle, narrow)} for wide, table in copies.WIDER.items()
}


def mapped(value: Any, change: Callable[[Any], Any], *, kind: type | None = None) -> Any:
    """Return a value with every tensor that holds something (or object of another kind) changed."""
    return nested.mapped(value, change, holds if kind is None else lambda item: isinstance(item, kind))


def tensors_in(value: Any) -> list[paddle.Tensor]:
    """Return every tensor of a nested value, in order; one that holds nothing stands for an argument that was not given."""
    found: list[paddle.Tensor] = []

    def take(tensor: paddle.Tensor) -> paddle.Tensor:
        found.append(tensor)
        return tensor

    mapped(value, take)
    return found


def is_plain(tensor: paddle.Tensor) -> bool:
    """Tell whether a tensor is dense and whole: what is sparse, distributed or of selected rows is given as it is."""
    return bool(tensor.is_dense()) and not tensor.is_dist()


class TensorCopies(copies.Copies):
    """Copies of Paddle's tensors.

    Args:
        dtype: of the policy, or None.
        device: likewise.
    """

    def __init__(self, dtype: str | None, device: str | None) -> None:
        super().__init__()
        self._wider = WIDER[dtype] if dtype is not None else {}
        self._to_host = device is not None

    def copied(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Return a copy in the rule's dtype and on its device."""
        if not is_plain(tensor):
            return tensor
        made = tensor
        if self._to_host and not tensor.place.is_cpu_place():
            made = moved(made, paddle.CPUPlace())
        wide = self._wider.get(dtype_name(tensor.dtype))
        return made if wide is None else cast(made, wide)

    def version(self, tensor: paddle.Tensor) -> int | None:
        """Return how often it was written."""
        return int(tensor._inplace_version())

    def memory(self, tensor: paddle.Tensor) -> Base | None:
        """Return the address at which its memory begins."""
        return (base_of(tensor) or None) if is_plain(tensor) and tensor._is_initialized() else None

    def original(self, tensor: paddle.Tensor) -> Any:
        """Return the original of a copy; batch norms return the statistics that they write as another tensor of that memory."""
        found = super().original(tensor)
        if found is not None or id(tensor) in self._held or (at := self.memory(tensor)) is None:
            return found
        alike = (
            original for original, made, _ in self._held.values()
            if original.stop_gradient and self.memory(made) == at and list(made.shape) == list(tensor.shape)
        )  # fmt: skip
        return next(alike, None)

    def lies_alike(self, original: paddle.Tensor, made: paddle.Tensor) -> bool:
        """Compare strides."""
        return list(original.get_strides()) == list(made.get_strides())

    def differs(self, original: paddle.Tensor, made: paddle.Tensor) -> bool:
        """Compare values."""
        if list(original.shape) != list(made.shape):
            return True
        with paddle.no_grad():
            return bool(original.cpu().astype(made.dtype).numpy().tobytes() != made.cpu().numpy().tobytes())

    def written(self, also: frozenset[int] = frozenset(), *, all_of_them: bool = False) -> list[tuple[Any, Any]]:
        """Return ``(original, copy)`` of what the call wrote; what nobody counts only where it differs: to write it counts."""
        found = super().written(all_of_them=all_of_them)
        known = {id(original) for original, _ in found}
        more = [(original, made) for original, made, _ in self._held.values() if id(original) in also - known]
        return found + [(original, made) for original, made in more if self.differs(original, made)]


def cast(tensor: paddle.Tensor, dtype: str) -> paddle.Tensor:
    """Return a tensor in another dtype."""
    return tensor if dtype_name(tensor.dtype) == dtype else _C_ops.cast(tensor, getattr(paddle, dtype))


def moved(tensor: paddle.Tensor, place: Any) -> paddle.Tensor:
    """Return a tensor on another place, by an operation that autograd knows."""
    if tensor.stop_gradient or not paddle.is_grad_enabled():
        return tensor._copy_to(place, True)
    # As `PyLayer.apply` does; a capture that stands in its place would take this for a call.
    return super(paddle.autograd.PyLayer, _Move).apply(_C_ops.assign(tensor), place)


def bring_back(written: list[tuple[paddle.Tensor, paddle.Tensor]]) -> None:
    """Write into the originals what a call wrote into their copies."""
    for original, made in written:
        source = made if _is_at(made, original.place) else moved(made, original.place)
        source = cast(source, dtype_name(original.dtype))
        if original.is_leaf and not original.stop_gradient:
            with paddle.no_grad():  # a parameter that its Layer, or an optimizer, changes
                _C_ops.assign_out_(source, original)
        else:
            _C_ops.assign_out_(source, original)


def _is_at(tensor: paddle.Tensor, place: Any) -> bool:
    return str(tensor.place) == str(place)


def in_form(tensor: paddle.Tensor, dtype: str, place: Any) -> paddle.Tensor:
    """Return a tensor in a dtype and on a place."""
    narrow = cast(tensor, dtype)
    return narrow if _is_at(narrow, place) else moved(narrow, place)


class _Move(paddle.autograd.PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, place: Any) -> paddle.Tensor:
        ctx.place = tensor.place
        return tensor._copy_to(place, True)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        with quietly():
            return gradient._copy_to(ctx.place, True)
