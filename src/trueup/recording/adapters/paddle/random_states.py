"""The state of a generator of Paddle's as bytes, and back.

Paddle hands out an object that can be put back in the same process alone. Its parts are numbers (device, seed, offset) and, on the
CPU, the 312 numbers of std::mt19937_64 with its position, as text (Paddle 3.0 to 3.3.1). They are kept as one line of text.
"""

from __future__ import annotations

import re
from typing import Any

from paddle.base import core

_STATE = re.compile(rb"-?\d{1,4} \d{1,20} \d{1,20}( (\d{1,20} ){312}\d{1,3})?")


def generator_of(kind: str, number: int = 0) -> Any:
    """Return the default generator of a device; None where it has none.

    Args:
        kind: ``cpu``, ``gpu``, ``xpu``, or the type of a custom device.
        number: of the device.
    """
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
    head, _, engine = str(generator.get_state()).partition(" 0x")  # the address of a copy
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
