"""What a call is given instead of its own tensors, and which of them it wrote; each framework says how a tensor is copied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

WIDER: dict[str, dict[str, str]] = {
    "float32": {"float16": "float32", "bfloat16": "float32", "complex32": "complex64"},
    "float64": {
        "float16": "float64", "bfloat16": "float64", "float32": "float64", "complex32": "complex128", "complex64": "complex128",
    },
    "bfloat16": {"float16": "bfloat16", "float32": "bfloat16", "float64": "bfloat16"},
}  # fmt: skip
"""What each dtype of a policy does to dtypes; the rest stays. Formats of 8 bits mean nothing without their scales."""


class Copies(ABC):
    """The tensors that a call is given instead of its own. A tensor that is given twice is copied once: what is one stays one."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, Any, int | None]] = {}
        """By the address of a copy: the original, the copy, its version when it was made."""
        self._made: dict[int, Any] = {}
        """By the address of an original, which `_held` keeps alive: its copy."""

    @abstractmethod
    def copied(self, tensor: Any) -> Any:
        """Return a copy by operations that autograd sees, or the tensor itself where it already is what is asked for."""

    @abstractmethod
    def version(self, tensor: Any) -> int | None:
        """Return how often a tensor was written; None where nobody counts."""

    @abstractmethod
    def memory(self, tensor: Any) -> Hashable:
        """Return what is equal for tensors in one piece of memory; None where it is not known."""

    @abstractmethod
    def lies_alike(self, original: Any, made: Any) -> bool:
        """Tell whether a copy lies in memory as its original does, so that it may stand for it."""

    @abstractmethod
    def differs(self, original: Any, made: Any) -> bool:
        """Tell whether a copy has other values than its original."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def __call__(self, tensor: Any) -> Any:
        """Return what stands in for a tensor: a copy, or itself where it already is what is asked for."""
        found = self._made.get(id(tensor))
        if found is not None:
            return found
        made = self.copied(tensor)
        if made is tensor:
            return tensor
        self._made[id(tensor)] = made
        self._held[id(made)] = tensor, made, self.version(made)
        return made

    def original(self, tensor: Any) -> Any:
        """Return the original of a copy, else None; a copy that lies otherwise in memory, and was not written, is no stand-in.

        ``contiguous`` returns the copy itself, where it would have made another tensor of the original.
        """
        original, made, before = self._held.get(id(tensor), (None, tensor, None))
        if original is None:
            return None
        return original if self.lies_alike(original, made) or self.version(made) != before else None

    def shows(self, tensor: Any) -> bool:
        """Tell whether a tensor is a view of a copy."""
        memories = {self.memory(made) for _, made, _ in self._held.values()}
        return (at := self.memory(tensor)) is not None and at in memories

    def written(self, also: frozenset[int] = frozenset(), *, all_of_them: bool = False) -> list[tuple[Any, Any]]:
        """Return ``(original, copy)`` of what the call wrote.

        Args:
            also: addresses of originals that it writes without counting it in their version.
            all_of_them: whether it may have written any of them so.
        """
        return [
            (original, made) for original, made, before in self._held.values()
            if all_of_them or id(original) in also
            or (self.differs(original, made) if before is None else self.version(made) != before)
        ]  # fmt: skip
