"""Where execution stands: the enclosing call, its scope and phase, in forward and in backward.

Paddle runs the backward on the thread that asked for it, so all of this nests on one thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import paddle

from trueup.recording.recorder import Call, Recorder

if TYPE_CHECKING:
    from trueup.recording.recorder.repeats import Run


@dataclass(slots=True, eq=False)
class Context:
    """A forward call and, once gradients flow through it, its backward call."""

    call: Call
    parent: Context | None
    scope: str
    opaque: bool = True
    """Whether what executes inside is part of it, as the kernels of an operator are; a Layer or a PyLayer is not."""
    passed: int = -1
    """Backward pass in which ``backward`` was begun; a second pass through the graph is another call."""
    backward: Call | None = None
    depth: int = 0
    """How many backward passes were under way when it began: only what is above that encloses a call."""

    def backward_call(self, recorder: Recorder, number: int) -> Call:
        """Begin the backward of this call in a backward pass, once."""
        if self.backward is None or number != self.passed:
            above = None if self.parent is None else self.parent.backward_call(recorder, number).seq
            call = self.call
            self.passed = number
            self.backward = recorder.begin(
                call.level, "backward", self.scope, call.op, parent=above, site=call.site, forward_seq=call.seq
            )
        return self.backward


@dataclass(slots=True)
class ThreadState:
    """What nests on one thread."""

    contexts: list[Context] = field(default_factory=list)
    """Operators that are executing."""
    modules: list[Context] = field(default_factory=list)
    running: list[Any] = field(default_factory=list)
    """The Layers of `modules`."""
    passes: list[int] = field(default_factory=list)
    """Numbers of the backward passes under way: a recomputed block runs one of its own inside another."""
    stepping: int = 0
    """How many optimizers' steps are under way, one inside another."""
    updating: bool = False
    """Whether a backward pass has ended and no Layer ran since: what computes without gradients there is for the optimizer."""
    runs: list[Run] = field(default_factory=list)
    """Runs of recomputed functions under way, first ones and repetitions."""
    busy: bool = False
    """True while Trueup itself works: nothing it executes is a call."""
    known: bool = False
    """Whether operators of this thread are recorded: it began the capture, or has run a Layer (and prepares no data)."""


class Threads(threading.local):
    """The `ThreadState` of the current thread."""

    def __init__(self) -> None:
        self.state = ThreadState()


def phase_of(state: ThreadState) -> str:
    """Name the phase of a call that starts now, outside any other operator."""
    if state.stepping:
        return "optimizer"
    if state.passes:
        replaying = bool(state.runs) and state.runs[-1].repeats and state.runs[-1].within == len(state.passes)
        return "recompute" if replaying else "backward"
    if state.modules:
        return "forward"
    return "optimizer" if state.updating and not paddle.is_grad_enabled() else "forward"


def enclosing(state: ThreadState) -> tuple[Context | None, Context | None]:
    """Return the operator and the Layer inside which a call starts; those from before the running backward pass do not count."""
    depth = len(state.passes)
    operator = state.contexts[-1] if state.contexts and state.contexts[-1].depth == depth else None
    layer = state.modules[-1] if state.modules and state.modules[-1].depth == depth else None
    return operator, layer
