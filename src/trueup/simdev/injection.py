"""Switches faults and noise on and off, and keeps the list of calls that a fault really changed.

The healthy operator always runs first, so a fault draws no random number and allocates no other output; then its
result is overwritten. Operators that no row on now names are not touched and pay nothing.

A row of noise is the same mathematics with other rounding, as devices legitimately differ: a function here runs in place of a
healthy kernel; ``kernel`` is that kernel (or one made noisy already by another row).
"""

# ruff: noqa: ARG001 - every replacement gets the kernel, also one that computes the result itself

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from trueup.foundation.model import TrueupError
from trueup.simdev import faults, kernels, npu
from trueup.simdev.tables import FAULTS, NOISE, Fault
from trueup.simdev.tensor import Plan, interceptors

aten: Any = torch.ops.aten
Kernel = Callable[..., Any]
Different = Callable[..., Any]

KERNELS: dict[str, dict[str, Different]] = {name: {} for name in NOISE}
"""Row name -> operator -> replacement ``(kernel, *args, **kwargs)``."""

FIRED_LIMIT = 1000


def _of(row: str, *operators: str) -> Callable[[Different], Different]:
    def register(function: Different) -> Different:
        for operator in operators:
            KERNELS[row][f"aten::{operator}"] = function
        return function

    return register


def round_mantissa(x: Tensor) -> Tensor:
    """Round float32 to 10 explicit mantissa bits, to nearest, ties to even; infinities and NaN stay."""
    if x.dtype is not torch.float32:
        return x
    dropped = 23 - 10
    pattern = x.contiguous().view(torch.int32)
    odd = (pattern >> dropped) & 1
    rounded = (pattern + ((1 << (dropped - 1)) - 1) + odd) & -(1 << dropped)
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


@_of("hf32-matmul", "mm", "bmm")
def _hf32_product(kernel: Kernel, a: Tensor, b: Tensor, *rest: Any) -> Any:
    return kernel(round_mantissa(a), round_mantissa(b), *rest)


@_of("hf32-matmul", "addmm", "baddbmm")
def _hf32_added_product(kernel: Kernel, added: Tensor, a: Tensor, b: Tensor, **scalars: Any) -> Any:
    return kernel(added, round_mantissa(a), round_mantissa(b), **scalars)  # what is added stays float32, as in the hardware


@_of("hf32-matmul", "convolution")
def _hf32_convolution(kernel: Kernel, x: Tensor, weight: Tensor, *settings: Any) -> Any:
    return kernel(round_mantissa(x), round_mantissa(weight), *settings)


@_of("hf32-matmul", "convolution_backward")
def _hf32_convolution_backward(kernel: Kernel, grad: Tensor, x: Tensor, weight: Tensor, *settings: Any) -> Any:
    rounded = kernel(round_mantissa(grad), round_mantissa(x), round_mantissa(weight), *settings)
    bias_mask = [False, False, settings[-1][2]]
    if not bias_mask[2]:
        return rounded
    # The bias gradient is a plain sum, no product: it is not rounded.
    return (*rounded[:2], kernel(grad, x, weight, *settings[:-1], bias_mask)[2])


def _flipped(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operands of a product with their inner dimension turned round. Below the dispatcher's key for it a flip would
    forget that a tensor is conjugated when it is read, so those stay as they are."""
    return (a, b) if a.is_conj() or b.is_conj() else (a.flip(-1), b.flip(-2))


@_of("reordered-reductions", "mm", "bmm")
def _flipped_product(kernel: Kernel, a: Tensor, b: Tensor, *rest: Any) -> Any:
    return kernel(*_flipped(a, b), *rest)


@_of("reordered-reductions", "addmm", "baddbmm")
def _flipped_added_product(kernel: Kernel, added: Tensor, a: Tensor, b: Tensor, **scalars: Any) -> Any:
    return kernel(added, *_flipped(a, b), **scalars)


@_of("reordered-reductions", "sum")
def _halved_sum(kernel: Kernel, x: Tensor, *, dtype: Any = None) -> Any:
    if not x.is_floating_point() or x.numel() < 2:
        return kernel(x, dtype=dtype)
    flat, wide = x.reshape(-1), dtype or torch.promote_types(x.dtype, torch.float32)
    return (kernel(flat[0::2], dtype=wide) + kernel(flat[1::2], dtype=wide)).to(dtype or x.dtype)


@_of("reordered-reductions", "sum.dim_IntList")
def _halved_sum_along(kernel: Kernel, x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    axis = dim[0] if dim else 0
    if not x.is_floating_point() or x.dim() == 0 or x.size(axis) < 2:
        return kernel(x, dim, keepdim, dtype=dtype)
    pieces = [x.narrow(axis, 0, x.size(axis) // 2), x.narrow(axis, x.size(axis) // 2, x.size(axis) - x.size(axis) // 2)]
    wide = dtype or torch.promote_types(x.dtype, torch.float32)  # what a kernel of a 16-bit dtype adds in
    return (kernel(pieces[1], dim, keepdim, dtype=wide) + kernel(pieces[0], dim, keepdim, dtype=wide)).to(dtype or x.dtype)


@_of("reordered-reductions", "mean")
def _halved_mean(kernel: Kernel, x: Tensor, *, dtype: Any = None) -> Any:
    return _halved_sum(aten.sum, x, dtype=dtype) / x.numel()


@_of("reordered-reductions", "mean.dim")
def _halved_mean_along(kernel: Kernel, x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if not dim or x.dim() == 0:
        return kernel(x, dim, keepdim, dtype=dtype)
    count = 1
    for axis in dim:
        count *= x.size(axis)
    return _halved_sum_along(aten.sum.dim_IntList, x, dim, keepdim, dtype=dtype) / count


@_of("reordered-reductions", "native_layer_norm")
def _flipped_layer_norm(kernel: Kernel, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    axes = tuple(range(-len(shape), 0))
    flip = [None if each is None else each.flip(axes) for each in (x, weight, bias)]
    out, mean, rstd = kernel(flip[0], shape, flip[1], flip[2], eps)
    return out.flip(axes), mean, rstd


@_of("reordered-reductions", "_softmax", "_log_softmax")
def _flipped_softmax(kernel: Kernel, x: Tensor, dim: int, half_to_float: bool) -> Any:
    return kernel(x.flip(dim), dim, half_to_float).flip(dim) if x.dim() else kernel(x, dim, half_to_float)


@_of("reordered-reductions", "native_batch_norm")
def _float_batch_norm(
    kernel: Kernel, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    if not training or x.dtype is not torch.float32:
        return kernel(x, weight, bias, running_mean, running_var, training, momentum, eps)
    # The CPU accumulates in float64, where no order shows; accelerators accumulate in float32.
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
    mean = x.mean(axes)
    centred = x - mean.view(shape)
    variance = centred.square().mean(axes)
    rstd = torch.rsqrt(variance + eps)
    out = centred * (rstd if weight is None else rstd * weight).view(shape)
    n = x.numel() // x.size(1)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(variance, alpha=momentum * n / (n - 1))
    return out if bias is None else out + bias.view(shape), mean, rstd


def _single_precision(*values: Any) -> bool:
    return all(value.dtype is torch.float32 for value in values if isinstance(value, Tensor))


@_of("fused-multiply-add", "addmm")
def _fused_addmm(kernel: Kernel, added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if not _single_precision(added, a, b) or (beta, alpha) != (1, 1):
        return kernel(added, a, b, beta=beta, alpha=alpha)
    return (aten.mm(a, b).double() + added.double()).float() if a.size(1) < 2 else _last_term_fused(added, a, b)


def _last_term_fused(added: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # Starts the accumulator with the bias, as a fused kernel does, in place of adding it to the finished product.
    head = (added.double() + a[:, :1].double() * b[:1].double()).float()
    return aten.addmm(head, a[:, 1:], b[1:])


@_of("fused-multiply-add", "addcmul", "addcmul_")
def _fused_addcmul(kernel: Kernel, x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Any:
    if not _single_precision(x, a, b):
        return kernel(x, a, b, value=value)
    fused = (x.double() + float(value) * a.double() * b.double()).float()
    return x.copy_(fused) if _in_place(kernel) else fused


@_of("fused-multiply-add", "add.Tensor", "add_.Tensor")
def _fused_add(kernel: Kernel, x: Tensor, other: Any, *, alpha: Any = 1) -> Any:
    if alpha == 1 or not isinstance(other, Tensor) or not _single_precision(x, other):
        return kernel(x, other, alpha=alpha)
    fused = (x.double() + float(alpha) * other.double()).float()
    return x.copy_(fused) if _in_place(kernel) else fused


def _in_place(kernel: Any) -> bool:
    return bool(kernel._schema.name.endswith("_"))


@_of("fused-multiply-add", "_foreach_addcmul_.Scalar")
def _fused_foreach_addcmul(kernel: Kernel, x: list[Tensor], a: list[Tensor], b: list[Tensor], value: Any = 1) -> None:
    for each, first, second in zip(x, a, b, strict=True):
        _fused_addcmul(aten.addcmul_.default, each, first, second, value=value)


@_of("fused-multiply-add", "_foreach_add_.List")
def _fused_foreach_add(kernel: Kernel, x: list[Tensor], other: list[Tensor], *, alpha: Any = 1) -> None:
    for each, added in zip(x, other, strict=True):
        _fused_add(aten.add_.Tensor, each, added, alpha=alpha)


def _sigmoid(x: Tensor) -> Tensor:
    return 0.5 + 0.5 * (0.5 * x).tanh()


@_of("lstm-decomposition", "_thnn_fused_lstm_cell")
def _other_lstm(
    kernel: Kernel, ig: Tensor, hg: Tensor, cx: Tensor, ib: Tensor | None = None, hb: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = hg + ig
    if ib is not None and hb is not None:
        gates = gates + (ib + hb)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = _sigmoid(i), _sigmoid(f), g.tanh(), _sigmoid(o)
    cy = torch.addcmul(i * g, f, cx)
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


@_of("lstm-decomposition", "_thnn_fused_lstm_cell_backward_impl")
def _other_lstm_backward(
    kernel: Kernel, grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if grad_hy is None:
        return kernels.lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias)
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    d = grad_hy * (o - o * t * t)
    d = d if grad_cy is None else grad_cy + d
    gates = torch.cat([d * (g * (i - i * i)), d * (cx * (f - f * f)), d * (i - i * g * g), grad_hy * (t * (o - o * o))], 1)
    return gates, f * d, gates.flip(0).sum(0) if has_bias else None


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
        different = KERNELS[name].get(plan.name)
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
