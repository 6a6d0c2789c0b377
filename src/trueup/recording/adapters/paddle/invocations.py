"""How an operator was called, exactly: what it takes, beside its tensors, to execute it again.

A sample, of ``paddle._C_ops.dropout``:

    {"args": [{"tensor": "input.0", "grad": true}, null, 0.1, false, "upscale_in_train", 0, false, {"int": 0}],
     "grad": true, "random": {"cpu": "eJz..."}}

docs/format.md has the grammar; `execution.recorded` reads it. Nothing is pickled, and a function is described by its name alone.

Detail ``stats`` keeps it too, without the state of generators and where in memory tensors lay: operators of Paddle's do not look
how many arguments they get, and crash where one is missing, so calls cannot be guessed from what people are shown of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.amp.amp_lists import black_list, white_list
from paddle.base import framework

from trueup.recording.adapters.paddle import modes
from trueup.recording.adapters.paddle.buffers import Base, base_of
from trueup.recording.adapters.paddle.context import SessionCore
from trueup.recording.adapters.paddle.tensors import PLACES, dtype_name, holds, is_dtype
from trueup.recording.engine.invocations import MOST, Encoder, encode_state

MOST_KNOWN = 1 << 12
"""Descriptions that are kept, half a KB each."""


@dataclass(frozen=True, slots=True)
class Made:
    """How a call was made."""

    text: str | None  # JSON; None: it would be too long
    states: dict[str, str] = field(default_factory=dict)  # states of generators in it, by kind of device


class Invocations:
    """Describes calls; one object for a session. The state of a device's generator is described where it is not what it was when
    it was last described in this step."""

    def __init__(self, session: SessionCore) -> None:
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
            key = _frozen(args), tuple([(k, _frozen(v)) for k, v in kwargs.items()]), paddle.is_grad_enabled(), modes.amp()
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
        """Note that a description is recorded: its states of generators need no second record."""
        self._states |= made.states

    def _with_states(self, text: str) -> Made:
        seen, found = {}, {}
        for name in {"cpu": None, **self._session.slots.devices}:
            kind, _, number = name.partition(":")
            generator = modes.generator_of(kind, int(number) if number.isdigit() else 0)
            if generator is None or kind in seen:
                continue
            now = modes.described(generator)
            if self._states.get(kind) != now and (state := modes.state_of(generator)) is not None:
                seen[kind] = now
                found[kind] = encode_state(state)
        return Made(f'{text[:-1]}, "random": {json.dumps(found)}}}' if found else text, seen)


Memories = dict[Base, str] | None
"""First slot that shows each piece of memory; None: the places of tensors are left out."""


def _frozen(value: Any) -> Any:
    """Return something hashable that is equal for arguments described alike; raise `TypeError` where there is nothing so
    simple."""
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
    encoder = _Encoder(memories)
    found: dict[str, Any] = {"args": [encoder.value(value, f"input.{k}") for k, value in enumerate(args)]}
    given = {name: encoder.value(v, f"input.{name}") for name, v in kwargs.items() if name != "out"}
    if given:
        found["kwargs"] = given
    if isinstance(out := kwargs.get("out"), paddle.Tensor) and holds(out):
        found["out"] = {"empty": [dtype_name(out.dtype), list(out.shape), None, str(out.place)]}
    found["grad"] = bool(paddle.is_grad_enabled())
    return json.dumps(found | _amp())


_VARIABLES = {
    "FP32": "float32", "FP64": "float64", "FP16": "float16", "BF16": "bfloat16", "INT8": "int8", "INT16": "int16",
    "INT32": "int32", "INT64": "int64", "UINT8": "uint8", "BOOL": "bool", "COMPLEX64": "complex64", "COMPLEX128": "complex128",
}  # fmt: skip
"""Names of dtypes in programs, ``VarType.FP32``."""


class _Encoder(Encoder):
    """Writes the arguments of one call of Paddle's."""

    tensor_type = paddle.Tensor
    sequences = {list: "", tuple: "tuple", paddle.Size: ""}  # noqa: RUF012 - of the class

    def __init__(self, memories: Memories) -> None:
        self._memories = memories

    def own(self, value: Any) -> Any:
        """Describe a dtype or place; dtypes of programs are integers, too."""
        if is_dtype(value):
            name = dtype_name(value)
            return {"dtype": _VARIABLES.get(name, name)}
        if isinstance(value, PLACES):
            text = str(value)
            return {"device": text[text.find("(") + 1 : text.rfind(")")]}
        return None

    def tensor(self, tensor: paddle.Tensor, slot: str) -> Any:
        if not holds(tensor):
            return {"undefined": True}
        found: dict[str, Any] = {"tensor": slot}
        if not tensor.stop_gradient:
            found["grad"] = True
        if not tensor.is_dense() or tensor.is_dist():
            return found | {"kind": "distributed" if tensor.is_dist() else "sparse" if tensor.is_sparse() else "not dense"}
        if self._memories is None or not tensor._is_initialized():  # the latter has no elements
            return found
        if offset := tensor._offset() // tensor.element_size():
            found["offset"] = offset
        first = self._memories.setdefault(base_of(tensor), slot)
        if first != slot:
            found["shares"] = first
        return found


def _amp() -> dict[str, Any]:
    """Describe automatic mixed precision, where it is on: the dtype by kind of device, and what differs from its lists."""
    if modes.amp() is None or (setting := modes.auto_cast()) is None:
        return {}
    level, (_, dtype, promotes, lists) = str(setting[0]).rpartition(".")[2], setting
    found: dict[str, Any] = {"level": level} | ({"promote": True} if promotes else {})
    for name, own, usual in zip(("white", "black"), lists, (white_list(), black_list()), strict=True):
        if more := set(own) - set(usual.get(dtype, {}).get(level, ())):
            found[name] = sorted(more)
    kind = str(framework._current_expected_place())
    kind = kind[kind.find("(") + 1 : kind.rfind(")")].partition(":")[0]
    return {"autocast": {kind: dtype}, "amp": found}
