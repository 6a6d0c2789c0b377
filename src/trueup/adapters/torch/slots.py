"""What a call's tensors become: rows with statistics and producers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from trueup.adapters.torch.context import Context
from trueup.adapters.torch.gradients import Gradients
from trueup.adapters.torch.observing import Observing
from trueup.adapters.torch.tensors import describe
from trueup.recorder import Call

if TYPE_CHECKING:
    from trueup.adapters.torch.session import Session

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class Slots:
    """Records the tensors of calls, and which call produced which storage."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recorder, self._buffers = session.recorder, session.buffers
        levels = session.options.levels
        self._has_aten = "aten" in levels
        self._producing = "api" if "api" in levels else "aten" if self._has_aten else "module"
        """Level whose calls are the producers of api and module inputs: the finest there is, short of aten beside api."""
        self.devices: dict[str, None] = {}

    def inputs(self, call: Call, tensors: NamedTensors) -> None:
        """Record inputs, with the call that produced each."""
        level = "aten" if call.level == "aten" else self._producing
        for slot, tensor in tensors:
            self._slot(call, slot, tensor, self._buffers.producer(tensor, level))

    def outputs(self, call: Call, tensors: NamedTensors) -> None:
        """Record outputs."""
        for slot, tensor in tensors:
            self._slot(call, slot, tensor, None)

    @property
    def active(self) -> bool:
        """Whether anything is recorded at present."""
        return self._session.active

    def observing(self, context: Context) -> Observing:
        """Return a block of bookkeeping for the backward of a call, on whichever thread autograd executes it."""
        session = self._session
        return session.observing(session.threads.state, f"the backward of {context.call.op}")

    def gradients(self, context: Context, gradients: Gradients, task: int) -> None:
        """Record gradients that autograd delivers to or from a call."""
        call = context.backward_call(self._recorder, task)
        for slot, tensor in gradients if call.recorded else ():
            if tensor is None:
                continue
            self._buffers.initialised(tensor)
            if slot.startswith("grad_output"):
                self._slot(call, slot, tensor, self._buffers.producer(tensor, call.level))
            else:
                self._slot(call, slot, tensor, None)
                self._buffers.produced(tensor, call.level, call, slot)

    def loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the tensor on which `backward()` is called: the loss curve, kept whatever the filters say."""
        loss = args[0] if args else kwargs.get("self")
        if not isinstance(loss, torch.Tensor):
            return
        state = self._session.threads.state
        parent = state.modules[-1] if state.modules else None
        call = self._recorder.begin(
            "api", "forward", "" if parent is None else parent.scope, "torch.Tensor.backward",
            parent=None if parent is None else parent.call.seq, site=self._recorder.sites.here(),
        )  # fmt: skip
        self.inputs(call, [("input.0", loss)])

    def produced(self, call: Call, tensors: NamedTensors) -> None:
        """Note that a call computed these tensors."""
        for slot, tensor in tensors:
            self._buffers.produced(tensor, call.level, call, slot)

    def api_outputs(self, call: Call, inputs: NamedTensors, outputs: list[tuple[str, torch.Tensor]]) -> None:
        """Tell views from results of an api call; without the aten level, also what it wrote in place."""
        before = self._buffers.storages(inputs)
        given = {id(t) for _, t in inputs}
        for slot, tensor in outputs:
            in_place = id(tensor) in given
            if in_place and not self._has_aten:
                self._buffers.written(tensor)
            if in_place or not (self._buffers.storages([(slot, tensor)]) & before):
                self._buffers.produced(tensor, "api", call, slot)

    def module_outputs(self, call: Call, outputs: list[tuple[str, torch.Tensor]]) -> None:
        """Note what a module returned; where modules are all that is recorded, they are the producers."""
        for slot, tensor in outputs:
            self._buffers.initialised(tensor)
            if self._producing == "module":
                self._buffers.produced(tensor, "module", call, slot)

    def _slot(self, call: Call, slot: str, tensor: torch.Tensor, producer: tuple[int, str] | None) -> None:
        described = describe(tensor)
        self.devices.setdefault(described.device)
        self._recorder.slot(call, slot, described, self._buffers.statistics(tensor), producer)
