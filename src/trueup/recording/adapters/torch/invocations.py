"""How a call was made, exactly: what it takes, beside its tensors, to execute it again. Kept at detail ``tensor``.

A sample, of ``torch.nn.functional.dropout(x, p=0.1, training=True)`` under autocast, and of ``aten::add.Tensor``:

    {"args": [{"tensor": "input.0", "grad": true}], "kwargs": {"p": 0.1, "training": true}, "grad": true,
     "autocast": {"cpu": "bfloat16"}, "random": {"cpu": "eJz..."}}
    {"overload": "Tensor", "args": [{"tensor": "input.0"}, {"tensor": "input.1"}], "kwargs": {"alpha": 1}, "grad": true}

docs/format.md has the grammar; `trueup.recording.execution.recorded` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from trueup.recording.adapters.torch import modes
from trueup.recording.adapters.torch.context import SessionCore
from trueup.recording.adapters.torch.random_states import state_of
from trueup.recording.adapters.torch.tensors import describe_values, is_plain, local
from trueup.recording.recorder import Call
from trueup.recording.recorder.arguments import MOST, Encoder
from trueup.recording.recorder.arguments import encode_state as encode_state

MOST_WAITING = 1 << 12

Row = tuple[str | None, str | None]
"""``(value, invocation)``."""


class Invocations:
    """Describes calls; one object for a session. The state of a device's generator is described where it is not what it was when
    it was last described in this step."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._states: dict[str, bytes] = {}
        self._step = -1
        self._seeded: dict[Any, bool] = {}
        self._waiting: dict[int, dict[str, str]] = {}
        self.last: tuple[int, bytes] | None = None
        """Step, and the state of the CPU's generator as last described in it; None where calls are made on other devices, too."""
        self._devices = -1
        self._seen: tuple[str, ...] = ()

    def waits(self, call: Call, func: Callable[..., Any]) -> None:
        """Hear that a function begins that is given no tensor: only its result tells whether it is a call to record."""
        if len(self._waiting) >= MOST_WAITING:  # of functions that turned out to be no calls
            self._waiting.clear()
        self._waiting[call.seq] = self._random() if self._may_draw(func) else {}
        self.last = None  # what was found belongs to the row of this call

    def left_out(self, call: Call) -> None:
        """Hear that such a function was no call to record: the states that were found belong to the next row."""
        for kind in self._waiting.pop(call.seq, {}):
            self._states.pop(kind, None)

    def row(self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Row:
        """Return the row ``arguments`` of a call: its value, and how the call was made."""
        row, draws = self.describe(func, args, kwargs)
        return self.with_state(call, row) if draws else row

    def describe(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Row, bool]:
        """Return the row ``arguments`` of a call, and whether the states of the generators belong to it; see `with_state`. It is
        the same for all calls that are given alike: the compiled way (native/invocations.c) asks once."""
        kwargs = kwargs or {}
        return (describe_values(args, kwargs), _describe(func, args, kwargs)), self._may_draw(func)

    def with_state(self, call: Call, row: Row) -> Row:
        """Add the states of generators, those that changed, to the row of a call."""
        state = self._waiting.pop(call.seq) if call.seq in self._waiting else self._random()
        value, described = row
        if described is None or not state:
            return row
        return value, f'{described[:-1]}, "random": {json.dumps(state)}}}'

    def _random(self) -> dict[str, str]:
        step = self._session.recorder.step
        if step != self._step:
            self._step = step
            self._states.clear()
            self._waiting.clear()
        found = {}
        for kind in self._kinds():
            with modes.outside():
                found_state = state_of(kind)
                state = None if found_state is None else bytes(found_state.numpy().tobytes())
            if state is not None and self._states.get(kind) != state:
                self._states[kind] = state
                found[kind] = encode_state(state)
        cpu = self._states.get("cpu")
        self.last = (step, cpu) if cpu is not None and self._kinds() == ("cpu",) and not self._waiting else None
        return found

    def _kinds(self) -> tuple[str, ...]:
        """Return the types of the devices that tensors were seen on."""
        devices = self._session.slots.devices
        if len(devices) != self._devices:
            self._devices = len(devices)
            self._seen = tuple({"cpu": None, **{name.partition(":")[0]: None for name in devices}})
        return self._seen

    def _may_draw(self, func: Any) -> bool:
        """Tell whether a function may draw random numbers: of level api any, of operators those that say so."""
        if not isinstance(func, torch._ops.OpOverload):
            return True
        found = self._seeded.get(func)
        if found is None:
            found = self._seeded[func] = torch.Tag.nondeterministic_seeded in func.tags
        return found


def _describe(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    encoder = _Encoder()
    found: dict[str, Any] = {}
    overload = getattr(func, "_overloadname", None)
    if isinstance(overload, str):
        found["overload"] = overload
    found["args"] = [encoder.value(value, f"input.{k}") for k, value in enumerate(args)]
    given = {name: encoder.value(v, f"input.{name}") for name, v in kwargs.items() if name != "out"}
    if given:
        found["kwargs"] = given
    if "out" in kwargs:
        found["out"] = _encode_out(kwargs["out"])
    found["grad"] = torch.is_grad_enabled()
    if modes.inside():
        found["transforms"] = modes.running()
    if casts := autocast():
        found["autocast"] = {kind: str(dtype).removeprefix("torch.") for kind, dtype in casts if dtype is not None}
        if (CACHE_OFF, None) in casts:
            found["autocast_cache"] = False
    text = json.dumps(found)
    return text if len(text) <= MOST else None


class _Encoder(Encoder):
    """Writes the arguments of one call of PyTorch."""

    tensor_type = torch.Tensor
    sequences = {list: "", tuple: "tuple", torch.Size: "size"}  # noqa: RUF012 - of the class

    def __init__(self) -> None:
        self._storages: dict[int, str] = {}  # first slot that shows each storage

    def own(self, value: Any) -> Any:
        for kind, name in _OWN:
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        if isinstance(value, torch.Generator):
            state = encode_state(value.get_state().cpu().numpy().tobytes())
            return {"generator": {"device": str(value.device), "state": state}}
        return None

    def tensor(self, tensor: torch.Tensor, slot: str) -> dict[str, Any]:
        found: dict[str, Any] = {"tensor": slot}
        if tensor.requires_grad:
            found["grad"] = True
        if not is_plain(tensor) or local(tensor) is not tensor:
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            return found | {"kind": str(tensor.layout).removeprefix("torch.") if plain else type(tensor).__name__}
        if tensor.is_conj() or tensor.is_neg():
            return found | {"kind": "conjugate or negative view"}
        if modes.inside() and (whole := modes.below(tensor)) is not tensor:
            if samples := modes.batched(tensor):
                found["samples"] = samples
            tensor = whole
        try:
            if offset := tensor.storage_offset():
                found["offset"] = offset
            first = self._storages.setdefault(tensor.untyped_storage()._cdata, slot)
            if first != slot:
                found["shares"] = first
        except (RuntimeError, NotImplementedError):
            found["kind"] = "tensor without memory of its own"
        return found


_OWN = ((torch.dtype, "dtype"), (torch.device, "device"), (torch.layout, "layout"), (torch.memory_format, "memory_format"))


def _encode_out(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = list(value.stride()) if value.layout is torch.strided else None
        return {"empty": [str(value.dtype).removeprefix("torch."), list(value.shape), strides, str(value.device)]}
    if isinstance(value, (tuple, list)):
        return [_encode_out(v) for v in value]
    return {"other": type(value).__name__}


CACHE_OFF = "no cache"


def autocast() -> tuple[tuple[str, torch.dtype | None], ...]:
    """Return the devices for which autocast is on, each with the dtype it casts to; `CACHE_OFF` where it keeps no casts."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    kinds = ["cpu", "cuda", torch._C._get_privateuse1_backend_name()]
    found = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    return (*found, *([] if torch.is_autocast_cache_enabled() else [(CACHE_OFF, None)]))
