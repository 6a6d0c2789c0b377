"""Each buffer is read once: statistics are kept by storage, version and view, and producers by storage.

A storage is known by the address of its Python object, which lives as long as the storage does; a weak reference forgets it when
it goes. Its version counter tells a write; writes through ``.data`` do not touch that counter, so writes that calls announce are
counted too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from trueup.recording.adapters.torch import transforms
from trueup.recording.adapters.torch.in_flight import InFlight
from trueup.recording.adapters.torch.layouts import STAND_INS, is_plain, parts
from trueup.recording.adapters.torch.shards import local
from trueup.recording.adapters.torch.statistics import measure
from trueup.recording.adapters.torch.tensors import PLAIN, Layout, dense_layout
from trueup.recording.recorder import Call, Recorder, Statistics

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
        self.storages: dict[int, Storage] = {}
        """By the address of the storage's Python object."""
        self._gone = _forgetting(self.storages)
        self.sees_writes = "aten" in recorder.options.levels
        """Whether every write is announced; else version counters tell."""
        self.reads = 0
        self.in_flight = InFlight()
        """What collectives are writing at present."""

    def statistics(self, tensor: torch.Tensor, layout: Layout | None, storage: Storage | None) -> Statistics | None:
        """Return the statistics of a tensor, measuring it only if its bytes were not measured since they were written.

        None when it has no dense bytes to read (meta, fake, sparse, nested, quantised).
        """
        if layout is None:
            with transforms.outside():
                tensor = transforms.below(tensor)
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

    def fresh(self, tensor: torch.Tensor) -> bool:
        """Tell whether nobody has written to the memory of a tensor since it was allocated."""
        storage = self.storage(tensor)
        return storage is not None and storage.uninitialised

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
        """Return what is known of the tensor's storage; None where it has none of its own (sparse, functorch wrappers)."""
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
            self._recorder.note(f"no statistics for {type(tensor).__name__} on {tensor.device}: {str(error).splitlines()[0]}")
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
