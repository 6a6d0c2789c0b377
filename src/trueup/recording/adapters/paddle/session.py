"""A running capture of Paddle: the entrances, the Layer calls, the optimizers, and what they all record through."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paddle

from trueup.recording.adapters import adapter
from trueup.recording.adapters.paddle import programs, replays
from trueup.recording.adapters.paddle.buffers import Buffers
from trueup.recording.adapters.paddle.collectives import Collectives
from trueup.recording.adapters.paddle.context import Threads, ThreadState
from trueup.recording.adapters.paddle.entrances import Entrances
from trueup.recording.adapters.paddle.environment import describe_run, rank_and_world
from trueup.recording.adapters.paddle.gradients import Graph
from trueup.recording.adapters.paddle.invocations import Invocations
from trueup.recording.adapters.paddle.layers import RUN_LAYER, layer_calls
from trueup.recording.adapters.paddle.optimizers import Optimizers
from trueup.recording.adapters.paddle.passes import Passes
from trueup.recording.adapters.paddle.reductions import Reductions
from trueup.recording.adapters.paddle.scopes import Scopes
from trueup.recording.adapters.paddle.selftest import Abilities, examine
from trueup.recording.adapters.paddle.slots import Slots
from trueup.recording.recorder import CaptureOptions, Statistics
from trueup.recording.recorder.failure import Failure
from trueup.recording.recorder.observing import Observing
from trueup.recording.recorder.options import in_ranges
from trueup.recording.recorder.session import BaseSession, check

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.policies import AppliedPolicy

PADDLE = str(Path(paddle.__file__).parent)


class Session(BaseSession):
    """Everything that the parts share. One at a time in a process.

    Raises:
        TrueupError: the options ask for what there is not for Paddle.
    """

    nothing_ran = "no Paddle operator was executed in dynamic mode while the capture was on"

    def __init__(self, directory: Path, options: CaptureOptions, root: dict[str, Any], scopes: Scopes | None = None) -> None:
        check(options, adapter("paddle"))
        self.options = options
        self.threads = Threads()
        self.scopes = scopes or Scopes()
        self.recorder = self.recorder_type(directory, options, self.identify, _resolve, internal=(PADDLE,))
        self.failure = Failure(self.recorder, options.on_error)
        self.buffers = Buffers(self.recorder)
        self.slots = Slots(self)
        self.invocations = Invocations(self) if options.detail != "digest" else None
        self.graph = Graph(self)
        self.passes = Passes(self)
        self.optimizers = Optimizers(self)
        self.collectives = Collectives(self)
        self.reductions = Reductions(self)
        self._root = root
        self._levels = set(options.levels)
        self._thread = 0
        self._parts: list[Any] = []
        self.policies: list[AppliedPolicy] = []
        """Policies that were at work in this run."""

    # -------------------------------------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Begin to see calls."""
        if (policies := sys.modules.get("trueup.recording.adapters.paddle.policies")) is not None:
            self.policies += policies.applied()
        self.recorder.policy = lambda: [use.to_json() for policy in self.policies for use in policy.uses()]
        self._thread = threading.get_ident()
        self.threads.state.known = True
        self._fall_back(examine())
        self.put_on()
        self._update_active()

    def put_on(self) -> None:
        """Stand in front of what Paddle holds now."""
        self._parts = [layer_calls(self), *self.optimizers.replacements()]
        if self.graph.tensors:
            self._parts += self.passes.replacements()
        if "api" in self._levels:
            self._parts.append(Entrances(self))
        self._parts += replays.replacements(self)
        self._parts += programs.replacements(self)
        self._parts.append(self.collectives)
        for part in self._parts:
            part.install()

    def _fall_back(self, found: Abilities) -> None:
        """Leave out what this Paddle cannot do, and say so."""
        for said in found.sentences:
            self.recorder.note(said)
        if not found.operators:
            self._levels.discard("api")
        self.graph.posts = found.nodes
        self.graph.tensors = found.backward

    def take_off(self) -> None:
        """Leave nothing of ours in Paddle."""
        parts, self._parts = self._parts, []
        for part in reversed(parts):
            part.remove()
        self.graph.release()
        self.reductions.remove()

    def finish(self) -> None:
        """Write what is left (at the end of an armed process)."""
        self.active, self.over = False, True
        self.optimizers.close()
        with self.observing(self.threads.state, "collectives under way"):
            self.collectives.end()
        self.recorder.close("complete" if self.failure.text is None else "stopped")

    def step(self) -> None:
        """End the present step; from now on only this ends steps."""
        with self.observing(self.threads.state, "the end of a step"):
            if self.optimizers.steps.by_hand():
                self.end_step()

    def enter_model(self, layer: paddle.nn.Layer, state: ThreadState) -> None:
        """Hear that a Layer begins to run outside any other: a step may be due."""
        with self.observing(state, "the end of a step"):
            self.optimizers.entered(layer, state)

    def updates(self, optimizer: Any, *, scaled: bool) -> None:
        """Hear that an optimizer is about to change its parameters (for a watch)."""

    def scaled(self, scaler: Any, scale: Any, *, stepped: bool) -> None:
        """Hear that a GradScaler has made a step, with which scale, and whether that came to its optimizer (for a watch)."""

    def end_step(self) -> None:
        """Finish the present step."""
        self.optimizers.ended()
        self.collectives.settle()
        self.buffers.end_step()
        self.recorder.end_step()
        if "api" not in self._levels:  # writes were seen by nobody
            self.buffers.forget()
        self._update_active()
        if self.options.is_over(self.recorder.step):
            raise SystemExit(0)  # all ranks get here at the end of the same step

    def _update_active(self) -> None:
        rank, _ = rank_and_world()
        active = self.failure.text is None and self.recorder.active and in_ranges(rank or 0, self.options.ranks)
        if active and not self.active:
            self.buffers.forget()
            self.graph.reset()
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
    def site(self, state: ThreadState) -> int | None:
        """Return the number of the present call stack, walked up to the Layer that is running on this thread."""
        above = state.modules[-1].call.site if state.modules else None
        return self.recorder.sites.here(above, RUN_LAYER)

    def observing(self, state: ThreadState, what: str) -> Observing:
        """Return a block for our own work: nothing in it is a call, and its exceptions end the capture, not the training."""
        return Observing(state, self.failed, what)

    def records(self, level: str) -> bool:
        """Tell whether calls of a level are recorded."""
        return level in self._levels

    def notice_thread(self, state: ThreadState) -> None:
        """Note that Layers run on a thread that does not end steps."""
        if not state.known:
            state.known = True
            name = threading.current_thread().name
            self.recorder.note(f"thread {name} runs Layers; what it executes is recorded in whatever step is under way")


def _resolve(_: list[Statistics]) -> None:
    """Do nothing: all statistics are on the host when they are taken."""
