"""What a call's tensors become: rows with statistics and producers. Each buffer is read once.

Statistics are kept by memory, version and view, and producers by memory.

Paddle shows no object for a tensor's memory, so it is known by the address where it begins, for as long as a tensor that was seen
with it lives and still has it. Gradients come to hooks in wrappers that live no longer than the hook: who made one is remembered
by its address and its digest. The version counter tells most writes; kernels of optimizers and of batch norms do not count theirs,
and a backward pass adds to gradients unseen, so writes that calls announce are counted too, and nothing that was read before a
backward pass is believed after it.
"""

from __future__ import annotations

import weakref
from typing import Any

import paddle

from trueup.recording.adapters.paddle.tensors import Layout, NamedTensors, describe, device_name, layout_of, measure
from trueup.recording.recorder import Call, Recorder, Slot, Statistics

MAX_RECENT = 1 << 16

MOST_VIEWS = 256
"""Views of a piece of memory of which statistics are kept: a text that each batch is cut from would gather them without end."""


class Memory:
    """What is known of a piece of memory."""

    __slots__ = ("base", "epoch", "known", "owners", "producers", "uninitialised", "version", "whole")

    def __init__(self, base: Base) -> None:
        self.base = base
        self.owners: dict[int, weakref.ref[paddle.Tensor]] = {}
        """Tensors that were seen with it, by the address of their Python object."""
        self.version, self.epoch = 0, 0
        self.uninitialised = False
        self.producers: dict[str, tuple[int, str]] = {}
        self.known: dict[tuple[Any, ...], Statistics] = {}
        self.whole: tuple[str, int, Statistics] | None = None
        """Dtype, number of elements and statistics of a contiguous tensor from the beginning on, whose bytes were kept: other
        views of them need not be kept again."""

    def forget(self) -> None:
        """Note that what it holds is about to differ, or does."""
        self.known.clear()
        self.whole = None

    def is_of(self, tensor: paddle.Tensor) -> bool:
        """Tell whether a tensor that has its address has this memory, and not what was put in the same place after it."""
        known = self.owners.get(id(tensor))
        if known is not None and known() is tensor:
            return True
        return any(
            (owner := ref()) is not None and owner._is_initialized() and base_of(owner) == self.base
            for ref in list(self.owners.values())
        )

    def producer(self, level: str) -> tuple[int, str] | None:
        """Return the call and slot that last wrote it: of that level if one was seen, else of any."""
        producers = self.producers
        return producers.get(level) or (max(producers.values()) if producers else None)


Base = int | tuple[str, int]
"""Where memory begins: an address of the host, or the name of a device and an address there. Devices may use the same numbers."""


def base_of(tensor: paddle.Tensor) -> Base:
    """Return where a tensor's memory begins, wherever in it the tensor does; 0 where it has none."""
    address = int(tensor.data_ptr() - tensor._offset())
    return address if not address or tensor.place.is_cpu_place() else (device_name(tensor), address)


class Buffers:
    """Remembers what was measured of live memory, and which call wrote it last."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._detail = recorder, recorder.options.detail
        self._memory: dict[Base, Memory] = {}
        self._recent: dict[tuple[int, str], tuple[int, tuple[int, str]]] = {}
        """Address of a gradient, and a level -> its digest, and the call and slot that made it."""
        self._epoch = 0
        self.reads = 0

    # ------------------------------------------------------------------------------------------------------------ reading
    def statistics(self, tensor: paddle.Tensor, layout: Layout, memory: Memory | None) -> Statistics | None:
        """Return the statistics of a tensor, measuring it only if its bytes were not measured since they were written."""
        if memory is None:
            return self._measure(tensor, layout, None)
        if memory.uninitialised:
            return None  # whatever the allocator left there differs from run to run and means nothing
        version = tensor._inplace_version()
        if version != memory.version or memory.epoch != self._epoch:
            memory.forget()
            memory.version, memory.epoch = version, self._epoch
        key = (tensor._offset(), layout.view)
        stats = memory.known.get(key)
        if stats is None:
            stats = self._measure(tensor, layout, memory)
            if stats is not None:
                if len(memory.known) >= MOST_VIEWS:
                    memory.known.clear()
                memory.known[key] = stats
                if stats.data is not None and layout.contiguous and not key[0]:
                    memory.whole = layout.described.dtype, layout.numel, stats
        return stats

    def _measure(self, tensor: paddle.Tensor, layout: Layout, memory: Memory | None) -> Statistics | None:
        self.reads += 1
        try:
            stats = measure(tensor, layout, self._detail)
        except (TypeError, RuntimeError, ValueError) as error:
            self._recorder.note(
                f"no statistics for {layout.described.dtype} on {layout.described.device}: {str(error).splitlines()[0]}"
            )
            return None
        if stats.data is not None:
            self._recorder.keep(stats, None if memory is None else _place_of(tensor, layout, memory))
        return stats

    # ------------------------------------------------------------------------------------------------------------ memory
    def memory(self, tensor: paddle.Tensor) -> Memory | None:
        """Return the record of a tensor's memory; None where it has none to show (sparse, distributed, empty)."""
        if not tensor.is_dense() or tensor.is_dist() or not tensor._is_initialized():
            return None
        base = base_of(tensor)
        if not base:
            return None
        found = self._memory.get(base)
        if found is None or not found.is_of(tensor):
            found = self._memory[base] = Memory(base)
            found.version = tensor._inplace_version()
            found.epoch = self._epoch
        key = id(tensor)
        if key not in found.owners or found.owners[key]() is not tensor:
            found.owners[key] = weakref.ref(tensor, self._leaves(found, key))
        return found

    def _leaves(self, memory: Memory, key: int) -> Any:
        memories = self._memory

        def left(gone: Any) -> None:
            if memory.owners.get(key) is gone:
                del memory.owners[key]
                if not memory.owners and memories.get(memory.base) is memory:
                    del memories[memory.base]

        return left

    def written(self, tensor: paddle.Tensor) -> None:
        """Note that a call wrote this tensor in place: what was measured of its memory holds no longer."""
        memory = self.memory(tensor)
        if memory is not None:
            memory.forget()
            memory.uninitialised = False

    def allocated(self, tensor: paddle.Tensor) -> None:
        """Note that a tensor was allocated and not written yet."""
        memory = self.memory(tensor)
        if memory is not None:
            memory.uninitialised = True

    def passed(self) -> None:
        """A backward pass has begun or ended: it writes gradients that nobody announces."""
        self._epoch += 1

    def forget(self) -> None:
        """Forget what was measured and who wrote it: what ran meanwhile was not seen."""
        self._memory.clear()
        self._recent.clear()

    def end_step(self) -> None:
        """Forget who made the gradients of the step."""
        self._recent.clear()

    # ---------------------------------------------------------------------------------------------------------- producers
    def produced(self, memory: Memory | None, call: Call, slot: str) -> None:
        """Note which call computed what this memory holds; only a recorded one can be named."""
        if memory is None:
            return
        if call.kind.recorded:
            memory.producers[call.kind.level] = (call.seq, slot)
        else:
            memory.producers.pop(call.kind.level, None)

    def made(self, tensor: paddle.Tensor, stats: Statistics | None, call: Call, slot: str) -> None:
        """Note which call made a gradient."""
        if stats is None or stats.digest is None or not call.kind.recorded:
            return
        if len(self._recent) >= MAX_RECENT:
            self._recent.clear()
        self._recent[tensor.data_ptr(), call.kind.level] = stats.digest, (call.seq, slot)

    def maker(self, tensor: paddle.Tensor, stats: Statistics | None, level: str) -> tuple[int, str] | None:
        """Return the call of a level that made a gradient, where it is known for certain: same address, same bytes."""
        if stats is None or stats.digest is None:
            return None
        known = self._recent.get((tensor.data_ptr(), level))
        return known[1] if known is not None and known[0] == stats.digest else None


def _place_of(tensor: paddle.Tensor, layout: Layout, memory: Memory) -> tuple[Statistics, tuple[int, ...]] | None:
    """Return what was measured of all the bytes, and where in them this tensor lies; None where nothing was."""
    if memory.whole is None or memory.whole[0] != layout.described.dtype:
        return None
    _, shown, known = memory.whole
    offset = tensor._offset() // tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(layout.shape, layout.strides, strict=True)) if layout.numel else -1
    if any(stride < 0 for stride in layout.strides) or offset + last >= shown:
        return None
    return known, (offset, *layout.shape, *layout.strides)


# ----------------------------------------------------------------------------------------------------------------- rows
class Slots:
    """Records the tensors of calls, and which call produced which memory."""

    def __init__(self, recorder: Recorder, buffers: Buffers) -> None:
        self._recorder, self._buffers = recorder, buffers
        self._producing = "api" if "api" in recorder.options.levels else "module"
        """Level whose calls are the producers of inputs: the finest there is."""
        self.devices: dict[str, None] = {}

    def inputs(self, call: Call, tensors: NamedTensors) -> None:
        """Record inputs, with the call that produced each."""
        for name, tensor in tensors:
            memory = self._buffers.memory(tensor)
            producer = None if memory is None else memory.producer(self._producing)
            self._slot(call, name, tensor, memory, producer, searched=producer is None)

    def outputs(self, call: Call, tensors: NamedTensors) -> None:
        """Record what a Layer returned, and note it as its product where Layers are all that is recorded."""
        for name, tensor in tensors:
            memory = self._buffers.memory(tensor)
            if memory is not None:
                memory.uninitialised = False
            if self._producing == "module":
                self._buffers.produced(memory, call, name)
            if call.recorded:
                self._slot(call, name, tensor, memory, None)

    def results(self, call: Call, inputs: NamedTensors, outputs: NamedTensors, written: set[int]) -> None:
        """Record what an operator computed, views told from new memory; ``written``: ids of outputs in memory that it was given
        and wrote."""
        before = {id(memory) for _, tensor in inputs if (memory := self._buffers.memory(tensor)) is not None}
        for name, tensor in outputs:
            if id(tensor) in written:
                self._buffers.written(tensor)
            memory = self._buffers.memory(tensor)
            is_view = memory is not None and id(memory) in before and id(tensor) not in written
            if not is_view:
                self._buffers.produced(memory, call, name)
            if call.recorded and not (is_view and memory is not None and memory.uninitialised):
                self._slot(call, name, tensor, memory, None)

    def received(self, call: Call, gradients: NamedTensors) -> None:
        """Record gradients that come to the backward of a call."""
        for name, tensor in gradients:
            self._slot(call, name, tensor, None, None, searched=True)

    def delivered(self, call: Call, gradients: NamedTensors) -> None:
        """Record gradients that the backward of a call made."""
        for name, tensor in gradients:
            self._buffers.made(tensor, self._slot(call, name, tensor, None, None), call, name)

    # ------------------------------------------------------------------------------------------------------------- inside
    def _slot(
        self, call: Call, name: str, tensor: paddle.Tensor, memory: Memory | None, producer: tuple[int, str] | None,
        *, searched: bool = False,
    ) -> Statistics | None:  # fmt: skip
        """Add a row; ``memory`` is None where the tensor lives no longer than a hook. ``searched``: look for who made a gradient
        by its address and bytes."""
        layout = layout_of(tensor)
        if layout is None:
            slot, stats = Slot(name, describe(tensor)), None
            self._recorder.note(f"no statistics for tensors that are {_kind(tensor)}: their values are not compared")
        else:
            slot, stats = layout.slot(name), self._buffers.statistics(tensor, layout, memory)
        if slot.tensor is not None:
            self.devices[slot.tensor.device] = None
        if searched:
            level = call.level if name.startswith("grad_") else self._producing
            producer = self._buffers.maker(tensor, stats, level)
        self._recorder.add(call, slot, None, producer, stats)
        return stats


def _kind(tensor: paddle.Tensor) -> str:
    if tensor.is_dist():
        return "distributed"
    return "sparse" if tensor.is_sparse() else "selected rows" if tensor.is_selected_rows() else "not dense"
