"""Calls inside `torch.func` transforms: what holds the bytes of their tensors, and how such a call is made again.

Inside ``vmap`` a function is given tensors of one sample; what exists is one tensor with all samples. That one is recorded, with
the dimension along which they lie, so that the function can be called inside such a ``vmap`` again: once for all samples, by
the kernels that the capture saw.

``grad``, ``jvp`` and ``vjp`` wrap the tensors whose values they follow; the values are those of plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

MOST_TRANSFORMS = 16
RANDOMNESS = ("error", "same", "different")
LARGEST_BATCH = 1 << 24

Transform = Mapping[str, Any]
"""``{"vmap": samples, "randomness": "error"}``, or ``{"other": "Grad"}``."""


def inside() -> bool:
    """Tell whether a transform runs."""
    return torch._C._functorch.maybe_current_level() is not None


def outside() -> AbstractContextManager[Any]:
    """Leave the transforms that are running: inside them whatever we compute would be transformed too."""
    if not inside():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()  # type: ignore[no-any-return]


def below(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the bytes of one inside transforms: all samples of a vmap at once."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def batched(tensor: torch.Tensor) -> list[list[int]]:
    """Return ``[level, dimension]`` of the samples of each vmap that a tensor is inside of, innermost vmap first. A dimension is
    one of the tensor without those of the vmaps before it in the list; levels count from 1, the outermost."""
    found, functorch = [], torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            found.append([functorch.maybe_get_level(tensor), functorch.maybe_get_bdim(tensor)])
        tensor = functorch.get_unwrapped(tensor)
    return found


def running() -> list[dict[str, Any]]:
    """Return the transforms that are running, outermost first."""
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_all_functorch_interpreters

    return [
        {"vmap": int(one.batch_size()), "randomness": one.randomness()} if isinstance(one, VmapInterpreter)
        else {"other": one.key().name}
        for one in retrieve_all_functorch_interpreters()
    ]  # fmt: skip


def is_known(transforms: Any) -> bool:
    """Tell whether a description from a file is one that `running` may have made."""
    if not isinstance(transforms, list) or len(transforms) > MOST_TRANSFORMS:
        return False
    return all(isinstance(one, dict) and (_is_vmap(one) or isinstance(one.get("other"), str)) for one in transforms)


def _is_vmap(one: Mapping[str, Any]) -> bool:
    size = one.get("vmap")
    return type(size) is int and 0 < size <= LARGEST_BATCH and one.get("randomness") in RANDOMNESS


def execute(
    transforms: Sequence[Transform], tensors: Sequence[torch.Tensor], levels: Sequence[Mapping[int, int]],
    call: Callable[[list[torch.Tensor]], None],
) -> None:  # fmt: skip
    """Call a function inside the same vmaps, as `running` gave them, on tensors with all samples; ``levels`` are their dimensions
    of samples by the level of the vmap (`batched`). ``call`` is given the tensors of one sample, and what it computes it has to
    keep, by `below`."""
    sizes = [(level, one) for level, one in enumerate(transforms, start=1) if "vmap" in one]

    def enter(depth: int, given: Sequence[torch.Tensor]) -> None:
        if depth == len(sizes):
            call(list(given))
            return
        level, one = sizes[depth]

        def sample(index: torch.Tensor, *inner: torch.Tensor) -> torch.Tensor:
            enter(depth + 1, inner)
            return index

        dims = (0, *(places.get(level) for places in levels))
        torch.vmap(sample, in_dims=dims, randomness=one["randomness"])(torch.arange(one["vmap"]), *given)

    enter(0, tensors)
