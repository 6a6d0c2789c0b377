"""Where execution stands: the enclosing call, its scope and phase, in forward and in backward, on whichever thread.

Forward nesting is per thread. Backward may run on a thread of its own, so nothing of it is kept per thread: each autograd node
carries the `Context` of the call that made it, in the node's own metadata.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from trueup.recording.recorder import Call, Recorder
from trueup.recording.recorder.repeats import Run

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

    def backward_call(self, recorder: Recorder, task: int | None = None) -> Call:
        """Begin the backward of this call in a graph task (None: the running one), once."""
        if task is None:
            task = torch._C._current_graph_task_id()
        if self.backward is None or task != self.task:
            above = None if self.parent is None else self.parent.backward_call(recorder, task).seq
            call = self.call
            self.task = task
            self.backward = recorder.begin(
                call.level, "backward", self.scope, call.op, parent=above, site=call.site, forward_seq=call.seq
            )
        return self.backward


@dataclass(slots=True)
class Shared:
    """What all threads have to know."""

    second_order: int = 0
    """Backward passes under way that build a graph themselves (``create_graph=True``)."""
    updating: bool = False
    """Whether a backward pass has ended and no module ran since: what computes without gradients there is for the optimizer."""


@dataclass(slots=True)
class ThreadState:
    """What nests on one thread."""

    shared: Shared
    contexts: list[Context] = field(default_factory=list)
    modules: list[Context] = field(default_factory=list)
    running: list[torch.nn.Module] = field(default_factory=list)
    """The modules of `modules`."""
    stepping: CodeType | None = None
    """Code of the function around an optimizer's step, while one is under way."""
    stepping_task: int = -1
    """Graph task during which it began: not -1 for an optimizer that steps in a backward pass."""
    observed: bool = False
    """Whether the modes are on in this thread."""
    runs: list[Run] = field(default_factory=list)
    """Runs of checkpointed functions under way, first ones and repetitions."""
    busy: bool = False
    """True while Trueup itself works: nothing it executes is a call."""


class Threads(threading.local):
    """The `ThreadState` of the current thread."""

    def __init__(self, shared: Shared) -> None:
        self.state = ThreadState(shared)


def enclosing(state: ThreadState) -> Context | None:
    """Return the api call that is executing; one from before the running backward pass began does not enclose it."""
    if not state.contexts:
        return None
    context = state.contexts[-1]
    return context if context.graph_task == torch._C._current_graph_task_id() else None


def phase_of(state: ThreadState) -> str:
    """Name the phase of a call that starts now, outside any other api call."""
    task = torch._C._current_graph_task_id()
    if task != -1:
        if state.stepping is not None and state.stepping_task == task and in_optimizer(state):
            return "optimizer"
        # A module entered during this graph task is re-run by activation checkpointing; so is a bare function, which runs
        # with gradients enabled where a backward does not, unless it builds a graph.
        entered = bool(state.modules) and state.modules[-1].graph_task == task
        return "recompute" if entered or (torch.is_grad_enabled() and not state.shared.second_order) else "backward"
    if state.modules:
        return "forward"
    updates = in_optimizer(state) or (state.shared.updating and not torch.is_grad_enabled())
    return "optimizer" if updates else "forward"


def in_optimizer(state: ThreadState) -> bool:
    """Tell whether an optimizer's step is under way; a step that raised left no trace but its absence from the stack."""
    if state.stepping is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is state.stepping:
            return True
        frame = frame.f_back
    state.stepping = None
    return False


def depth_of(code: CodeType) -> int:
    """Count the frames on this thread's stack that execute ``code``."""
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None:
        depth += frame.f_code is code
        frame = frame.f_back
    return depth


def tag(node: Any, context: Context) -> bool:
    """Mark an autograd node as made by a call; False if it already belongs to one."""
    return node.metadata.setdefault(TAG, context) is context


def tagged(node: Any) -> Context | None:
    """Return the context a node was marked with."""
    found = None if node is None else node.metadata.get(TAG)
    return found if isinstance(found, Context) else None


def running_owner() -> Context | None:
    """Return the context of the autograd node that is executing, if one is."""
    return tagged(torch._C._current_autograd_node())
