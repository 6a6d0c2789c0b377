"""Switches faults and noise on and off, and keeps the list of calls that a fault really changed.

The healthy operator always runs first, so a fault draws no random number and allocates no other output; then its
result is overwritten. Operators that no row on now names are not touched and pay nothing.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from trueup.foundation.model import TrueupError
from trueup.simdev import differences, faults, npu
from trueup.simdev.tables import FAULTS, NOISE, Fault
from trueup.simdev.tensor import Plan, interceptors

FIRED_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class Fired:
    """One call whose result a fault changed: the true culprit, for a test to compare a verdict with."""

    fault: str
    op: str  # ``aten::add_.Tensor``; the default overload has no suffix
    ordinal: int  # the n-th execution of this operator on npu since the injection, from 0
    phase: Literal["forward", "backward", "optimizer"]


@dataclass(eq=False)
class _Active:
    row: Fault
    executions: dict[str, int] = field(default_factory=dict)
    memory: dict[Any, Any] = field(default_factory=dict)


_faults: list[_Active] = []
_noises: list[str] = []
_fired: list[Fired] = []

# Buffers that an operator updates though its schema does not say so.
_UNDECLARED_WRITES = {"aten::native_batch_norm": ("running_mean", "running_var")}


class Switch:
    """What `inject` and `noise` return: on already; leaving it as a context manager switches it off."""

    def __init__(self, off: Callable[[], None]) -> None:
        self._off = off

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *exc: object) -> None:
        self._off()


def _row(name: str, table: Mapping[str, Any], kind: str) -> Any:
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=3, cutoff=0.4)
    hint = f"Did you mean {' or '.join(close)}?" if close else "`trueup simdev list` shows them all."
    raise TrueupError(f"The simulated device has no {kind} {name!r}. {hint}")


def inject(name: str) -> Switch:
    """Break the device; see `trueup.simdev.inject`."""
    active = _Active(_row(name, FAULTS, "fault"))
    if not _faults:
        _fired.clear()
    return _switched_on(active, _faults)


def noise(name: str) -> Switch:
    """Make the device round differently; see `trueup.simdev.noise`."""
    _row(name, NOISE, "noise")
    return _switched_on(name, _noises)


def _switched_on(one: Any, among: list[Any]) -> Switch:
    if one not in among:
        among.append(one)
    _rewire()

    def off() -> None:
        if one in among:
            among.remove(one)
            _rewire()

    return Switch(off)


def heal() -> None:
    """Switch every fault and all noise off; what has `fired` can still be read."""
    _faults.clear()
    _noises.clear()
    _rewire()


def fired() -> list[Fired]:
    """Return the calls that faults have changed since the first of them was injected, in order, at most 1000."""
    return list(_fired)


def _operator(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _rewire() -> None:
    interceptors.clear()
    for op in {op for active in _faults for op in active.row.ops} | {op for name in _noises for op in NOISE[name].ops}:
        interceptors[_operator(op)] = _intercept
    npu.matmul.allow_hf32 = npu.conv.allow_hf32 = "hf32-matmul" in _noises


def _intercept(plan: Plan, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    schema = getattr(kernel, "_schema", None) or _operator(plan.name)._schema
    for name in reversed(NOISE):  # inside out: the rounding of inputs, first in the table, goes around the rest
        different = differences.KERNELS[name].get(plan.name)
        if different is not None and name in _noises:
            kernel = functools.partial(different, kernel)
    broken = [active for active in _faults if plan.name in active.row.ops]
    if not broken:
        return kernel(*args, **kwargs)
    arguments = _bind(schema, args, kwargs)
    written = [schema.arguments[place].name if isinstance(place, int) else place for place in plan.written]
    written += [name for name in _UNDECLARED_WRITES.get(plan.name, ()) if arguments[name] is not None]
    before = arguments | {name: _copied(arguments[name]) for name in written}
    result = kernel(*args, **kwargs)
    outputs = _outputs(result, [arguments[name] for name in written])
    for active in broken:
        _apply(active, plan.name, before, outputs)
    return result


def _bind(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = {argument.name: argument.default_value for argument in schema.arguments}
    bound.update(zip(bound, args, strict=False))
    bound.update(kwargs)
    return bound


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else [each.clone() for each in value]


def _outputs(result: Any, written: list[Any]) -> list[Any]:
    """Return what the operator returned, then what it wrote without returning it."""
    outputs = list(result) if isinstance(result, (tuple, list)) else [result] if result is not None else []
    known = {id(output) for output in outputs}
    for value in written:
        outputs.extend(each for each in ([value] if isinstance(value, Tensor) else value) if id(each) not in known)
    return outputs


def _phase() -> Literal["forward", "backward", "optimizer"]:
    if torch._C._current_graph_task_id() != -1:
        return "backward"
    return "forward" if torch.is_grad_enabled() else "optimizer"


def _apply(active: _Active, op: str, before: dict[str, Any], outputs: list[Any]) -> None:
    row, phase = active.row, _phase()
    ordinal = active.executions.get(op, 0)
    active.executions[op] = ordinal + 1
    if row.gated and phase != row.phase:
        return
    with torch.no_grad():
        wrong = faults.EFFECTS[row.name](faults.Call(op, before, outputs, active.memory))
    if wrong is None:
        return
    replacements = [wrong] if isinstance(wrong, Tensor) else wrong
    changed = [_overwrite(healthy, other) for healthy, other in zip(outputs, replacements, strict=False)]
    if any(changed) and len(_fired) < FIRED_LIMIT:
        _fired.append(Fired(row.name, op, ordinal, phase))


def _overwrite(healthy: Any, wrong: Tensor | None) -> bool:
    """Write the wrong numbers into the healthy output; return whether a bit changed."""
    if wrong is None or not isinstance(healthy, Tensor):
        return False
    before = healthy.clone()
    healthy.copy_(wrong)
    return not _same_bits(before, healthy)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # As bytes: NaN equals itself here, and -0 differs from 0.
    first, second = (each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return bool(torch.equal(first, second))
