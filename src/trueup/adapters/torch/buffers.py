"""Each buffer is read once: statistics are kept by storage, version and view, and producers by storage.

A storage is told from a later one at the same address by a weak reference, which keeps the address from being used again. Its
version counter tells a write; writes through ``.data`` do not touch that counter, so writes that calls announce are counted too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trueup.adapters.torch.statistics import measure
from trueup.recorder import Statistics
from trueup.recorder.recorder import Call, Recorder

PURGE_EVERY = 4096
STAND_INS = frozenset({"FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor"})
"""Classes of tensors that hold no numbers of their own, by name: importing them costs more than it is worth."""


class _Storage:
    __slots__ = ("alive", "known", "producers", "uninitialised", "writes")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.alive = StorageWeakRef(storage)
        self.writes = 0
        self.uninitialised = False
        self.producers: dict[str, tuple[int, str]] = {}
        self.known: dict[tuple[Any, ...], Statistics] = {}


class Buffers:
    """Remembers what was measured of live storages, and which call wrote them last."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._detail = recorder.options.detail
        self._storages: dict[int, _Storage] = {}
        self._purge_at = PURGE_EVERY
        self._sees_writes = "aten" in recorder.options.levels
        self.reads = 0

    def statistics(self, tensor: torch.Tensor) -> Statistics | None:
        """Return the statistics of a tensor, measuring it only if its bytes were not measured since they were written.

        None when it has no dense bytes to read (meta, fake, sparse, nested, quantised).
        """
        tensor = _below_transforms(tensor)
        if not _has_bytes(tensor):
            return None
        storage = self._storage(tensor)
        key = self._view_key(tensor) if storage is not None else None
        if storage is None or key is None:
            return self._measure(tensor)
        if storage.uninitialised:
            return None  # whatever the allocator left there differs from run to run and means nothing
        key = (storage.writes, *key)
        stats = storage.known.get(key)
        if stats is None:
            stats = self._measure(tensor)
            if stats is None:
                return None
            if storage.known and next(iter(storage.known))[:2] != key[:2]:
                storage.known.clear()  # what an older version of the buffer held is never asked for again
            storage.known[key] = stats
        return stats

    def written(self, tensor: torch.Tensor) -> None:
        """Note that a call wrote this tensor in place: what was measured of its storage holds no longer."""
        storage = self._storage(tensor)
        if storage is not None:
            storage.writes += 1
            storage.uninitialised = False

    def allocated(self, tensor: torch.Tensor) -> None:
        """Note that a tensor was allocated and not written yet."""
        storage = self._storage(tensor)
        if storage is not None:
            storage.uninitialised = True

    def initialised(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is a result: kernels past the dispatcher fill what was allocated without a trace."""
        storage = self._storage(tensor)
        if storage is not None:
            storage.uninitialised = False

    def produced(self, tensor: torch.Tensor, level: str, call: Call, slot: str) -> None:
        """Note which call, at which level, computed what this tensor's storage holds; only a recorded one can be named."""
        storage = self._storage(tensor)
        if storage is None:
            return
        if call.recorded:
            storage.producers[level] = (call.seq, slot)
        else:
            storage.producers.pop(level, None)

    def producer(self, tensor: torch.Tensor, level: str) -> tuple[int, str] | None:
        """Return the call and slot that last wrote this tensor's storage: of that level if one was seen, else of any."""
        storage = self._storage(tensor)
        if storage is None or not storage.producers:
            return None
        return storage.producers.get(level) or max(storage.producers.values())

    def storages(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[int]:
        """Return the identities of the tensors' storages, to tell a view from a new buffer."""
        found = set()
        for _, tensor in tensors:
            try:
                found.add(tensor.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):
                continue
        return found

    def _storage(self, tensor: torch.Tensor) -> _Storage | None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, functorch wrappers: no storage of their own
            return None
        found = self._storages.get(storage._cdata)
        if found is None:
            if len(self._storages) >= self._purge_at:
                self.purge()
            found = self._storages[storage._cdata] = _Storage(storage)
        return found

    def forget(self) -> None:
        """Forget what was measured and who wrote it: what ran meanwhile was not seen."""
        self._storages.clear()

    def purge(self) -> None:
        """Forget storages that are gone."""
        self._storages = {key: s for key, s in self._storages.items() if not s.alive.expired()}
        self._purge_at = max(PURGE_EVERY, 2 * len(self._storages))

    def _view_key(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Name the bytes of a tensor within its storage; None where a later write could not be told."""
        version = 0  # the aten level announces every write; what counts versions lies above it, and differs between aliases
        if not self._sees_writes:
            if tensor.is_inference():  # no versions are tracked
                return None
            version = tensor._version
        if tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.is_contiguous():
            return version, tensor.storage_offset(), tensor.numel(), tensor.dtype
        return version, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype

    def _measure(self, tensor: torch.Tensor) -> Statistics | None:
        self.reads += 1
        try:
            stats = measure(tensor, self._detail)
        except (RuntimeError, TypeError, NotImplementedError) as error:  # fake, functional and batched tensors hold no bytes
            self._recorder.note(f"no statistics for {type(tensor).__name__} on {tensor.device}: {str(error).splitlines()[0]}")
            return None
        if stats.data is not None:
            wanted = stats.digest is not None and self._recorder.wants_payload(stats.digest, str(stats.data.dtype))
            stats.data = stats.data.copy() if wanted else None
        return stats


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Tell whether there are numbers to read; a tensor that only stands for another has none."""
    return not (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.device.type == "meta"
        or type(tensor).__name__ in STAND_INS
    )


def _below_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the bytes of one inside `torch.func` transforms: all samples of a vmap at once."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
