"""Where execution stands: the enclosing call, its scope and phase, in forward and in backward.

Paddle runs the backward on the thread that asked for it, so all of this nests on one thread. The scope of a call is the path of the
innermost Layer that is running.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import paddle

from trueup.recording.adapters.paddle.buffers import Buffers, Slots
from trueup.recording.engine.scopes import Scopes as BaseScopes
from trueup.recording.engine.scopes import walk
from trueup.recording.engine.session import BaseSession, Threads
from trueup.recording.recorder import Call, Recorder

if TYPE_CHECKING:
    from trueup.recording.engine.checkpointing import Run

WRAPPERS = {"DataParallel": "_layers", "PipelineParallel": "_layers", "TensorParallel": "_layers", "ShardingParallel": "_layers"}
"""Layers that hold the user's, and under which name (Paddle 3.3: paddle.DataParallel and fleet's wrappers)."""


class Scopes(BaseScopes):
    """Gives each Layer its path; not by ``full_name()``, which counts all Layers that the process ever made."""

    def below(self, root: paddle.nn.Layer, prefix: str) -> Iterable[tuple[str, paddle.nn.Layer]]:
        return walk(root, prefix, _held)

    def children(self, layer: paddle.nn.Layer) -> Iterable[tuple[str, paddle.nn.Layer]]:
        return layer.named_children()  # type: ignore[no-any-return]

    def is_model(self, root: paddle.nn.Layer) -> bool:
        return next(iter(root.parameters()), None) is not None

    def inside(self, root: paddle.nn.Layer) -> paddle.nn.Layer:
        while type(root).__name__ in WRAPPERS and (held := root._sub_layers.get(WRAPPERS[type(root).__name__])) is not None:
            root = held
        return root


def _held(layer: paddle.nn.Layer) -> Iterator[tuple[str | None, paddle.nn.Layer]]:
    """Yield the Layers that a Layer holds; one inside a wrapper has no name there."""
    hidden = WRAPPERS.get(type(layer).__name__)
    for name, child in layer._sub_layers.items():
        if child is not None:
            yield None if name == hidden else name, child


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


def phase_of(state: ThreadState) -> str:
    """Name the phase of a call that starts now, outside any other operator."""
    if state.stepping:
        return "optimizer"
    if state.passes:
        repeats = bool(state.runs) and state.runs[-1].repeats and state.runs[-1].within == len(state.passes)
        return "recompute" if repeats else "backward"
    if state.modules:
        return "forward"
    return "optimizer" if state.updating and not paddle.is_grad_enabled() else "forward"


def enclosing(state: ThreadState) -> tuple[Context | None, Context | None]:
    """Return the operator and the Layer inside which a call starts; those from before the running backward pass do not count."""
    depth = len(state.passes)
    operator = state.contexts[-1] if state.contexts and state.contexts[-1].depth == depth else None
    layer = state.modules[-1] if state.modules and state.modules[-1].depth == depth else None
    return operator, layer


class SessionCore(BaseSession):
    """What the parts of this adapter know of the session that holds them together and stands above them all."""

    threads: Threads[ThreadState]
    scopes: Scopes
    buffers: Buffers
    slots: Slots
    invocations: Any
    graph: Any
    passes: Any
    collectives: Any
    reductions: Any
    optimizers: Any
    enter_model: Callable[[paddle.nn.Layer, ThreadState], None]
    updates: Callable[..., None]
    scaled: Callable[..., None]

    def notice_thread(self, state: ThreadState) -> None:
        """Note that Layers run on a thread that does not end steps."""
        if not state.known:
            state.known = True
            name = threading.current_thread().name
            self.recorder.note(f"thread {name} runs Layers; what it executes is recorded in whatever step is under way")
