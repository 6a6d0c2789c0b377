"""Where execution stands: the enclosing call, its scope and phase, in forward and in backward, on whichever thread.

Forward nesting is per thread. Backward may run on a thread of its own, so nothing of it is kept per thread: each autograd node
carries the `Context` of the call that made it, in the node's own metadata.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from trueup.recorder.recorder import Call, Recorder

TAG = "trueup"


@dataclass(slots=True, eq=False)
class Context:
    """A forward call and, once gradients flow through it, its backward call."""

    call: Call
    parent: Context | None
    scope: str
    threads: Threads
    task: int = -1
    """Autograd graph task in which `backward` was begun; a second pass through the graph is another call."""
    backward: Call | None = None
    graph_task: int = -1
    """Graph task during which the forward call itself ran: not -1 for recomputation."""

    def backward_call(self, recorder: Recorder) -> Call:
        """Begin the backward of this call in the running graph task, once."""
        task = torch._C._current_graph_task_id()
        if self.backward is None or task != self.task:
            above = None if self.parent is None else self.parent.backward_call(recorder).seq
            call = self.call
            self.task = task
            self.backward = recorder.begin(
                call.level, "backward", self.scope, call.op, parent=above, site=call.site, forward_seq=call.seq
            )
        return self.backward


@dataclass(slots=True)
class ThreadState:
    """What nests on one thread."""

    contexts: list[Context] = field(default_factory=list)
    modules: list[Context] = field(default_factory=list)
    running: list[torch.nn.Module] = field(default_factory=list)
    """The modules of `modules`."""
    optimizer: bool = False
    observed: bool = False
    """Whether the modes are on in this thread."""
    busy: bool = False
    """True while Trueup itself works: nothing it executes is a call."""


class Threads(threading.local):
    """The `ThreadState` of the current thread."""

    def __init__(self) -> None:
        self.state = ThreadState()


def phase_of(state: ThreadState) -> str:
    """Name the phase of a call that starts now, outside any other api call."""
    task = torch._C._current_graph_task_id()
    if task != -1:
        # A module entered during this graph task is re-run by activation checkpointing; so is a bare function,
        # which runs with gradients enabled where an ordinary backward does not.
        if (state.modules and state.modules[-1].graph_task == task) or torch.is_grad_enabled():
            return "recompute"
        return "backward"
    if state.modules:
        return "forward"
    return "optimizer" if state.optimizer else "forward"


def tag(node: Any, context: Context) -> bool:
    """Mark an autograd node as made by a call; False if it already belongs to one."""
    metadata = node.metadata
    if TAG in metadata:
        return False
    metadata[TAG] = context
    return True


def tagged(node: Any) -> Context | None:
    """Return the context a node was marked with."""
    found = None if node is None else node.metadata.get(TAG)
    return found if isinstance(found, Context) else None
