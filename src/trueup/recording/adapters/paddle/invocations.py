"""How an operator was called, exactly: what it takes, beside its tensors, to execute it again.

A sample, of ``paddle._C_ops.dropout``:

    {"args": [{"tensor": "input.0", "grad": true}, null, 0.1, false, "upscale_in_train", 0, false, {"int": 0}],
     "grad": true, "random": {"cpu": "eJz..."}}

docs/format.md has the grammar; `execution.recorded` reads it. Nothing is pickled, and a function is told by its name alone.

Detail ``stats`` keeps it too, without the state of generators and where in memory tensors lay: operators of Paddle's do not look
how many arguments they get, and crash where one is missing, so calls cannot be guessed from what people are shown of them.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle.amp.amp_lists import black_list, white_list
from paddle.base import framework

from trueup.foundation.redaction import conceals
from trueup.recording.adapters.paddle import random_states
from trueup.recording.adapters.paddle.buffers import Base, base_of
from trueup.recording.adapters.paddle.tensors import PLACES, dtype_name, holds, is_dtype
from trueup.recording.recorder.arguments import MAX_DEPTH

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

MOST = 1 << 16
"""Longest description, without the state of generators; a longer one is left out, and the call cannot be executed again."""
MOST_KNOWN = 1 << 12
"""Descriptions that are kept, half a KB each."""


@dataclass(frozen=True, slots=True)
class Made:
    """How a call was made."""

    text: str | None
    """JSON; None: it would be too long."""
    states: dict[str, str] = field(default_factory=dict)
    """States of generators that it tells, by kind of device."""


class Invocations:
    """Describes calls; one object for a session.

    The state of a device's generator is described where it is not what it was when it was last described in this step.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._exactly = session.options.detail == "tensor"
        self._states: dict[str, str] = {}
        self._step = -1
        self._known: dict[Any, Made] = {}

    def describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made:
        """Return how a call is about to be made."""
        if not self._exactly:
            return self._alike(args, kwargs)
        step = self._session.recorder.step
        if step != self._step:
            self._step = step
            self._states.clear()
        text = _describe(args, kwargs, {})
        return Made(None) if len(text) > MOST else self._with_states(text)

    def _alike(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made:
        """Return the one description of all calls that are made alike."""
        try:
            key = _frozen(args), tuple([(k, _frozen(v)) for k, v in kwargs.items()]), paddle.is_grad_enabled(), _is_amp()
            found = self._known.get(key)
        except TypeError:  # an argument that nothing is known of
            key, found = None, None
        if found is None:
            text = _describe(args, kwargs, None)
            found = Made(None if len(text) > MOST else text)
            if key is not None:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[key] = found
        return found

    def kept(self, made: Made) -> None:
        """Hear that a description is recorded: the states that it tells need not be told again."""
        self._states |= made.states

    def _with_states(self, text: str) -> Made:
        seen, found = {}, {}
        for name in {"cpu": None, **self._session.slots.devices}:
            kind, _, number = name.partition(":")
            generator = random_states.generator_of(kind, int(number) if number.isdigit() else 0)
            if generator is None or kind in seen:
                continue
            now = random_states.described(generator)
            if self._states.get(kind) != now and (state := random_states.state_of(generator)) is not None:
                seen[kind] = now
                found[kind] = base64.b64encode(zlib.compress(state, 1)).decode()
        return Made(f'{text[:-1]}, "random": {json.dumps(found)}}}' if found else text, seen)


Memories = dict[Base, str] | None
"""First slot that shows each piece of memory; None: where tensors lie is not told."""


def _frozen(value: Any) -> Any:
    """Return something hashable that is equal for arguments that are described alike.

    Raises:
        TypeError: there is nothing so simple.
    """
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return value.hex()  # tells -0.0 from 0.0, and NaN equals itself
    if isinstance(value, paddle.Tensor):
        return holds(value), value.stop_gradient
    if kind in (tuple, list, paddle.Size):
        return kind, tuple([_frozen(v) for v in value])
    if kind is slice:
        return slice, _frozen(value.start), _frozen(value.stop), _frozen(value.step)
    raise TypeError(kind)


_PLAIN = frozenset({int, bool, str, type(None), type(Ellipsis), paddle.dtype})


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any], memories: Memories) -> str:
    found: dict[str, Any] = {"args": [_encode(value, f"input.{k}", memories) for k, value in enumerate(args)]}
    given = {name: _encode(v, f"input.{name}", memories) for name, v in kwargs.items() if name != "out"}
    if given:
        found["kwargs"] = given
    if isinstance(out := kwargs.get("out"), paddle.Tensor) and holds(out):
        found["out"] = {"empty": [dtype_name(out.dtype), list(out.shape), None, str(out.place)]}
    found["grad"] = bool(paddle.is_grad_enabled())
    return json.dumps(found | _amp())


def _encode(value: Any, slot: str, memories: Memories, depth: int = 0) -> Any:
    """Write an argument; what has no exact form here is named by its type alone."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        return {"other": "secret"} if conceals(text, slot) else text
    if isinstance(value, paddle.Tensor):
        return _encode_tensor(value, slot, memories)
    if isinstance(value, np.generic):
        value = value.item()
    if is_dtype(value):  # those of programs are integers, too
        name = dtype_name(value)
        return {"dtype": _VARIABLES.get(name, name)}
    if isinstance(value, PLACES):
        text = str(value)
        return {"device": text[text.find("(") + 1 : text.rfind(")")]}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if depth < MAX_DEPTH and type(value) in (list, tuple, paddle.Size):
        items = [_encode(v, f"{slot}.{k}", memories, depth + 1) for k, v in enumerate(value)]
        return {"tuple": items} if type(value) is tuple else items
    if depth < MAX_DEPTH and type(value) is slice:
        parts = [_encode(v, f"{slot}.{k}", memories, depth + 1) for k, v in enumerate((value.start, value.stop, value.step))]
        return {"slice": parts} if all(v is None or type(v) is int for v in parts) else {"other": "slice of tensors"}
    if value is Ellipsis:
        return {"ellipsis": True}
    return {"other": type(value).__name__}


_VARIABLES = {
    "FP32": "float32", "FP64": "float64", "FP16": "float16", "BF16": "bfloat16", "INT8": "int8", "INT16": "int16",
    "INT32": "int32", "INT64": "int64", "UINT8": "uint8", "BOOL": "bool", "COMPLEX64": "complex64", "COMPLEX128": "complex128",
}  # fmt: skip
"""Names of dtypes in programs, ``VarType.FP32``."""


def _encode_tensor(tensor: paddle.Tensor, slot: str, memories: Memories) -> Any:
    if not holds(tensor):
        return {"undefined": True}
    found: dict[str, Any] = {"tensor": slot}
    if not tensor.stop_gradient:
        found["grad"] = True
    if not tensor.is_dense() or tensor.is_dist():
        return found | {"kind": "distributed" if tensor.is_dist() else "sparse" if tensor.is_sparse() else "not dense"}
    if memories is None or not tensor._is_initialized():  # the latter has no elements
        return found
    if offset := tensor._offset() // tensor.element_size():
        found["offset"] = offset
    first = memories.setdefault(base_of(tensor), slot)
    if first != slot:
        found["shares"] = first
    return found


def _is_amp() -> Any:
    tracer = framework._dygraph_tracer()
    level = tracer._amp_level.value
    return (level, tracer._amp_dtype) if level else 0


def _amp() -> dict[str, Any]:
    """Describe automatic mixed precision, where it is on: the dtype by kind of device, and what differs from its lists."""
    tracer = framework._dygraph_tracer()
    level = str(tracer._amp_level).rpartition(".")[2]
    if level == "O0":
        return {}
    dtype = str(tracer._amp_dtype)
    allowed, refused = (set(names) for names in tracer._get_amp_op_list())
    usual, banned = (set(names.get(dtype, {}).get(level, ())) for names in (white_list(), black_list()))
    found: dict[str, Any] = {"level": level}
    if tracer._use_promote:
        found["promote"] = True
    for name, names in (("white", allowed - usual), ("black", refused - banned)):
        if names:
            found[name] = sorted(names)
    kind = str(framework._current_expected_place())
    kind = kind[kind.find("(") + 1 : kind.rfind(")")].partition(":")[0]
    return {"autocast": {kind: dtype}, "amp": found}
