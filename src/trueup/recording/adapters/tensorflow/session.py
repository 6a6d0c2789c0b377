"""A running capture of TensorFlow: what sees operations, layers, gradients and functions, and what they record through."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.util import tf_stack

from trueup.foundation.model import PHASES, TrueupError
from trueup.recording.adapters import adapter
from trueup.recording.adapters.tensorflow.context import Threads, ThreadState
from trueup.recording.adapters.tensorflow.environment import describe_run, rank_and_world
from trueup.recording.adapters.tensorflow.functions import Functions
from trueup.recording.adapters.tensorflow.gradients import Gradients
from trueup.recording.adapters.tensorflow.layers import RUN_LAYER, layer_calls
from trueup.recording.adapters.tensorflow.loading import WhenLoaded
from trueup.recording.adapters.tensorflow.nodes import Node
from trueup.recording.adapters.tensorflow.operations import Operations
from trueup.recording.adapters.tensorflow.optimizers import Optimizers
from trueup.recording.adapters.tensorflow.programs import Programs
from trueup.recording.adapters.tensorflow.python_functions import PythonFunctions
from trueup.recording.adapters.tensorflow.scopes import Scopes, layer_class
from trueup.recording.adapters.tensorflow.sessions import Sessions
from trueup.recording.adapters.tensorflow.slots import Slots
from trueup.recording.recorder import CaptureOptions, Statistics
from trueup.recording.recorder.failure import Failure
from trueup.recording.recorder.observing import Observing
from trueup.recording.recorder.options import in_ranges
from trueup.recording.recorder.replacing import Replacement
from trueup.recording.recorder.session import BaseSession, check

TENSORFLOW = str(Path(tf.__file__).parent)

PADDLE = (
    "PaddlePaddle and TensorFlow are both loaded in this process: TensorFlow is not recorded\n"
    "  expected: one of the two in a process; loaded in the other order they crash it\n"
    "  got:      both\n"
    "  next:     run the TensorFlow training in a process that does not import paddle"
)


class Session(BaseSession):
    """Everything that the parts share. One at a time in a process.

    Raises:
        TrueupError: the options ask for what there is not for TensorFlow, or PaddlePaddle is loaded in this process.
    """

    nothing_ran = "no TensorFlow operation was executed while the capture was on"

    def __init__(self, directory: Path, options: CaptureOptions, root: dict[str, Any], scopes: Scopes | None = None) -> None:
        if "paddle" in sys.modules:
            raise TrueupError(PADDLE)
        check(options, adapter("tensorflow"))
        self.options = options
        self.threads = Threads()
        self.scopes = scopes or Scopes()
        internal = (TENSORFLOW, str(Path(TENSORFLOW).parent / "keras"))
        self.recorder = self.recorder_type(directory, options, self.identify, _resolve, internal=internal)
        self.failure = Failure(self.recorder, options.on_error)
        self.slots = Slots(self)
        self.gradients = Gradients(self)
        self.programs = Programs(self)
        self.functions = Functions(self)
        self.optimizers = Optimizers(self)
        self.sessions = Sessions(self)
        self.operations = Operations(self)
        self._python_functions = PythonFunctions(self)
        self._root = root
        self._levels = set(options.levels)
        self._thread = 0
        self._passes = 0
        self._parts: list[Any] = []

    # -------------------------------------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Begin to see calls, on this thread."""
        self._thread = threading.get_ident()
        self.threads.state.known = True
        self._parts = [*self.optimizers.replacements(), *self.gradients.replacements(), *self.functions.replacements()]
        self._parts += [*self._python_functions.replacements(), *self.sessions.replacements()]
        self._parts += [self.gradients, self.operations, WhenLoaded("keras.src.layers.layer", self._layers)]
        self._parts.append(WhenLoaded("keras.src.optimizers.base_optimizer", self.optimizers.keras_replacements))
        for part in self._parts:
            part.install()
        self._update_active()

    def _layers(self) -> list[Replacement]:
        return [layer_calls(self, layer_class())]

    def take_off(self) -> None:
        """Leave nothing of ours in TensorFlow."""
        parts, self._parts = self._parts, []
        for part in reversed(parts):
            part.remove()

    def finish(self) -> None:
        """Write what is left (at the end of an armed process)."""
        self.active, self.over = False, True
        self.optimizers.close()
        self.recorder.close("complete" if self.failure.text is None else "stopped")

    def step(self) -> None:
        """End the present step; from now on only this ends steps."""
        with self.observing(self.threads.state, "the end of a step"):
            if self.optimizers.steps.by_hand():
                self.end_step()

    def enter_model(self, layer: Any | None, state: ThreadState) -> None:
        """Hear that a layer, or a function (None), begins to run outside any other: a step may be due."""
        with self.observing(state, "the end of a step"):
            self.optimizers.entered(layer, state)

    def end_step(self) -> None:
        """Finish the present step."""
        self.optimizers.steps.ended()
        self.slots.forget()
        self.gradients.forget()
        self.recorder.end_step()
        self._update_active()
        if self.options.is_over(self.recorder.step):
            raise SystemExit(0)  # all ranks get here at the end of the same step

    def flush(self) -> bool:
        """Make calls of what graphs have told; return whether they told anything."""
        if not self.programs.waiting:
            return False
        stepped: list[Any] = []
        with self.observing(self.threads.state, "what functions computed"):
            stepped = self.programs.executed()
        for optimizer in stepped:
            self.updates(optimizer)
            self.optimizers.stepped(optimizer)
        return True

    def updates(self, optimizer: Any) -> None:
        """Hear that an optimizer is about to change the weights, or has in a function."""

    def _update_active(self) -> None:
        rank, _ = rank_and_world()
        active = self.failure.text is None and self.recorder.active and in_ranges(rank or 0, self.options.ranks)
        if active and not self.active:
            self.slots.forget()
        self.active = active and not self.over

    # --------------------------------------------------------------------------------------------------- who this process is
    def rank_and_world(self) -> tuple[int | None, int]:
        """Return this process's rank (None when nothing says so) and the world size."""
        return rank_and_world()

    def describe(self) -> dict[str, Any]:
        """Describe this process for its rank's manifest."""
        return describe_run(list(self.slots.devices))

    @property
    def pending(self) -> bool:
        """Whether an optimizer has stepped in a step that did not end yet."""
        return self.optimizers.pending

    # ------------------------------------------------------------------------------------------------- what the parts call
    @property
    def counts(self) -> bool:
        """Whether steps are counted: also those that are not recorded."""
        return not self.over

    def begin(
        self, level: str, phase: str, scope: str, op: str, *, parent: Node | None, forward: Node | None, site: int | None,
        graph: Any,
    ) -> Node:  # fmt: skip
        """Begin a call that executes now, or take up one that stands in a graph that is being built."""
        node = Node(level, phase, scope, op, parent=parent, forward=forward, site=site)
        if graph is None:
            self.execute(node, parent, 0)
        else:
            self.programs.add(node, graph)
        return node

    def execute(self, node: Node, parent: Node | None, k: int) -> None:
        """Number one execution of a call; its k-th, where it stands in the body of a loop."""
        above = None if parent is None else parent.call(k)
        before = None if node.forward is None else node.forward.call(-1 - k)  # a loop is gone through backwards
        call = self.recorder.begin(
            node.level, node.phase, node.scope, node.op, parent=None if above is None else above.seq, site=node.site,
            forward_seq=None if before is None else before.seq,
        )  # fmt: skip
        if k == 0:
            node.calls = []
        node.calls.append(call)

    def enclosing_now(self) -> Node | None:
        """Return the layer that is executing."""
        state = self.threads.state
        return next((layer for layer in reversed(state.modules) if layer.live), None)

    def graph_here(self) -> Any:
        """Return the graph that is being built; None where what runs is executed."""
        return None if tf.executing_eagerly() else ops.get_default_graph()

    def next_pass(self) -> int:
        """Number a backward pass."""
        self._passes += 1
        return self._passes

    def pass_number(self, graph: Any) -> int:
        """Return the number of the backward pass under way, or what stands for it: a graph is one."""
        passes = self.threads.state.passes
        return passes[-1] if passes and graph is None else -2 - id(graph)

    def site(self, state: ThreadState, graph: Any = None) -> int | None:
        """Return the number of the present call stack, walked up to the layer that is running on this thread.

        Where a graph is built, TensorFlow tells the lines of the user's code: what runs is what AutoGraph made of them.
        """
        if graph is not None:
            stack = [(one.filename, one.lineno, one.name) for one in reversed(tf_stack.extract_stack())]
            return self.recorder.sites.named(stack)
        above = state.modules[-1].site if state.modules else None
        return self.recorder.sites.here(above, RUN_LAYER)

    def observing(self, state: ThreadState, what: str) -> Observing:
        """Return a block for our own work: nothing in it is a call, and its exceptions end the capture, not the training."""
        return Observing(state, self.failed, what)

    def records(self, level: str) -> bool:
        """Tell whether calls of a level are recorded."""
        return level in self._levels

    @property
    def records_all(self) -> bool:
        """Whether no option leaves calls out but by their level."""
        return not (self.options.include or self.options.exclude) and len(self.options.phases) == len(PHASES)

    def recorder_wants(self, node: Node) -> bool:
        """Tell whether the options keep calls of this kind."""
        return self.recorder.selects(node.level, node.phase, node.scope, node.op)

    def untold(self, op: str) -> None:
        """Note that a function ran whose operations are not seen."""
        why = "XLA compiled it, or another thread built its graph"
        self.recorder.note(f"{op} ran and nothing inside told of itself ({why}): its operations are not recorded")


def _resolve(_: list[Statistics]) -> None:
    """Do nothing: all statistics are on the host when they are taken."""
