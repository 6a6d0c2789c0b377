"""Each buffer is read once: statistics are kept by storage, version and view, and producers by storage.

A storage is known by the address of its Python object, which lives as long as the storage does; a weak reference forgets it when
it goes. Its version counter tells a write; writes through ``.data`` do not touch that counter, so writes that calls announce are
counted too.

Buffers that a collective is still writing are read by nobody before it is complete (`InFlight`). Its outputs are measured when the
training itself has waited for it (`Work.wait`, `wait_tensor`), or when something reads them and the work says that it is done.
Nothing here ever waits.

One pass over a tensor, on the device where it lives.

Each kernel returns the packed float64 vector of `kernels` and, where the bytes are at hand, their digest. A device with a
kernel of its own registers it here; any other gets `on_device`, whose result stays there until the next flush. Digests are of the
bytes (xxh3), which only host memory offers cheaply: on other devices they are taken for the details ``digest`` and ``tensor``,
which bring the bytes over anyway. In host memory the compiled kernel measures a tensor straight from its address.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch

from trueup.foundation import kernels
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch import modes
from trueup.recording.adapters.torch.device_statistics import Pending as OnDevice
from trueup.recording.adapters.torch.device_statistics import begin, bring
from trueup.recording.adapters.torch.tensors import PLAIN, STAND_INS, Layout, dense_layout, is_plain, local, parts
from trueup.recording.recorder import Call, Recorder, Statistics, rows

_KINDS: dict[torch.dtype, int] = {getattr(torch, name): number for name, number in kernels.KINDS.items() if hasattr(torch, name)}

_VIEWS: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
}


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a CPU tensor as NumPy without copying, read only; dtypes NumPy lacks come from ml_dtypes. Not by `Tensor.numpy`: that
    forbids the storage to be resized ever after, and FSDP frees parameters by resizing. Raises RuntimeError without memory,
    TypeError where NumPy has no such dtype."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    view = _VIEWS.get(tensor.dtype)
    dtype = _numpy_dtype(tensor.dtype if view is None else view[0])
    if not tensor.numel():
        empty: np.ndarray[Any, Any] = np.empty(tuple(tensor.shape), dtype)
        return empty if view is None else empty.view(view[1])
    if tensor._is_zerotensor():
        raise RuntimeError("zeros that take no memory (an efficient zero tensor)")
    array = rows.view(tensor, tensor.data_ptr(), tensor.shape, tensor.stride(), dtype)
    return array if view is None else array.view(view[1])


@lru_cache(maxsize=64)
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's dtype of the same name; raise `TypeError` where it has none."""
    return np.dtype(str(dtype).removeprefix("torch."))


def in_host_memory(value: Any) -> np.ndarray[Any, Any] | None:
    """View a plain tensor in host memory as `to_numpy` does; None for anything else."""
    plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided
    return to_numpy(value) if plain else None


def on_host(tensor: torch.Tensor, detail: str) -> Statistics:
    """Measure a CPU tensor; see `measuring.measure`."""
    kind = None if tensor.is_neg() or tensor.is_conj() else _KINDS.get(tensor.dtype)
    return rows.measure(
        tensor.data_ptr(), kind, tensor.shape, tensor.stride(), lambda: to_numpy(tensor), detail, torch.get_num_threads()
    )


Kernel = Callable[[torch.Tensor, str], Statistics]


def on_device(tensor: torch.Tensor, detail: str) -> Statistics:
    """Measure a tensor on its own device; nothing is waited for unless the bytes are asked for, or the device cannot add."""
    if detail == "stats":
        pending = begin(tensor)
        if pending is not None:
            return Statistics(values=pending)
    return on_host(tensor.detach().cpu(), detail)


KERNELS: dict[str, Kernel] = {"cpu": on_host}


def measure(tensor: torch.Tensor, detail: str) -> Statistics:
    """Measure a tensor with the kernel of its device."""
    return KERNELS.get(tensor.device.type, on_device)(tensor, detail)


def resolve(batch: list[Statistics]) -> None:
    """Bring what is still on a device to the host: one transfer per device. For the writer's thread, which alone waits for it."""
    waiting = list({id(stats): stats for stats in batch if isinstance(stats.values, OnDevice)}.values())
    for stats, values in zip(waiting, bring([stats.values for stats in waiting]), strict=True):
        stats.values = values


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return what changes with the numbers of each tensor on any device, its digest and its statistics, by one transfer."""
    found = [measure(tensor.detach(), "stats") for tensor in tensors]
    resolve(found)
    return [f"{one.digest}".encode() + bytes(one.values) for one in found]


MOST_VIEWS = 256
"""Views of a storage of which statistics are kept: a text that each batch is cut from anew would gather them without end."""


class Storage(weakref.ref[torch.UntypedStorage]):
    """What is known of a live storage: the weak reference that says when it goes, which spares an object of its own."""

    __slots__ = ("known", "number", "producers", "uninitialised", "version", "whole")

    __eq__, __hash__ = object.__eq__, object.__hash__  # a weak reference would compare what it refers to

    def __init__(self, storage: torch.UntypedStorage, forget: Callable[[Any], None]) -> None:
        super().__init__(storage, forget)  # type: ignore[call-arg]
        self.number = id(storage)
        self.version = 0
        self.uninitialised = False
        self.producers: dict[str, tuple[int, str]] = {}
        self.known: dict[int | tuple[int, int], Statistics] = {}
        """Statistics by view (with its offset, where it has one), of the present version only: what an older one held is never
        asked for again."""
        self.whole: tuple[torch.dtype, Statistics] | None = None
        """What of `known` shows all the bytes, which were kept for it: other views of them need not be kept again."""

    def forget(self) -> None:
        """Note that what the storage holds is about to differ, or does."""
        self.known.clear()
        self.whole = None

    def covered_by(self, tensor: torch.Tensor) -> bool:
        """Tell whether a contiguous tensor shows all of the storage."""
        return bool(tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes())

    def place_of(self, tensor: torch.Tensor) -> tuple[Statistics, tuple[int, ...]] | None:
        """Return what was measured of all the bytes, and where in them this tensor lies; None where nothing was."""
        if self.whole is None or self.whole[0] is not tensor.dtype:
            return None
        if tensor.nbytes > tensor.untyped_storage().nbytes():  # expanded
            return None
        return self.whole[1], (tensor.storage_offset(), *tensor.shape, *tensor.stride())

    def producer(self, level: str) -> tuple[int, str] | None:
        """Return the call and slot that last wrote the storage: of that level if one was seen, else of any."""
        producers = self.producers
        return producers.get(level) or (max(producers.values()) if producers else None)


class Buffers:
    """Remembers what was measured of live storages, and which call wrote them last."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._detail = recorder.options.detail
        self.storages: dict[int, Storage] = {}  # by the address of the storage's Python object
        self._gone = _forgetting(self.storages)
        self.sees_writes = "aten" in recorder.options.levels  # whether every write is announced; else version counters tell
        self.reads = 0
        self.in_flight = InFlight()  # what collectives are writing at present

    def statistics(self, tensor: torch.Tensor, layout: Layout | None, storage: Storage | None) -> Statistics | None:
        """Return the statistics of a tensor, measuring it only if its bytes were not measured since they were written. None when
        it has no dense bytes to read (meta, fake, sparse, nested, quantised)."""
        if layout is None:
            with modes.outside():
                tensor = modes.below(tensor)
                if not _has_bytes(tensor):
                    return None
                layout = None if tensor.is_neg() or tensor.is_conj() else dense_layout(tensor)
                return self._measure(tensor) if layout is None else self.statistics(tensor, layout, self.storage(tensor))
        if not layout.readable:
            return None
        if self.in_flight and self.in_flight.covering(tensor):
            return None
        if storage is None:
            return self._measure(tensor)
        if storage.uninitialised:
            return None  # whatever the allocator left there differs from run to run and means nothing
        if not self.sees_writes:  # the aten level announces every write; what counts versions lies above it
            try:
                version = tensor._version
            except RuntimeError:  # an inference tensor tracks none
                return self._measure(tensor)
            if version != storage.version:
                storage.forget()
                storage.version = version
        offset = tensor.storage_offset()
        key = (offset, layout.view) if offset else layout.view
        stats = storage.known.get(key)
        if stats is None:
            stats = self._measure(tensor, storage)
            if stats is not None:
                if len(storage.known) >= MOST_VIEWS:
                    storage.known.clear()
                storage.known[key] = stats
                if stats.data is not None and layout.contiguous and storage.covered_by(tensor):
                    storage.whole = tensor.dtype, stats
        return stats

    def written(self, tensor: torch.Tensor) -> None:
        """Note that a call wrote this tensor in place: what was measured of its storage holds no longer."""
        if not is_plain(tensor):
            for _, part in parts("", tensor):
                self.written(part)
        storage = self.storage(tensor)
        if self.in_flight:
            self.in_flight.spoil(local(tensor))
        if storage is not None:
            storage.forget()
            storage.uninitialised = False

    def allocated(self, tensor: torch.Tensor) -> None:
        """Note that a tensor was allocated and not written yet."""
        storage = self.storage(tensor)
        if storage is not None:
            storage.uninitialised = True

    def exposed(self, tensor: torch.Tensor, *, filled: bool) -> None:
        """Note that the memory of a tensor was handed out, and may be written unseen; ``filled``: to be written, as a rule."""
        storage = self.storage(tensor)
        if storage is not None:
            storage.forget()
            storage.uninitialised = storage.uninitialised and not filled

    def resized(self, storage: torch.UntypedStorage, *, grown: bool) -> None:
        """Note that a storage was resized; nothing in one that was empty before is written yet."""
        found = self.storages.get(id(storage))
        if found is not None:
            found.forget()
            found.uninitialised = grown

    def initialised(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is a result: kernels past the dispatcher fill what was allocated without a trace."""
        storage = self.storage(tensor)
        if storage is not None:
            storage.uninitialised = False

    def produced(self, tensor: torch.Tensor, level: str, call: Call, slot: str) -> None:
        """Note which call, at which level, computed what this tensor's storage holds; only a recorded one can be named."""
        if not is_plain(tensor):
            for name, part in parts(slot, tensor):
                self.produced(part, level, call, name)
        storage = self.storage(tensor)
        if storage is None:
            return
        if call.kind.recorded:
            storage.producers[level] = (call.seq, slot)
        else:
            storage.producers.pop(level, None)

    def storage(self, tensor: torch.Tensor) -> Storage | None:
        """Return the record of the tensor's storage; None where it has none of its own (sparse, functorch wrappers)."""
        try:
            storage = (tensor if type(tensor) in PLAIN else local(tensor)).untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        return self.storages.get(id(storage)) or self._new(storage)

    def _new(self, storage: torch.UntypedStorage) -> Storage:
        found = self.storages[id(storage)] = Storage(storage, self._gone)
        return found

    def forget(self) -> None:
        """Forget what was measured and who wrote it: what ran meanwhile was not seen."""
        self.storages.clear()

    def _measure(self, tensor: torch.Tensor, storage: Storage | None = None) -> Statistics | None:
        self.reads += 1
        if tensor._is_zerotensor():  # zeros that autograd never allocated
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        try:
            if tensor.numel() and not tensor.untyped_storage().nbytes():
                return None  # its memory was freed (FSDP)
            stats = measure(tensor, self._detail)
        except (RuntimeError, TypeError, NotImplementedError) as error:  # fake, functional and batched tensors hold no bytes
            self._recorder.note(f"no statistics for {type(tensor).__name__} on {tensor.device}: {first_line(error)}")
            return None
        if stats.data is not None:
            self._recorder.keep(stats, None if storage is None else storage.place_of(tensor))
        return stats


def _forgetting(storages: dict[int, Storage]) -> Callable[[Any], None]:
    """Return the callback of storages that go; it does not hold the capture."""

    def forget(gone: Any) -> None:
        number: int = gone.number
        if storages.get(number) is gone:  # else its address is another's by now
            del storages[number]

    return forget


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Tell whether there are numbers to read; a tensor that only stands for another has none."""
    return is_plain(tensor) and tensor.device.type != "meta" and type(tensor).__name__ not in STAND_INS


# ---------------------------------------------------------------- collectives under way
Span = tuple[int, int, int]
"""A storage and the bytes of it that a tensor covers, from and up to."""

Slot = tuple[str, torch.Tensor]


class Pending:
    """A collective whose outputs ``(slot, tensor)`` were not measured yet. ``calls`` are those of the capture that it is, one per
    level, ``scratch`` what it may write besides and nobody reads; with ``sync`` its caller waits for it before anybody reads.
    ``task`` is the autograd graph task that issued it from C++ and waits for it before it ends, or -1."""

    __slots__ = ("calls", "deferred", "outputs", "scratch", "spans", "spoiled", "step", "sync", "task", "thread", "versions",
                 "works")  # fmt: skip

    def __init__(self, calls: list[Call], outputs: list[Slot], scratch: list[Slot], *, sync: bool, task: int) -> None:
        self.calls, self.outputs, self.scratch, self.sync, self.task = calls, outputs, scratch, sync, task
        self.thread = threading.get_ident()
        self.step = 0  # the step it began in
        self.works: list[Any] = []
        """Its `Work` handles, held so that Python keeps one object for each: `Work.wait` is called on that."""
        self.spans = [span for _, tensor in [*outputs, *scratch] if (span := span_of(tensor)) is not None]
        self.deferred: list[Callable[[bool], None]] = []
        """Slots of other calls that show these buffers, recorded once they are complete; False: they cannot be read any more."""
        self.versions = [None if tensor.is_inference() else tensor._version for _, tensor in outputs]
        self.spoiled = False  # whether the outputs were written again before they could be measured

    def look(self) -> None:
        """Find out whether somebody wrote to the outputs meanwhile, whom no mode of ours saw; collectives count no version."""
        now = [None if tensor.is_inference() else tensor._version for _, tensor in self.outputs]
        self.spoiled = self.spoiled or now != self.versions

    @property
    def complete(self) -> bool:
        """Whether the outputs may be read, as far as is known without waiting."""
        if self.sync and self.thread == threading.get_ident():  # another thread may read while this one waits
            return True
        if self.task != -1 and torch._C._current_graph_task_id() != self.task:
            return True
        host = all(tensor.device.type == "cpu" for _, tensor in self.outputs)
        return bool(self.works) and all(_is_completed(work, host=host) for work in self.works)


class InFlight:
    """All pending collectives of the process, found by the bytes they write or by their `Work`."""

    def __init__(self) -> None:
        self.pending: dict[int, Pending] = {}  # by id

    def __bool__(self) -> bool:
        return bool(self.pending)

    def add(self, pending: Pending) -> None:
        """Take note of a collective that begins."""
        self.pending[id(pending)] = pending

    def drop(self, pending: Pending) -> bool:
        """Forget a collective; False if it was not pending any more."""
        return self.pending.pop(id(pending), None) is not None

    def covering(self, tensor: torch.Tensor) -> list[Pending]:
        """Return the collectives that write any byte of a tensor."""
        span = span_of(tensor)
        if span is None:
            return []
        storage, start, stop = span
        return [
            p for p in list(self.pending.values())
            if any(s == storage and begin < stop and start < end for s, begin, end in p.spans)
        ]  # fmt: skip

    def of_work(self, work: Any) -> list[Pending]:
        """Return the collectives that a `Work` stands for."""
        return [p for p in list(self.pending.values()) if any(w is work for w in p.works)]

    def spoil(self, tensor: torch.Tensor) -> None:
        """Note that somebody else wrote to a tensor."""
        for pending in self.covering(tensor):
            pending.spoiled = True


def span_of(tensor: torch.Tensor) -> Span | None:
    """Return the bytes that a tensor covers; None where it has no storage of its own, or no elements."""
    try:
        storage = tensor.untyped_storage()._cdata
        if not tensor.numel():
            return None
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    except (NotImplementedError, RuntimeError, AttributeError):  # sparse and other layouts
        return None
    start = tensor.storage_offset() * tensor.element_size()
    return storage, start, start + (last + 1) * tensor.element_size()


def _is_completed(work: Any, *, host: bool) -> bool:
    try:
        # Gloo completes the future first. On an accelerator a future is done as soon as the work is enqueued.
        return bool(work.is_completed() or (host and work.get_future().done()))
    except RuntimeError:  # it failed, of which whoever waits for it will hear; or it has no future
        return False
