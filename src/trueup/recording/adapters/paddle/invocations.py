"""How an operator was called, exactly: what it takes, beside its tensors, to execute it again; and what holds around a call and
decides what it computes: generators, auto_cast, flags; read, and as it stood before.

A sample, of ``paddle._C_ops.dropout``:

    {"args": [{"tensor": "input.0", "grad": true}, null, 0.1, false, "upscale_in_train", 0, false, {"int": 0}],
     "grad": true, "random": {"cpu": "eJz..."}}

docs/format.md has the grammar; `execution.recorded` reads it. Nothing is pickled, and a function is described by its name alone.

Detail ``stats`` keeps it too, without the state of generators and where in memory tensors lay: operators of Paddle's do not look
how many arguments they get, and crash where one is missing, so calls cannot be guessed from what people are shown of them.

For a generator Paddle hands out an object that can be put back in the same process alone. Its parts are numbers (device, seed,
offset) and, on the CPU, the 312 numbers of std::mt19937_64 with its position, as text (Paddle 3.0 to 3.3.1). They are kept as one
line of text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import paddle
from paddle.amp.amp_lists import black_list, white_list
from paddle.base import core, framework

from trueup.foundation.frameworks.tables import functions_by_op
from trueup.recording.adapters.paddle.buffers import Base, base_of
from trueup.recording.adapters.paddle.context import SessionCore
from trueup.recording.adapters.paddle.tensors import PLACES, dtype_name, holds, is_dtype
from trueup.recording.recorder.arguments import MOST, Encoder, encode_state

OPS = "paddle._C_ops."

# ------------------------------------------------------------------------------------------------------------ generators
State = list[tuple[Any, Any]]

MOST_KNOWN = 1 << 12
"""Descriptions that are kept, half a KB each."""


def state() -> State:
    """Return where the generators of the host and of the current device stand."""
    kind, _, number = paddle.get_device().partition(":")
    generators = [generator_of("cpu")] + ([] if kind == "cpu" else [generator_of(kind, int(number or 0))])
    return [(generator, generator.get_state()) for generator in generators if generator is not None]


def put_back(before: State) -> None:
    """Set the generators back to where they stood."""
    for generator, value in before:
        generator.set_state(value)


def drew(before: State) -> bool:
    """Tell whether numbers were drawn since."""
    return any(described(generator) != _text(value) for generator, value in before)


@contextmanager
def drawing_from(before: State | None) -> Iterator[None]:
    """Draw from a state in a block, and let the generators stand afterwards where they stand now."""
    now = state()
    if before is not None:
        put_back(before)
    try:
        yield
    finally:
        put_back(now)


_STATE = re.compile(rb"-?\d{1,4} \d{1,20} \d{1,20}( (\d{1,20} ){312}\d{1,3})?")


def generator_of(kind: str, number: int = 0) -> Any:
    """Return the default generator of a device (kind ``cpu``, ``gpu``, ``xpu`` or of a custom device); None where it has none."""
    try:
        if kind == "cpu":
            return core.default_cpu_generator()
        if kind == "gpu":
            return core.default_cuda_generator(number)
        if kind == "xpu":
            return core.default_xpu_generator(number)
        return core.default_custom_device_generator(core.CustomPlace(kind, number))
    except (AttributeError, RuntimeError, ValueError, OSError):  # this build knows no such device
        return None


def described(generator: Any) -> str:
    """Return a text that differs where the state does; cheaper than `state_of`, and only good to compare in one process."""
    return _text(generator.get_state())


def _text(value: Any) -> str:
    head, _, engine = str(value).partition(" 0x")  # the address of a copy
    return head + engine.partition(" ")[2]


def state_of(generator: Any) -> bytes | None:
    """Return the state of a generator; None where this Paddle's has other parts."""
    parts = generator.get_state().__getstate__()
    if not (isinstance(parts, tuple) and len(parts) == 4):
        return None
    device, seed, offset, engine = parts
    text = bytes(engine) if isinstance(engine, (list, tuple, bytes)) else b""
    found = b" ".join([str(number).encode() for number in (device, seed, offset)] + ([text] if text else []))
    return found if _STATE.fullmatch(found) else None


def set_state(generator: Any, state: bytes) -> bool:
    """Set a generator to a state; False where it does not take it: a GPU's cannot go on from a CPU's."""
    if _STATE.fullmatch(state) is None:
        return False
    _, seed, offset, *engine = state.split(b" ", 3)
    device, _, _, own = generator.get_state().__getstate__()
    if bool(engine) != bool(own):
        return False
    made = core.GeneratorState.__new__(core.GeneratorState)
    try:
        made.__setstate__((device, int(seed), int(offset), list(engine[0]) if engine else []))
        generator.set_state(made)
    except (RuntimeError, ValueError, TypeError, OverflowError):
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- auto_cast
AutoCast = tuple[Any, str, bool, tuple[set[str], set[str]]]
"""Level, dtype, whether a dtype is promoted, and the lists of operators that are cast and that are not."""


def amp() -> tuple[Any, str] | None:
    """Return level and dtype of auto_cast, without the lists, which take longer to read; None where it is off."""
    tracer = framework._dygraph_tracer()
    return None if tracer is None or tracer._amp_level == core.AmpLevel.O0 else (tracer._amp_level, str(tracer._amp_dtype))


def auto_cast() -> AutoCast | None:
    """Return how operators are cast now; None where nothing executes."""
    tracer = framework._dygraph_tracer()
    if tracer is None:
        return None
    return tracer._amp_level, str(tracer._amp_dtype), tracer._use_promote, tracer._get_amp_op_list()


@contextmanager
def casting(setting: AutoCast | None) -> Iterator[None]:
    """Cast in a block as a setting says; None: as it is."""
    before = None if setting is None else auto_cast()
    if setting is None or before is None:
        yield
        return
    _cast(setting)
    try:
        yield
    finally:
        _cast(before)


def listed(ops: Iterable[str]) -> dict[str, list[str]]:
    """Return what the lists of auto_cast call operators: ``elementwise_sub`` is the kernel that ``paddle.subtract`` and a minus
    sign run. Names that are the kernel's own are listed beside the older ones, for either is asked by some versions."""
    found = {}
    for op in ops:
        own = functions_by_op("paddle").get(op)
        ran = [op, *(own.own["paddle"].names if own is not None and not op.startswith(OPS) else ())]
        kernels = dict.fromkeys(name.removeprefix(OPS).rstrip("_") for name in ran if name.startswith(OPS))
        names = [name for kernel in kernels for name in (*_older().get(kernel, ()), kernel)]
        if names:
            found[op] = names
    return found


@lru_cache(maxsize=1)
def _older() -> dict[str, list[str]]:
    """Return the operators that each kernel is known by where they have another name (`phi::TransToFluidOpName`)."""
    found: dict[str, list[str]] = {}
    for name in core.get_all_op_names():
        kernel = core._get_phi_kernel_name(name)
        if kernel != name and not name.endswith("_grad"):
            found.setdefault(kernel, []).append(name)
    return found


def _cast(setting: AutoCast) -> None:
    tracer = framework._dygraph_tracer()
    tracer._amp_level, tracer._amp_dtype, tracer._use_promote, lists = setting
    tracer._set_amp_op_list(*lists)


# ----------------------------------------------------------------------------------------------------------------- flags
def flags(names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those flags that this build has."""
    found: dict[str, Any] = {}
    for name in names:
        with suppress(ValueError):  # this build has no such flag
            found |= paddle.get_flags(name)
    return found


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
            key = _frozen(args), tuple([(k, _frozen(v)) for k, v in kwargs.items()]), paddle.is_grad_enabled(), amp()
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
            generator = generator_of(kind, int(number) if number.isdigit() else 0)
            if generator is None or kind in seen:
                continue
            now = described(generator)
            if self._states.get(kind) != now and (state := state_of(generator)) is not None:
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
    if amp() is None or (setting := auto_cast()) is None:
        return {}
    level, (_, dtype, promotes, lists) = str(setting[0]).rpartition(".")[2], setting
    found: dict[str, Any] = {"level": level} | ({"promote": True} if promotes else {})
    for name, own, usual in zip(("white", "black"), lists, (white_list(), black_list()), strict=True):
        if more := set(own) - set(usual.get(dtype, {}).get(level, ())):
            found[name] = sorted(more)
    kind = str(framework._current_expected_place())
    kind = kind[kind.find("(") + 1 : kind.rfind(")")].partition(":")[0]
    return {"autocast": {kind: dtype}, "amp": found}
