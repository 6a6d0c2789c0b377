"""The arguments of a recorded call, from JSON (docs/format.md) to Python objects; a framework's own are its adapter's matter.

A capture is untrusted: what is not exactly what Trueup writes is refused, and nothing is evaluated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from trueup.recording.execution.places import NotReplayable

MOST_NESTED = 32


def damaged() -> Any:
    """Refuse what no capture of ours holds."""
    raise NotReplayable("its arguments are damaged in the capture")


def natural(number: Any) -> int:
    """Return a number that must be a natural one."""
    return number if type(number) is int and 0 <= number < 2**62 else damaged()


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory there are from the first to the last."""
    if len(shape) != len(strides) or any(s < 0 for s in strides):
        damaged()
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class Decoder(ABC):
    """Makes arguments of what stands for them."""

    def value(self, node: Any, depth: int = 0) -> Any:
        """Return the argument that a node stands for.

        Raises:
            NotReplayable: it stands for none, or for one that a capture cannot hold.
        """
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        if depth > MOST_NESTED:
            raise NotReplayable("its arguments are nested too deeply")
        if isinstance(node, list):
            return [self.value(v, depth + 1) for v in node]
        if not isinstance(node, dict):
            return damaged()
        if "tensor" in node:
            return self.tensor(node)
        for key in ("tuple", "size"):
            if isinstance(node.get(key), list):
                return self.sequence(key, [self.value(v, depth + 1) for v in node[key]])
        if isinstance(node.get("dict"), dict):
            return {k: self.value(v, depth + 1) for k, v in node["dict"].items()}
        return self._plain(node)

    def _plain(self, node: Mapping[str, Any]) -> Any:
        if node.get("ellipsis") is True:
            return Ellipsis
        if "float" in node:
            return float(node["float"]) if node["float"] in ("nan", "inf", "-inf") else damaged()
        if "complex" in node:
            real, imaginary = node["complex"]
            return complex(float.fromhex(str(real)), float.fromhex(str(imaginary)))
        if "slice" in node:
            bounds = node["slice"]
            return slice(*bounds) if len(bounds) == 3 and all(b is None or type(b) is int for b in bounds) else damaged()
        if "other" in node:
            raise NotReplayable(f"an argument is a {str(node['other'])[:80]}, which a capture cannot hold")
        return self.constant(node)

    def sequence(self, kind: str, items: list[Any]) -> Any:
        """Return a ``tuple``, or the ``size`` of a tensor."""
        return tuple(items) if kind == "tuple" else items

    @abstractmethod
    def tensor(self, node: Mapping[str, Any]) -> Any:
        """Return a tensor."""

    @abstractmethod
    def constant(self, node: Mapping[str, Any]) -> Any:
        """Return what is the framework's own: a dtype, a device."""
