"""Tensors that stand for others: the local shard of a distributed tensor, and the result of an unfinished collective.

Neither look-up communicates, waits or touches autograd: attributes are read that hold what is there already.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from trueup.recording.adapters.torch.tensors import PLAIN

Inner = Callable[[Any], torch.Tensor]

WRAPPERS: dict[str, str] = {
    "torch.distributed.tensor.DTensor": "_local_tensor",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "elem",
}
"""Classes of tensors without numbers of their own, and where each holds the tensor that has them."""

_ATTRIBUTES: dict[type, str | None] = {}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of this process that holds the numbers of one; itself, unless it is a wrapper."""
    while tensor.__class__ not in PLAIN and (attribute := _attribute(tensor.__class__)) is not None:
        tensor = getattr(tensor, attribute)
    return tensor


def _attribute(kind: type) -> str | None:
    try:
        return _ATTRIBUTES[kind]
    except KeyError:
        names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
        found = _ATTRIBUTES[kind] = next((WRAPPERS[name] for name in names if name in WRAPPERS), None)
        return found


def part_of(tensor: torch.Tensor) -> str | None:
    """Describe how a DTensor's local shard is part of the whole, as JSON; None for any other tensor."""
    if tensor.__class__ in PLAIN or _attribute(tensor.__class__) != "_local_tensor":
        return None
    spec: Any = tensor._spec
    mesh = spec.mesh
    names = mesh.mesh_dim_names
    return json.dumps({
        "placements": [_placement(p) for p in spec.placements],
        "global_shape": [int(size) for size in spec.shape],
        "mesh": {"shape": list(mesh.shape), "dims": None if names is None else list(names)},
        "coordinate": mesh.get_coordinate(),
    }, sort_keys=True)  # fmt: skip


def _placement(placement: Any) -> str:
    """Write a placement as PyTorch's own constructor: ``Shard(0)``, ``Replicate()``, ``Partial(sum)``."""
    kind = type(placement).__name__.lstrip("_")
    what = [getattr(placement, name) for name in ("dim", "split_factor", "reduce_op") if hasattr(placement, name)]
    return f"{kind}({', '.join(map(str, what))})"
