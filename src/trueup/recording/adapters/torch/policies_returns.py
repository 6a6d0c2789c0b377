"""What a call would have returned: the dtype and the device of each of its results.

Mostly its inputs tell. Where they are of several dtypes, or autocast chooses one, or an argument names one, the call is executed
once in its own way, on copies and out of every sight, and what is learned holds for all calls that look alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trueup.recording.adapters.torch.policies_random import Generators, drawing_from
from trueup.recording.adapters.torch.policies_tensors import mapped, tensors_in

Form = tuple[torch.dtype, torch.device]
MOST_KNOWN = 4096
PLAIN_NAMES = ("torch.nn.functional.", "torch.Tensor.", "torch.")
NOT_PLAIN = ("torch.ops.",)
"""Operators of libraries: what they return need not follow from what they are given."""

_known: dict[Any, tuple[Form, ...] | None] = {}


def forms(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], quietly: Callable[[], Any]
) -> tuple[Form, ...] | None:
    """Return dtype and device of each tensor that a function would return; None where its inputs tell (`form_of`).

    Args:
        name: of the function.
        func: the function.
        args: as it was given them.
        kwargs: likewise.
        quietly: makes a block in which nothing is recorded.
    """
    tensors = list(tensors_in((args, kwargs)))
    if _told_by_inputs(name, tensors, args, kwargs):
        return None
    key = name, _autocast(tensors), _signature(args), _signature(kwargs)
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = _tried(func, args, kwargs, tensors, quietly)
    return _known[key]


def form_of(inputs: list[torch.Tensor]) -> Callable[[torch.Tensor], Form] | None:
    """Return what gives the form of a result whose dtype follows from the inputs; None if no input tells.

    Args:
        inputs: tensors of the call, as it was given them.
    """
    if not inputs:
        return None
    device = _device_of(inputs)
    narrow = _promoted(inputs)

    def form(result: torch.Tensor) -> Form:
        if narrow is None or not (result.is_floating_point() or result.is_complex()):
            return result.dtype, device
        real = narrow.to_real() if narrow.is_complex else narrow
        return (real.to_complex() if result.is_complex() else real), device

    return form


def _promoted(tensors: list[torch.Tensor]) -> torch.dtype | None:
    found = None
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            found = tensor.dtype if found is None else torch.promote_types(found, tensor.dtype)
    return found


def _device_of(tensors: list[torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)


def _told_by_inputs(name: str, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
    return (
        name.startswith(PLAIN_NAMES)
        and not name.startswith(NOT_PLAIN)
        and len({tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}) == 1
        and len({tensor.device for tensor in tensors}) == 1
        and not any(_autocast(tensors))
        and not any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
    )


def _autocast(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    kinds = sorted({tensor.device.type for tensor in tensors} - {"meta"})
    return tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds)


def _signature(value: Any) -> Any:
    """Describe an argument by what may decide a dtype; sizes and numbers do not."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.dim() == 0
    if isinstance(value, (tuple, list)):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((str(key), _signature(item)) for key, item in value.items())
    return value if isinstance(value, (torch.dtype, torch.device, bool, str)) else type(value)


def _tried(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor],
    quietly: Callable[[], Any],
) -> tuple[Form, ...] | None:  # fmt: skip
    generators = Generators((tensor.device for tensor in tensors), (*args, *kwargs.values()))
    with quietly(), torch.no_grad(), drawing_from(generators, None):
        args, kwargs = mapped((args, kwargs), lambda tensor: tensor.detach().clone())
        try:
            result = func(*args, **kwargs)
        except Exception:  # noqa: BLE001 - that it fails as it is may be why there is a policy; the inputs have to tell then
            return None
    return tuple((tensor.dtype, tensor.device) for tensor in tensors_in(result))
