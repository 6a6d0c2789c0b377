"""Statistics on the device where a tensor lives: which kernel takes them, and how they come to the host.

For each device it is the first of these that gives the right numbers for a tensor of 10,000 elements: the Triton kernel; PyTorch
operators; the host, to which every tensor is then copied. That is tried once, when the first tensor of the device is measured; the
trial waits for the device, nothing after it does. ``TRUEUP_TRITON=0`` leaves Triton out.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from trueup.foundation import kernels
from trueup.foundation.model import PACKED
from trueup.recording.adapters.torch import device_operators
from trueup.recording.adapters.torch.device_row import WIDTH, finish, is_masking
from trueup.recording.adapters.torch.ring import Ring, Row

TRITON_VARIABLE = "TRUEUP_TRITON"

TRITON_BACKENDS = {"cuda": ("cuda", "hip"), "xpu": ("xpu",), "npu": ("npu", "ascend")}
"""By PyTorch's device type, the Triton backends that compile for it; npu is triton-ascend's. A driver for another device would
take a pointer for its own."""

Fill = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Way:
    """How the tensors of a device are measured."""

    description: str
    """For the manifest."""
    fill: Fill | None
    """Writes a row, ``fill(tensor, row)``, without waiting; None: on the host."""
    ring: Ring | None


class Pending:
    """Statistics that are still on their device."""

    __slots__ = ("masking", "numel", "ring", "row")

    def __init__(self, ring: Ring, row: Row, numel: int, masking: bool) -> None:
        self.ring, self.row, self.numel, self.masking = ring, row, numel, masking


_WAYS: dict[torch.device, Way] = {}
_CHOOSING = threading.Lock()


def _forget() -> None:
    global _CHOOSING
    _WAYS.clear()
    _CHOOSING = threading.Lock()


os.register_at_fork(after_in_child=_forget)  # a child cannot use its parent's devices


def descriptions() -> dict[str, str]:
    """Say, for each device that was measured, how."""
    return {str(device): way.description for device, way in _WAYS.items()}


def begin(tensor: torch.Tensor) -> Pending | None:
    """Enqueue the measurement of a tensor on the current stream of its device; None if it must be measured on the host.

    Raises:
        RuntimeError: a CUDA graph is being captured, and what is enqueued now would run at every replay; or the kernel failed.
        TypeError, NotImplementedError: the tensor holds no numbers that the device can add.
    """
    device = tensor.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured, and what it replays is not seen")
    with ExitStack() as plainly:
        if torch.is_inference_mode_enabled():  # memory that is made for inference only could not be written outside
            plainly.enter_context(torch.inference_mode(False))
        if torch._C._functorch.peek_interpreter_stack() is not None:  # inside `torch.func` nothing captured may be written
            plainly.enter_context(temporarily_clear_interpreter_stack())
        if torch.is_autocast_enabled(device.type):
            plainly.enter_context(torch.autocast(device.type, enabled=False))
        way = _WAYS.get(device) or _choose(device)
        return None if way.fill is None or way.ring is None else _enqueue(tensor.detach(), way.fill, way.ring)


def _enqueue(tensor: torch.Tensor, fill: Fill, ring: Ring) -> Pending:
    row = ring.take()
    with _selected(tensor.device):
        try:
            fill(tensor, row.values)
        except (RuntimeError, TypeError, NotImplementedError):
            raise
        except Exception as error:  # Triton's compiler has classes of its own; for the capture they are all one
            raise RuntimeError(f"the kernel for {tensor.dtype} failed: {_first_line(error)}") from error
    parts, dtype = (2, tensor.dtype.to_real()) if tensor.is_complex() else (1, tensor.dtype)
    return Pending(ring, row, parts * tensor.numel(), is_masking(dtype))


def bring(pending: list[Pending]) -> list[np.ndarray[Any, Any]]:
    """Bring statistics to the host, one transfer for each device: packed vectors, float64 ``(PACKED,)`` each."""
    found: list[np.ndarray[Any, Any]] = [np.empty(0)] * len(pending)
    for ring in dict.fromkeys(p.ring for p in pending):
        places = [k for k, p in enumerate(pending) if p.ring is ring]
        group = [pending[k] for k in places]
        rows = ring.fetch([p.row for p in group])
        packed = finish(rows, [p.numel for p in group], [p.masking for p in group], ring.dtype)
        for k, values in zip(places, packed, strict=True):
            found[k] = values.copy()  # a view would keep the whole flush in memory as long as one tensor lives
    return found


def _selected(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, where that means something: Triton launches there."""
    module: Any = getattr(torch, device.type, None)
    if device.index is None or not hasattr(module, "device") or module.current_device() == device.index:
        return nullcontext()
    chosen: AbstractContextManager[Any] = module.device(device)
    return chosen


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# ---------------------------------------------------------------- which way
def _choose(device: torch.device) -> Way:
    with _CHOOSING:
        if device not in _WAYS:
            _WAYS[device] = _first_that_works(device)
        return _WAYS[device]


def _first_that_works(device: torch.device) -> Way:
    reasons = []
    for attempt in (_with_triton, _with_operators):
        try:
            way = attempt(device)
            _try(way, device)
        except Exception as error:  # noqa: BLE001 - a compiler, a driver or a device may fail in any way
            reasons.append(_first_line(error))
        else:
            return Way("; ".join([way.description, *reasons]), way.fill, way.ring)
    return Way("; ".join(["copied to the host, waiting for the device at each tensor", *reasons]), None, None)


def _with_triton(device: torch.device) -> Way:
    if os.environ.get(TRITON_VARIABLE) == "0":
        raise RuntimeError(f"Triton is off ({TRITON_VARIABLE}=0)")
    if device.type not in TRITON_BACKENDS:
        raise RuntimeError(f"no Triton kernel for device type {device.type}")
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        raise RuntimeError("Triton is not installed") from None
    target = triton.runtime.driver.active.get_current_target().backend
    if target not in TRITON_BACKENDS[device.type]:
        raise RuntimeError(f"Triton compiles for {target}, not for {device.type}")
    return triton_way(device, torch.float64 if _adds_in_float64(device) else torch.float32)


def triton_way(device: torch.device, accumulator: torch.dtype) -> Way:
    """Return the way with Triton, adding in float64, or in pairs of float32.

    What the kernel does not read (rare eight-bit floats) is left to operators, which need float64.
    """
    kernel = importlib.import_module("trueup.recording.adapters.torch.triton_statistics")

    def fill(tensor: torch.Tensor, row: torch.Tensor) -> None:
        real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        if accumulator is torch.float64 and not kernel.takes(real, accumulator):
            device_operators.fill(tensor, row)
        else:
            kernel.fill(tensor, row)

    pair = accumulator is torch.float32
    ring = Ring(device, 2 * WIDTH if pair else WIDTH, accumulator)
    return Way(f"Triton {kernel.VERSION}, sums in {'pairs of float32' if pair else 'float64'}", fill, ring)


def _adds_in_float64(device: torch.device) -> bool:
    """Tell whether a device has float64 in its vector units: Ascend has none (its operators emulate it on scalar cores)."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return bool(device.type != "npu")


def _with_operators(device: torch.device) -> Way:
    return Way("PyTorch operators, sums in float64", device_operators.fill, Ring(device, WIDTH, torch.float64))


def _try(way: Way, device: torch.device) -> None:
    """Measure a tensor whose numbers the host knows.

    Raises:
        RuntimeError: they differ.
    """
    assert way.fill is not None
    assert way.ring is not None
    sample = _sample()
    expected = np.empty(PACKED)
    kernels.summarize(sample.numpy(), expected)
    got = bring([_enqueue(sample.to(device), way.fill, way.ring)])[0]
    if not np.allclose(got, expected, rtol=1e-10, atol=1e-10 * float(np.abs(expected).max()), equal_nan=True):
        raise RuntimeError(f"{way.description} gave wrong numbers")


def _sample() -> torch.Tensor:
    """Return float32 ``(10000,)`` of all that the kernels tell apart, the same each time, without any generator of the user's."""
    position = torch.arange(10000, dtype=torch.float32)
    sample = torch.sin(position * position) * 3.0
    sample[::97] = 0.0
    for k, value in enumerate((float("nan"), float("inf"), float("-inf"), torch.finfo(torch.float32).max, 1e-40)):
        sample[5 + 1013 * k] = value
    return sample


