"""What a call's tensors become: rows with statistics and producers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import paddle

from trueup.recording.adapters.paddle.buffers import Memory
from trueup.recording.adapters.paddle.tensors import NamedTensors, describe, layout_of
from trueup.recording.recorder import Call, Slot, Statistics

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

Gradients = list[tuple[str, paddle.Tensor]]


class Slots:
    """Records the tensors of calls, and which call produced which memory."""

    def __init__(self, session: Session) -> None:
        self._session, self._recorder, self._buffers = session, session.recorder, session.buffers
        self._producing = "api" if "api" in session.options.levels else "module"
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
        """Record what an operator computed: tell views from new memory and what it wrote in place.

        Args:
            call: the operator.
            inputs: its inputs, as named before it ran.
            outputs: its results, and what it wrote to besides.
            written: addresses (``id``) of the outputs that lie in memory which it was given and wrote.
        """
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

    def received(self, call: Call, gradients: Gradients) -> None:
        """Record gradients that come to the backward of a call."""
        for name, tensor in gradients:
            self._slot(call, name, tensor, None, None, searched=True)

    def delivered(self, call: Call, gradients: Gradients) -> None:
        """Record gradients that the backward of a call made."""
        for name, tensor in gradients:
            self._buffers.made(tensor, self._slot(call, name, tensor, None, None), call, name)

    def loss(self, tensors: object) -> None:
        """Record the tensor on which ``backward()`` is called: the loss curve, kept whatever the filters say."""
        loss = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        if not isinstance(loss, paddle.Tensor) or not loss._is_initialized():
            return
        state = self._session.threads.state
        parent = state.modules[-1] if state.modules else None
        call = self._recorder.begin(
            "api", "forward", "" if parent is None else parent.scope, "paddle.Tensor.backward",
            parent=None if parent is None else parent.call.seq, site=self._session.site(state),
        )  # fmt: skip
        self.inputs(call, [("input.0", loss)])

    # ------------------------------------------------------------------------------------------------------------- inside
    def _slot(
        self, call: Call, name: str, tensor: paddle.Tensor, memory: Memory | None, producer: tuple[int, str] | None,
        *, searched: bool = False,
    ) -> Statistics | None:  # fmt: skip
        """Add a row.

        Args:
            call: whose slot it is.
            name: of the slot.
            tensor: what it shows.
            memory: what is known of the tensor's memory; None where it lives no longer than a hook.
            producer: the call and slot that made it.
            searched: look for the producer by address and bytes (a gradient, which an optimizer may read).
        """
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
