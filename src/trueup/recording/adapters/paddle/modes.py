"""What holds around a call and decides what it computes: generators, auto_cast, flags; read, and as it stood before.

For a generator Paddle hands out an object that can be put back in the same process alone. Its parts are numbers (device, seed,
offset) and, on the CPU, the 312 numbers of std::mt19937_64 with its position, as text (Paddle 3.0 to 3.3.1). They are kept as one
line of text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import paddle
from paddle.base import core, framework

from trueup.foundation.frameworks.tables import functions_by_op

OPS = "paddle._C_ops."

# ------------------------------------------------------------------------------------------------------------ generators
State = list[tuple[Any, Any]]


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
