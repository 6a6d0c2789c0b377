"""What a call's tensors become: rows with statistics and producers. Each tensor is read once in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trueup.foundation.frameworks.tensorflow_names import device_name
from trueup.recording.adapters.tensorflow.host import measure, on_host
from trueup.recording.adapters.tensorflow.nodes import Node, number_of
from trueup.recording.adapters.tensorflow.tensors import NamedTensors, slot_of
from trueup.recording.recorder import Call, Slot, Statistics

if TYPE_CHECKING:
    from trueup.recording.adapters.tensorflow.session import Session

GRADIENT = "grad_"


class Slots:
    """Records the tensors of calls, and which call produced which tensor. A tensor of TensorFlow never changes."""

    def __init__(self, session: Session) -> None:
        self._session, self._recorder = session, session.recorder
        self._producing = "api" if "api" in session.options.levels else "module"
        """Level whose calls are the producers of inputs: the finest there is."""
        self._known: dict[int, Statistics | None] = {}
        self._producers: dict[int, tuple[int, str]] = {}
        self.devices: dict[str, None] = {}

    def forget(self) -> None:
        """Let go of what is known, at the end of a step."""
        self._known.clear()
        self._producers.clear()

    def inputs(self, node: Node, tensors: NamedTensors) -> None:
        """Record what a call that executes now is given."""
        self._record(node, tensors)

    def outputs(self, node: Node, tensors: NamedTensors) -> None:
        """Record what it made, and note it as its product."""
        self._record(node, tensors)

    def unseen(self, node: Node, names: list[str]) -> None:
        """Record that a call was given what is not known: then its results are nothing to blame it for."""
        if not node.live:
            node.unseen += names
        elif (call := node.call()) is not None and call.recorded:
            self.add_unseen(call, names)

    def add_unseen(self, call: Call, names: list[str]) -> None:
        """Add rows of which nothing is known."""
        for name in names:
            self._recorder.add(call, slot_of(name, "variant", (), "cpu"), None, None, None)

    def value(self, node: Node, text: str) -> None:
        """Record the arguments that are no tensors."""
        if not node.live:
            node.value = text
        elif (call := node.call()) is not None and call.recorded:
            self._recorder.value(call, text)

    def add(self, node: Node, call: Call, slot: Slot, number: int, stats: Statistics | None) -> None:
        """Add a row."""
        if slot.tensor is not None:
            self.devices[slot.tensor.device] = None
        made = slot.name.startswith(("output", "grad_input"))
        producer = None if made else self._producers.get(number)
        self._recorder.add(call, slot, None, producer, stats)
        if made and node.level == self._producing:
            self._producers.setdefault(number, (call.seq, slot.name))

    def _record(self, node: Node, tensors: NamedTensors) -> None:
        call = node.call()
        if not node.live or call is None or not call.recorded:
            return
        for name, tensor in tensors:
            number = number_of(tensor)
            slot = slot_of(name, tensor.dtype.base_dtype.name, tuple(tensor.shape), device_name(tensor.backing_device))
            self.add(node, call, slot, number, self._statistics(number, tensor))

    def _statistics(self, number: int, tensor: Any) -> Statistics | None:
        if number in self._known:
            return self._known[number]
        stats: Statistics | None = None
        try:
            stats = measure(on_host(tensor), self._session.options.detail)
        except (TypeError, ValueError, RuntimeError) as error:
            self._recorder.note(f"no statistics for {tensor.dtype.name}: {str(error).splitlines()[0]}")
        if stats is not None and stats.data is not None:
            self._recorder.keep(stats)
        self._known[number] = stats
        return stats
