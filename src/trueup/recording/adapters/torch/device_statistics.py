"""Statistics on the device where a tensor lives: which kernel takes them, and how they come to the host.

For each device it is the first of these that gives the right numbers for a tensor of 10,000 elements: the Triton kernel; PyTorch
operators; the host, to which every tensor is then copied. That is tried once, when the first tensor of the device is measured; the
trial waits for the device, nothing after it does. ``TRUEUP_TRITON=0`` leaves Triton out.

One row of statistics with PyTorch operators: for a device that has no kernel of its own and no Triton. About 25 operators on a
tensor of at most a million elements; a larger one goes block by block, so that the memory in use beside it stays near 80 MB.
Nothing here waits for the device: no number is looked at, every shape is known, tables are computed there.

Where the rows of a device wait for the next flush, and how they travel: one transfer, and no wait of the training. Rows lie in
chunks of device memory that are filled from front to back, and used again once every row of them is at the host. A late flush
makes the ring longer by a chunk; no row is ever overwritten, and the training never waits here: the recorder makes it wait when
256 MB of rows are pending, which are 170 MB on the device.

A row is written on whichever stream executes the call. The flush records an event on each of those streams, lets a stream of its
own wait for them, copies there, and waits for that copy alone, in the writer's thread.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from trueup.foundation import kernels
from trueup.foundation.kernels.sketch import GOLDEN, GROUP, MIX, ROWS_PER_GROUP
from trueup.foundation.model import LANES, PACKED
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.device_row import COLUMNS, RANGES, WIDTH, Limits, finish, is_masking, limits_of, reals

BLOCK = 1 << 20
"""Elements taken at a time; a multiple of the sketch's group."""

REMEMBERED = 8
"""Blocks of a device whose signs and rotations are kept: 2 MB each."""

INF = float("inf")


def fill(tensor: torch.Tensor, row: torch.Tensor) -> None:
    """Fill ``row``, float64 ``(WIDTH,)``, as `device_row` says; raise `RuntimeError`, `TypeError` without float64 or an operator
    for the dtype."""
    flat = reals(tensor)
    limits = limits_of(flat.dtype)
    parts = [_block(part, limits, block) for block, part in enumerate(flat.split(BLOCK))] if flat.numel() else [_nothing(row)]
    row.copy_(parts[0] if len(parts) == 1 else _join(torch.stack(parts)))


def _nothing(row: torch.Tensor) -> torch.Tensor:
    return torch.cat([row.new_full((1,), INF), row.new_full((1,), -INF), row.new_zeros(WIDTH - 2)])


def _join(parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([parts[:, :1].amin(0), parts[:, 1:2].amax(0), parts[:, 2:].sum(0)])


def _block(part: torch.Tensor, limits: Limits, block: int) -> torch.Tensor:
    """Return the row of one block, float64 ``(WIDTH,)``."""
    x = part.to(torch.float64)
    extras: list[torch.Tensor] = []
    if part.dtype.is_floating_point:
        magnitude = x.abs()
        equal, below = _bounds(limits, x.device)
        is_below = magnitude < below
        keep = is_below[1]
        low, high, kept = torch.where(keep, x, INF).amin(), torch.where(keep, x, -INF).amax(), torch.where(keep, x, 0.0)
        beneath = is_below.sum(1)
        counts = [(x == equal).sum(1), beneath[3:] - beneath[2:3], beneath[:2]]
    else:
        low, high, kept = x.amin(), x.amax(), x
        none = x.new_zeros(3)
        counts = [none[:2], (x == 0).sum().view(1), none[:2], x.new_full((1,), x.numel())]
    if part.dtype is torch.float64:
        total, squares, extras = _scaled_sums(kept, magnitude)
    else:
        total, squares = kept.sum(), torch.linalg.vector_norm(kept).square()
    padding = x.new_zeros(WIDTH - len(COLUMNS) - LANES - len(extras))
    lanes = _sketch(kept, block)
    return torch.cat([torch.stack([low, high, total, squares]), *counts, lanes, *[e.view(1) for e in extras], padding])


_BOUNDS: dict[tuple[Limits, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def _bounds(limits: Limits, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers that are counted, ``(3, 1)``, and those that |x| is held against, ``(4, 1)``; filled on the device."""
    found = _BOUNDS.get((limits, device))
    if found is None:
        values = (INF, -INF, 0.0, limits.tiny, limits.keep_below, limits.largest, INF)
        column = torch.cat([torch.full((1, 1), value, dtype=torch.float64, device=device) for value in values])
        found = _BOUNDS[(limits, device)] = column[:3], column[3:]
    return found


def _scaled_sums(kept: torch.Tensor, magnitude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return sum and squares of the middle of float64's range, then `EXTRAS`."""
    bounds = RANGES[torch.float64]
    is_big, is_little = magnitude > bounds.big, magnitude < bounds.little
    big = torch.where(is_big, kept / bounds.scale, 0.0)
    rest = torch.where(is_big, 0.0, kept)
    middle = torch.where(is_little, 0.0, rest)
    little = torch.where(is_little, kept * bounds.scale, 0.0)
    squares, big_squares, little_squares = (torch.linalg.vector_norm(v).square() for v in (middle, big, little))
    return rest.sum(), squares, [big.sum(), big_squares, little_squares]


def _sketch(kept: torch.Tensor, block: int) -> torch.Tensor:
    groups = -(-kept.numel() // GROUP)
    sign, source = _tables(block, kept.device)
    padded = torch.nn.functional.pad(kept, (0, groups * GROUP - kept.numel())).view(groups, ROWS_PER_GROUP, LANES)
    columns = (padded * sign[:groups]).sum(1)
    return columns.flatten()[source[: groups * LANES]].view(groups, LANES).sum(0)


_TABLES: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def _tables(block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the signs, int8 ``(groups, 8, 64)``, of a block, and where each lane of a group finds its share."""
    found = _TABLES.get((block, device))
    if found is None:
        found = _make_tables(block, device)
        if block < REMEMBERED:
            _TABLES[(block, device)] = found
    return found


def _make_tables(block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    groups = BLOCK // GROUP
    rows = torch.arange(block * groups * ROWS_PER_GROUP, (block + 1) * groups * ROWS_PER_GROUP, device=device)
    lane = torch.arange(LANES, device=device)
    bits = (_splitmix64(rows)[:, None] >> lane) & 1
    group = torch.arange(groups, device=device)
    shift = 8 * _logical_shift(_splitmix64((group + block * groups) ^ _signed(GOLDEN)), 61)
    source = (lane - shift[:, None]) % LANES + LANES * group[:, None]
    return (1 - 2 * bits).to(torch.int8).view(groups, ROWS_PER_GROUP, LANES), source.flatten()


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


def _logical_shift(x: torch.Tensor, by: int) -> torch.Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """Hash int64 as `kernels.sketch.splitmix64` does unsigned ones: wrapping products, shifts that bring in zeros."""
    z = x + _signed(GOLDEN)
    z = (z ^ _logical_shift(z, 30)) * _signed(MIX[0])
    z = (z ^ _logical_shift(z, 27)) * _signed(MIX[1])
    return z ^ _logical_shift(z, 31)


CAPACITY = 4096
"""Rows in a chunk: 2.6 MB."""

SPARES = 8
"""Empty chunks that are kept; more are given back after a burst."""


def streams_of(device: torch.device) -> Any:
    """Return the module with the streams and events of a device, ``torch.cuda`` for one; None where work is done in order."""
    module = getattr(torch, device.type, None) if device.type != "cpu" else None  # torch.cpu has stand-ins of both
    if getattr(module, "synchronous", False):  # the simulated device has them for scripts alone
        return None
    return module if hasattr(module, "Event") and hasattr(module, "current_stream") else None


class Row:
    """The place of one tensor's row; it is taken until the row was fetched or this object is gone."""

    __slots__ = ("_chunk", "index", "stream")

    def __init__(self, chunk: Chunk, index: int, stream: Any) -> None:
        self._chunk: Chunk | None = chunk
        self.index = index
        self.stream = stream

    @property
    def chunk(self) -> Chunk:
        """The chunk that holds the row."""
        assert self._chunk is not None, "the row was fetched"
        return self._chunk

    @property
    def values(self) -> torch.Tensor:
        """The row itself, ``(width,)`` on the device."""
        return self.chunk.memory[self.index]

    def fetched(self) -> None:
        """Release the chunk."""
        self._chunk = None

    def __del__(self) -> None:
        if self._chunk is not None:  # whatever writes the row may still be under way: the next flush waits for it
            self._chunk.dropped.append(self.stream)


class Chunk:
    """Rows that were allocated together, ``memory`` ``(CAPACITY, width)``."""

    __slots__ = ("dropped", "memory", "ready", "taken", "used", "visible")

    def __init__(self, memory: torch.Tensor, stream: Any, ready: Any) -> None:
        self.memory = memory
        self.used = 0  # rows handed out since the chunk was last empty
        self.taken = 0  # rows that are neither fetched nor dropped
        self.dropped: deque[Any] = deque()
        """Streams of rows that nobody will fetch; a deque, because the garbage collector appends at any moment."""
        self.ready = ready
        self.visible = {stream}
        """Streams that run after the allocation: the allocator hands out memory that earlier work of its stream may still use."""


class Ring:
    """The rows of one device; rows are ``width`` numbers of ``dtype``."""

    def __init__(self, device: torch.device, width: int, dtype: torch.dtype) -> None:
        self.device, self.width, self.dtype = device, width, dtype
        self.fetches = 0  # transfers to the host so far
        self._module = streams_of(device)
        self._side: Any = None
        self._lock = threading.Lock()
        self._chunks: list[Chunk] = []
        self._current: Chunk | None = None

    @property
    def chunks(self) -> int:
        """How many chunks of device memory the ring has."""
        return len(self._chunks)

    def take(self) -> Row:
        """Return a row that is free, for work on the current stream; never waits."""
        stream: Any = None if self._module is None else self._module.current_stream(self.device)
        with self._lock:
            chunk = self._current
            if chunk is None or chunk.used == CAPACITY:
                chunk = self._current = self._next(stream)
            if stream not in chunk.visible:
                stream.wait_event(chunk.ready)
                chunk.visible.add(stream)
            index = chunk.used
            chunk.used += 1
            chunk.taken += 1
            return Row(chunk, index, stream)

    def _next(self, stream: Any) -> Chunk:
        for chunk in self._chunks:
            if chunk.taken == 0:
                chunk.used = 0
                return chunk
        memory = torch.empty((CAPACITY, self.width), dtype=self.dtype, device=self.device)
        ready = None
        if self._module is not None:
            ready = self._module.Event()
            ready.record(stream)
        chunk = Chunk(memory, stream, ready)
        self._chunks.append(chunk)
        return chunk

    def fetch(self, rows: Sequence[Row]) -> NDArray[Any]:
        """Bring rows to the host, once written, as ``(len(rows), width)`` in the order asked for, and free them; for the writer's
        thread."""
        spans, place = _spans(rows)
        dropped = self._collect_dropped()
        streams = {row.stream for row in rows} | {stream for _, gone in dropped for stream in gone}
        host = self._copy([chunk.memory[first:last] for chunk, first, last in spans], streams)
        self.fetches += 1
        with self._lock:
            for row in rows:
                row.chunk.taken -= 1
                row.fetched()
            for chunk, gone in dropped:
                chunk.taken -= len(gone)
            self._tidy()
        return host[place]

    def _collect_dropped(self) -> list[tuple[Chunk, list[Any]]]:
        with self._lock:
            chunks = list(self._chunks)
        return [(chunk, [chunk.dropped.popleft() for _ in range(len(chunk.dropped))]) for chunk in chunks if chunk.dropped]

    def _tidy(self) -> None:
        """Start the current chunk again if it is empty, and give chunks back that a burst has left."""
        if self._current is not None and self._current.taken == 0:
            self._current.used = 0
        empty = [chunk for chunk in self._chunks if chunk.taken == 0 and chunk is not self._current]
        surplus = {id(chunk) for chunk in empty[SPARES:]}
        self._chunks = [chunk for chunk in self._chunks if id(chunk) not in surplus]

    def _copy(self, spans: list[torch.Tensor], streams: set[Any]) -> NDArray[Any]:
        module = self._module
        if module is None:
            return np.array(_joined(spans).cpu().numpy())
        if self._side is None:
            self._side = module.Stream(device=self.device)
        for stream in streams:
            written = module.Event()
            written.record(stream)
            self._side.wait_event(written)
        with module.stream(self._side):
            source = _joined(spans)
            host = _pinned(source)
            host.copy_(source, non_blocking=True)
            copied = module.Event()
            copied.record(self._side)
        copied.synchronize()
        return np.array(host.numpy())


def _pinned(like: torch.Tensor) -> torch.Tensor:
    """Return host memory that a device copies to without waiting; PyTorch keeps it for the next time."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _joined(spans: list[torch.Tensor]) -> torch.Tensor:
    return spans[0] if len(spans) == 1 else torch.cat(spans)


def _spans(rows: Sequence[Row]) -> tuple[list[tuple[Chunk, int, int]], NDArray[np.int64]]:
    """Return, for each chunk concerned, its first row and the one after its last, and where each row lies in their concatenation.
    Rows between that nobody asked for travel along: cheaper than an index on the device."""
    ends: dict[int, tuple[Chunk, int, int]] = {}
    for row in rows:
        chunk, first, last = ends.get(id(row.chunk), (row.chunk, row.index, row.index + 1))
        ends[id(chunk)] = (chunk, min(first, row.index), max(last, row.index + 1))
    start, offsets = 0, {}
    for key, (_, first, last) in ends.items():
        offsets[key] = start - first
        start += last - first
    return list(ends.values()), np.array([offsets[id(row.chunk)] + row.index for row in rows], np.int64)


TRITON_VARIABLE = "TRUEUP_TRITON"

TRITON_BACKENDS = {"cuda": ("cuda", "hip"), "xpu": ("xpu",), "npu": ("npu", "ascend")}
"""By PyTorch's device type, the Triton backends that compile for it; npu is triton-ascend's. A driver for another device would
take a pointer for its own."""

Fill = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Way:
    """How the tensors of a device are measured."""

    description: str  # for the manifest
    fill: Fill | None  # writes a row, ``fill(tensor, row)``, without waiting; None: on the host
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
    """Enqueue the measurement of a tensor on the current stream of its device; None if it must be measured on the host. Raises
    RuntimeError where the kernel failed or a CUDA graph is being captured, at whose replays it would run again; TypeError or
    NotImplementedError where the tensor holds no numbers that the device can add."""
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
            raise RuntimeError(f"the kernel for {tensor.dtype} failed: {first_line(error)}") from error
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
            reasons.append(first_line(error))
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
    """Return the way with Triton, adding in float64, or in pairs of float32. What the kernel does not read (rare eight-bit
    floats) is left to operators, which need float64."""
    kernel = importlib.import_module("trueup.recording.adapters.torch.triton_statistics")

    def launch(tensor: torch.Tensor, row: torch.Tensor) -> None:
        real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        if accumulator is torch.float64 and not kernel.takes(real, accumulator):
            fill(tensor, row)
        else:
            kernel.fill(tensor, row)

    pair = accumulator is torch.float32
    ring = Ring(device, 2 * WIDTH if pair else WIDTH, accumulator)
    return Way(f"Triton {kernel.VERSION}, sums in {'pairs of float32' if pair else 'float64'}", launch, ring)


def _adds_in_float64(device: torch.device) -> bool:
    """Tell whether a device has float64 in its vector units: Ascend has none (its operators emulate it on scalar cores)."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return bool(device.type != "npu")


def _with_operators(device: torch.device) -> Way:
    return Way("PyTorch operators, sums in float64", fill, Ring(device, WIDTH, torch.float64))


def _try(way: Way, device: torch.device) -> None:
    """Measure a tensor whose numbers the host knows; raise `RuntimeError` where they differ."""
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
