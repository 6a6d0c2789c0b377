"""What a call of Paddle's would have returned: the dtype and the place of each of its results.

Mostly its inputs tell. Where they are of several dtypes, or auto_cast chooses one, or an argument names one, the call is executed
once in its own way, on copies and out of every sight, and what is learned holds for all calls that look alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.base import core, framework

from trueup.recording.adapters.paddle.policies_captures import quietly
from trueup.recording.adapters.paddle.policies_random import drawing_from
from trueup.recording.adapters.paddle.policies_tensors import is_plain, mapped, tensors_in
from trueup.recording.adapters.paddle.tensors import dtype_name

Form = tuple[str, Any]
"""Dtype and place."""
MOST_KNOWN = 4096
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = ("DataType", "VarType", "dtype")
"""Classes of what names a dtype among arguments."""

_known: dict[Any, tuple[Form, ...] | None] = {}


def forms(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Form, ...] | None:
    """Return dtype and place of each tensor that an operator would return; None where its inputs tell (`form_of`)."""
    tensors = tensors_in((args, kwargs))
    if _told_by_inputs(tensors, args, kwargs):
        return None
    key = name, autocast(), _signature(args), _signature(kwargs)
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = _tried(function, args, kwargs)
    return _known[key]


def form_of(inputs: list[paddle.Tensor]) -> Callable[[paddle.Tensor], Form] | None:
    """Return what gives the form of a result whose dtype follows from the inputs; None if no input tells."""
    if not inputs:
        return None
    place = next((tensor.place for tensor in inputs if not tensor.place.is_cpu_place()), inputs[0].place)
    floats = {name for tensor in inputs if (name := dtype_name(tensor.dtype)) in FLOATS}
    widest = "float32" if floats == {"float16", "bfloat16"} else max(floats, key=FLOATS.index, default=None)

    def form(result: paddle.Tensor) -> Form:
        own = dtype_name(result.dtype)
        if widest is None or own not in FLOATS:
            complex_of = {"float64": "complex128"}.get(widest or "", "complex64")
            return (complex_of if own.startswith("complex") and widest is not None else own), place
        return widest, place

    return form


def autocast() -> tuple[str, str] | None:
    """Return level and dtype of ``paddle.amp.auto_cast``, or None where it is off."""
    tracer = framework._dygraph_tracer()
    if tracer is None or tracer._amp_level == core.AmpLevel.O0:
        return None
    return str(tracer._amp_level), str(tracer._amp_dtype)


def _told_by_inputs(tensors: list[paddle.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (
        len({name for tensor in tensors if (name := dtype_name(tensor.dtype)) in FLOATS or name.startswith("complex")}) == 1
        and len({str(tensor.place) for tensor in tensors}) == 1
        and autocast() is None
        and not any(type(value).__name__ in DTYPES for value in (*args, *kwargs.values()))
    )


def _signature(value: Any) -> Any:
    """Describe an argument by what may decide a dtype; sizes and numbers do not."""
    if isinstance(value, paddle.Tensor):
        return (dtype_name(value.dtype), str(value.place), not value.shape) if tensors_in(value) else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((str(key), _signature(item)) for key, item in value.items())
    if type(value).__name__ in DTYPES or isinstance(value, (bool, str)):
        return str(value)
    return type(value)


def _tried(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Form, ...] | None:
    with quietly(), paddle.no_grad(), drawing_from(None):
        args, kwargs = mapped((args, kwargs), lambda tensor: tensor.clone() if is_plain(tensor) else tensor)
        try:
            result = function(*args, **kwargs)
        except Exception:  # noqa: BLE001 - that it fails as it is may be why there is a policy; the inputs have to tell then
            return None
    return tuple((dtype_name(tensor.dtype), tensor.place) for tensor in tensors_in(result))
