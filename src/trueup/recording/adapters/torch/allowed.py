"""Which functions a capture may name to have them executed: PyTorch's own, and only those that compute tensors.

A capture is untrusted, so a name is never followed (no ``getattr`` along dots, no import): it is looked up among the functions that
PyTorch itself declares overridable, and its dispatcher's operators. What loads or saves, opens files, or runs code it is given
is not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import get_ignored_functions, get_testing_overrides

from trueup.recording.adapters.torch.functions import _name_of

NAMESPACES = frozenset({"aten", "prims", "mkldnn", "mkldnn_prepacked", "quantized", "quantized_decomposed", "torchvision", "npu"})
"""Namespaces of operators that compute tensors from tensors and numbers."""

REFUSED = ("file", "save", "load", "pickle", "storage", "compile", "callback", "hook", "record_stream", "share_memory",
           "pin_memory")  # fmt: skip
"""Parts of names that are not executed whatever they are: files, code, streams, memory of other processes."""

REFUSED_NAMES = frozenset(
    {"set_", "set_data", "apply_", "map_", "map2_", "backward", "_backward", "requires_grad_", "_print", "from_blob"}
)

FACTORIES = (
    "tensor", "as_tensor", "scalar_tensor", "zeros", "ones", "full", "eye", "arange", "range", "linspace", "logspace", "rand",
    "randn", "randint", "randperm", "normal", "bernoulli", "complex", "tril_indices", "triu_indices", "zeros_like", "ones_like",
    "full_like", "rand_like", "randn_like", "randint_like",
    "hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window",
)  # fmt: skip
"""Functions of ``torch`` that make tensors of numbers; PyTorch does not declare them overridable, modes see them all the same."""


METHODS = ("new_zeros", "new_ones", "new_full", "new_tensor")
"""Likewise, of tensors."""


def is_refused(name: str) -> bool:
    """Tell whether a name is of what is never executed."""
    last = name.rpartition("::")[2].rpartition(".")[2].lower()
    return last in REFUSED_NAMES or any(part in last for part in REFUSED)


def function(name: str) -> Callable[..., Any] | None:
    """Return the function of level api that a capture means by a name, or None where it is not to be executed."""
    return None if is_refused(name) else _functions().get(name)


def operator(name: str, overload: str | None) -> Callable[..., Any] | None:
    """Return an operator of the dispatcher, ``aten::add``; an overload of None lets PyTorch choose it by the arguments."""
    namespace, _, bare = name.partition("::")
    if namespace not in NAMESPACES or not bare.isidentifier() or is_refused(name):
        return None
    if overload is None:
        if name not in _packets():
            return None
        return getattr(getattr(torch.ops, namespace), bare, None)
    if (name if overload in ("", "default") else f"{name}.{overload}") not in _registered():
        return None
    return getattr(getattr(getattr(torch.ops, namespace), bare, None), overload or "default", None)


@lru_cache(maxsize=1)
def _registered() -> frozenset[str]:
    """Return the names of the dispatcher's operators: `torch.ops` also has TorchScript's, ``aten::save`` among them."""
    return frozenset(torch._C._dispatch_get_all_op_names())


@lru_cache(maxsize=1)
def _packets() -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in _registered())


@lru_cache(maxsize=1)
def _functions() -> dict[str, Callable[..., Any]]:
    """Return what a capture may name at level api, by the names that captures give."""
    ignored = get_ignored_functions()
    found: dict[str, Callable[..., Any]] = {}
    for func in [*get_testing_overrides(), *_generated()]:
        if func in ignored or not callable(func):
            continue
        name = _name_of(func)
        if name is not None:
            found.setdefault(name, func)
    return found | {f"torch.{name}": getattr(torch, name) for name in FACTORIES if hasattr(torch, name)} | {
        f"torch.Tensor.{name}": getattr(torch.Tensor, name) for name in METHODS
    }


def _generated() -> Iterator[Callable[..., Any]]:
    """Yield functions and methods that PyTorch generates from its operators, also those it does not declare overridable."""
    native: Any = torch._C
    for holder in (native._VariableFunctions, native.TensorBase, native._nn, native._fft, native._linalg, native._special):
        for name in dir(holder):
            if not name.startswith("__"):
                value = getattr(holder, name, None)
                if callable(value) and not isinstance(value, type):
                    yield value
