"""Where execution stands, on one thread: the enclosing layers, the phase, and whether a graph is being built.

TensorFlow runs Python's part of the backward on the thread that asked for it, so all of this nests on one thread. Where a graph is
built, it stands for where the graph's operations will execute.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from trueup.recording.adapters.tensorflow.nodes import Node


@dataclass(slots=True)
class ThreadState:
    """What nests on one thread."""

    modules: list[Node] = field(default_factory=list)
    running: list[Any] = field(default_factory=list)
    """The layers of `modules`."""
    passes: list[int] = field(default_factory=list)
    """Numbers of the backward passes under way."""
    brackets: list[tuple[Node | None, Any]] = field(default_factory=list)
    """Gradient functions under way, each with the graph that it builds in (None: it executes)."""
    by_hand: list[Node] = field(default_factory=list)
    """Gradient functions under way that users wrote: what they execute is inside them."""
    stepping: int = 0
    """How many optimizers' steps are under way, one inside another."""
    tracing: int = 0
    """How many twins of functions are under way: what is put into a graph meanwhile gets taps."""
    functions: list[Any] = field(default_factory=list)
    """The functions (`tf.function`) that were called, the outermost first."""
    untapped: int = 0
    """How many things are under way whose graphs must get none: pipelines of data, XLA, saving."""
    busy: bool = False
    """True while nothing that executes is a call: Trueup itself works, or a Python function that is one call."""
    known: bool = False
    """Whether this thread began the capture, or was noted."""


class Threads(threading.local):
    """The `ThreadState` of the current thread."""

    def __init__(self) -> None:
        self.state = ThreadState()


def phase_of(state: ThreadState, graph: Any) -> str:
    """Name the phase of a call that starts now, or that is put into a graph."""
    if state.stepping:
        return "optimizer"
    if state.passes or is_backward(graph):
        return "recompute" if len(state.modules) > 0 and state.modules[-1].phase == "recompute" else "backward"
    return "forward"


def is_backward(graph: Any) -> bool:
    """Tell whether a graph is the backward of a function, a branch or a loop (TensorFlow 2.21 names them so)."""
    name = getattr(graph, "name", None)
    return isinstance(name, str) and (name.startswith("__backward_") or "_grad_" in name)
