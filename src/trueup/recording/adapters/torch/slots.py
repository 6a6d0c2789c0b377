"""What a call's tensors become: rows with statistics and producers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trueup.recording.adapters.torch import transforms
from trueup.recording.adapters.torch.buffers import Storage
from trueup.recording.adapters.torch.context import Context
from trueup.recording.adapters.torch.gradients import GradientHook, Gradients
from trueup.recording.adapters.torch.layouts import is_plain, parts
from trueup.recording.adapters.torch.observing import Observing
from trueup.recording.adapters.torch.quick import quick
from trueup.recording.adapters.torch.shards import local, part_of
from trueup.recording.adapters.torch.tensors import NamedTensors, describe, layout_of
from trueup.recording.recorder import Call, Slot

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session


class Slots:
    """Records the tensors of calls, and which call produced which storage."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recorder, self._buffers = session.recorder, session.buffers
        levels = session.options.levels
        self._has_aten, self._has_api = "aten" in levels, "api" in levels
        self._producing = "api" if self._has_api else "aten" if self._has_aten else "module"
        """Level whose calls are the producers of api and module inputs: the finest there is, short of aten beside api."""
        self.devices: dict[str, None] = {}
        self._quick = quick(session, self.devices, self._producing, self._at_length)
        self._slot = self._at_length if self._quick is None else self._quick.slot

    @property
    def short(self) -> Any | None:
        """The short way, in C, for functions, operators and modules to learn; None where it was not built."""
        return self._quick

    @property
    def active(self) -> bool:
        """Whether anything is recorded at present."""
        return self._session.active

    def observing(self, context: Context) -> Observing:
        """Return a block of bookkeeping for the backward of a call, on whichever thread autograd executes it."""
        session = self._session
        return session.observing(session.threads.state, context.call.kind.op)

    def inputs(self, call: Call, tensors: NamedTensors) -> None:
        """Record inputs, with the call that produced each."""
        level = "aten" if call.kind.level == "aten" else self._producing
        if self._quick is not None:
            self._quick.inputs(call, tensors, level)
            return
        for slot, tensor in tensors:
            storage = self._buffers.storage(tensor)
            self._slot(call, slot, tensor, storage, None if storage is None else storage.producer(level))

    def outputs(
        self, call: Call, tensors: NamedTensors, inputs: NamedTensors | tuple[()] = (), step: int | None = None
    ) -> None:
        """Record outputs, but for views of ``inputs`` whose memory nobody has written yet; ``step``: if not the present one."""
        if self._quick is not None:
            self._quick.outputs(call, tensors, inputs, step)
            return
        storage_of = self._buffers.storage
        for slot, tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage.uninitialised and any(storage is storage_of(t) for _, t in inputs):
                continue
            self._slot(call, slot, tensor, storage, None, step)

    def gradients(self, context: Context, gradients: Gradients, task: int) -> None:
        """Record gradients that autograd delivers to or from a call."""
        call = context.backward_call(self._recorder, task)
        for slot, tensor in gradients if call.kind.recorded else ():
            if tensor is None:
                continue
            storage = self._buffers.storage(tensor)
            if storage is not None:
                storage.uninitialised = False
            if slot.startswith("grad_output"):
                self._slot(call, slot, tensor, storage, None if storage is None else storage.producer(call.kind.level))
            else:
                self._slot(call, slot, tensor, storage, None)
                if storage is not None:
                    storage.producers[call.kind.level] = (call.seq, slot)
                elif not is_plain(tensor):
                    self._buffers.produced(tensor, call.kind.level, call, slot)

    def hook(self, context: Context, slots: list[tuple[int, str]], *, received: bool) -> Callable[..., None]:
        """Return what autograd is to call at a node: it records gradients, by position, under the names of their slots.

        ``received``: they come to the call; else they are its results.
        """
        return GradientHook(context, slots, self) if self._quick is None else self._quick.hook(context, slots, received)

    def loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the tensor on which `backward()` is called: the loss curve, kept whatever the filters say."""
        loss = args[0] if args else kwargs.get("self")
        if not isinstance(loss, torch.Tensor):
            return
        state = self._session.threads.state
        parent = state.modules[-1] if state.modules else None
        call = self._recorder.begin(
            "api", "forward", "" if parent is None else parent.scope, "torch.Tensor.backward",
            parent=None if parent is None else parent.call.seq, site=self._session.site(state),
        )  # fmt: skip
        self.inputs(call, [("input.0", loss)])

    def produced(self, call: Call, tensors: NamedTensors) -> None:
        """Note that a call computed these tensors."""
        if self._quick is not None and call.kind.recorded:
            self._quick.produced(call, tensors, call.kind.level)
            return
        for slot, tensor in tensors:
            self._buffers.produced(tensor, call.kind.level, call, slot)

    def results(self, call: Call, inputs: NamedTensors, outputs: NamedTensors) -> None:
        """Record what an api call computed: tell views from new buffers and, without the aten level, what it wrote in place."""
        if not outputs:
            return
        follows, recorded, storage_of = self._has_api or not self._has_aten, call.kind.recorded, self._buffers.storage
        before = [storage_of(t) for _, t in inputs]
        for slot, tensor in outputs:
            storage = storage_of(tensor)
            known = storage is not None and storage in before
            if follows:
                in_place = any(tensor is t for _, t in inputs)
                if in_place and not self._has_aten:
                    self._buffers.written(tensor)
                if in_place or not known:
                    self._buffers.produced(tensor, "api", call, slot)
            if recorded and not (known and storage is not None and storage.uninitialised):  # a view of what nobody has written
                self._slot(call, slot, tensor, storage, None)

    def module_outputs(self, call: Call, outputs: NamedTensors) -> None:
        """Note what a module returned; where modules are all that is recorded, they are the producers."""
        for slot, tensor in outputs:
            self._buffers.initialised(tensor)
            if self._producing == "module":
                self._buffers.produced(tensor, "module", call, slot)

    def _at_length(
        self, call: Call, name: str, tensor: torch.Tensor, storage: Storage | None, producer: tuple[int, str] | None,
        step: int | None = None, *, late: bool = False, readable: bool = True,
    ) -> None:  # fmt: skip
        if self._buffers.in_flight and not late:  # of a collective under way: once it is complete
            now = self._recorder.step if step is None else step
            if self._session.collectives.defer(
                local(tensor), lambda can: self._at_length(call, name, tensor, storage, producer, now, late=True, readable=can)
            ):
                return
        if transforms.inside() and (whole := transforms.below(tensor)) is not tensor:
            tensor, storage = whole, None  # all samples of a vmap: what exists, and what its numbers are of
        layout = layout_of(tensor)
        part = None
        if layout is None and (inner := local(tensor)) is not tensor:
            part, tensor, layout = part_of(tensor), inner, layout_of(inner)
        slot = Slot(name, describe(tensor)) if layout is None else layout.slot(name)
        described = slot.tensor
        if described is not None and described.device not in self.devices:
            self.devices[described.device] = None
        stats = self._buffers.statistics(tensor, layout, storage) if readable else None
        self._recorder.add(call, slot, part, producer, stats, step)
        if stats is None and readable and not is_plain(tensor):
            self._parts(call, name, tensor)

    def _parts(self, call: Call, name: str, tensor: torch.Tensor) -> None:
        """Record the arrays of a tensor that is no plain one, each as a slot below the tensor's own."""
        level = "aten" if call.kind.level == "aten" else self._producing
        received = name.startswith(("input", "grad_output", "param"))
        for below, part in parts(name, tensor):
            storage = self._buffers.storage(part)
            self._slot(call, below, part, storage, storage.producer(level) if received and storage is not None else None)
