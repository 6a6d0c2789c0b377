"""Tensors that are no plain array: the arrays they are made of, each of which becomes a slot below the tensor's own.

`input.0` of layout sparse_coo has `input.0.values` and `input.0.indices`, and so on:

    sparse_coo                   values, indices (as they are: not coalesced)
    sparse_csr, sparse_bsr       values, crow_indices, col_indices
    sparse_csc, sparse_bsc       values, ccol_indices, row_indices
    jagged, nested               values, offsets, lengths; for a nested tensor that is no jagged one values and sizes
    quantised                    int_repr, scale, zero_point
    a class that wraps tensors   the attributes that its `__tensor_flatten__` names

Nothing here computes with the user's tensor, coalesces it or enters a graph. A part that is itself no plain array is taken apart
too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

Parts = Iterator[tuple[str, torch.Tensor]]

COMPRESSED: dict[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
MAX_DEPTH = 4
"""Wrappers in wrappers that are followed."""


STAND_INS = frozenset({"FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor"})
"""Classes of tensors that hold no numbers of their own, or not yet, by name: importing them costs more than it is worth."""

_WRAPS: dict[type, bool] = {torch.Tensor: False, torch.nn.Parameter: False}


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is one array, with strides."""
    wraps = _WRAPS.get(type(tensor))
    if wraps is None:
        wraps = _WRAPS[type(tensor)] = _holds_others(type(tensor))
    return tensor.layout is torch.strided and not (wraps or tensor.is_nested or tensor.is_quantized)


def parts(slot: str, tensor: torch.Tensor, depth: int = 0) -> Parts:
    """Yield ``(slot.part, array)`` for what a tensor is made of; nothing for one that cannot be taken apart."""
    if depth >= MAX_DEPTH or tensor.device.type == "meta" or type(tensor).__name__ in STAND_INS:
        return
    with torch.no_grad():
        inside = list(_inside(tensor))
    for name, part in inside:
        if is_plain(part):
            yield f"{slot}.{name}", part
        else:
            yield from parts(f"{slot}.{name}", part, depth + 1)


def _holds_others(kind: type) -> bool:
    """Tell whether tensors of a class wrap others; those of the simulated accelerator are that device's plain tensors."""
    return hasattr(kind, "__tensor_flatten__") and not kind.__module__.startswith("trueup.simdev")


def _inside(tensor: torch.Tensor) -> Parts:
    if tensor.layout is torch.sparse_coo:
        yield "values", tensor._values()
        yield "indices", tensor._indices()
    elif tensor.layout in COMPRESSED:
        yield "values", tensor.values().detach()
        for name in COMPRESSED[tensor.layout]:
            yield name, getattr(tensor, name)()
    elif tensor.is_nested and tensor.layout is torch.strided:
        yield "values", tensor.detach().values()
        yield "sizes", tensor._nested_tensor_size()
    elif tensor.is_nested:
        yield from _jagged(tensor)
    elif tensor.is_quantized:
        yield from _quantised(tensor)
    elif _holds_others(type(tensor)):
        yield from _wrapped(tensor)


def _jagged(tensor: torch.Tensor) -> Parts:
    """Yield the arrays of a jagged tensor; its cached minimum and maximum of lengths are no data."""
    for name in ("values", "offsets", "lengths"):
        part = getattr(tensor, f"_{name}", None)
        if isinstance(part, torch.Tensor):
            yield name, part.detach()


def _quantised(tensor: torch.Tensor) -> Parts:
    tensor = tensor.detach()
    yield "int_repr", tensor.int_repr()
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield "scale", torch.tensor(tensor.q_scale(), dtype=torch.float64)
        yield "zero_point", torch.tensor(tensor.q_zero_point())
    else:
        yield "scale", tensor.q_per_channel_scales()
        yield "zero_point", tensor.q_per_channel_zero_points()


def _wrapped(tensor: torch.Tensor) -> Parts:
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield name, part.detach()
