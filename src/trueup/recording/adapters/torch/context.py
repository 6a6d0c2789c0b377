"""Where execution stands: the enclosing call, its scope and phase, in forward and in backward, on whichever thread.

Forward nesting is per thread. Backward may run on a thread of its own, so nothing of it is kept per thread: each autograd node
carries the `Context` of the call that made it, in the node's own metadata. The scope of a call is the path of the innermost module
that is running.

The wall between Trueup's own work and the training: what fails on our side of it does not get to the other. Every piece of
bookkeeping runs in an `Observing` block. Nothing that executes inside is a call, and an exception there ends the capture instead
of the training, unless the user asked for the contrary (``on_error="stop"``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from trueup.foundation.frameworks.trees import WRAPPERS
from trueup.recording.adapters.torch.buffers import Buffers
from trueup.recording.engine.checkpointing import Run
from trueup.recording.engine.replacing import Replacement
from trueup.recording.engine.scopes import Scopes as BaseScopes
from trueup.recording.engine.session import BaseSession, Threads
from trueup.recording.recorder import Call, Recorder

TAG = "trueup"


@dataclass(slots=True, eq=False)
class Context:
    """A forward call and, once gradients flow through it, its backward call."""

    call: Call
    parent: Context | None
    scope: str
    threads: Threads[ThreadState]
    task: int = -1  # autograd graph task in which `backward` was begun; a second pass through the graph is another call
    backward: Call | None = None
    graph_task: int = -1  # graph task during which the forward call itself ran: not -1 for recomputation

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
    running: list[torch.nn.Module] = field(default_factory=list)  # the modules of `modules`
    stepping: CodeType | None = None  # code of the function around an optimizer's step, while one is under way
    closure: bool = False  # whether that step was given a closure, which computes the loss within it
    stepping_task: int = -1  # graph task during which it began: not -1 for an optimizer that steps in a backward pass
    observed: bool = False  # whether the modes are on in this thread
    runs: list[Run] = field(default_factory=list)  # runs of checkpointed functions under way, first ones and repetitions
    busy: bool = False  # true while Trueup itself works: nothing it executes is a call


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
    """Tell whether an optimizer's step is under way; a step that raised left no trace but its absence from the stack. What its
    closure computes between a model and its backward is the loss and no update."""
    if state.stepping is None or (state.closure and torch.is_grad_enabled() and not state.shared.updating):
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


class Observing:
    """A block of Trueup's own work on one thread, with all function overrides off, ours and those of the user's tensor classes.
    An exception goes to ``failed``, which tells whether the training goes on."""

    __slots__ = ("_before", "_failed", "_plain", "_state", "_what")

    def __init__(self, state: ThreadState, failed: Callable[[Exception, str], bool], what: str) -> None:
        self._state, self._failed, self._what = state, failed, what

    def __enter__(self) -> None:
        self._before, self._state.busy = self._state.busy, True
        self._plain = torch._C.DisableTorchFunction()
        self._plain.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._plain.__exit__(kind, error, trace)
        self._state.busy = self._before
        return isinstance(error, Exception) and self._failed(error, self._what)


# ---------------------------------------------------------------- module paths
WRAPPER_CLASSES = ("DataParallel", "DistributedDataParallel", "OptimizedModule", "FullyShardedDataParallel", "CheckpointWrapper")


class Scopes(BaseScopes):
    """Gives each module of PyTorch its path."""

    def below(self, root: torch.nn.Module, prefix: str) -> Iterable[tuple[str, torch.nn.Module]]:
        for path, module in paths(root):
            yield ".".join(part for part in (prefix, path) if part), module

    def children(self, module: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Module]]:
        return module.named_children()  # type: ignore[no-any-return]

    def is_model(self, root: torch.nn.Module) -> bool:
        return next(root.parameters(), None) is not None

    def inside(self, root: torch.nn.Module) -> torch.nn.Module:
        return wrapped(root)

    def parameters(self) -> dict[int, str]:
        """Return the paths of all parameters that the known modules hold at present, by the parameter's id."""
        found: dict[int, str] = {}
        for module, path in list(self._paths.items()):
            for name, parameter in module._parameters.items():
                if parameter is not None:  # a tied one goes by its first name
                    found.setdefault(id(parameter), f"{path}.{name}" if path else name)
        return found


def wrapped(root: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module that wrappers hold, one inside another."""
    while type(root).__name__ in WRAPPER_CLASSES:
        root = next(m for k, m in root.named_children() if k in WRAPPERS)
    return root


def paths(root: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Module]]:
    """Yield a module and all below it, each with its path; wrappers have the path of what they wrap, and come before it."""
    return ((_without_wrappers(root, path), module) for path, module in root.named_modules())


def _without_wrappers(root: torch.nn.Module, path: str) -> str:
    parts: list[str] = []
    module = root
    for part in path.split(".") if path else ():
        if not (part in WRAPPERS and type(module).__name__ in WRAPPER_CLASSES):
            parts.append(part)
        module = module._modules[part]
    return ".".join(parts)


# ---------------------------------------------------------------- the session
class SessionCore(BaseSession):
    """What the parts of this adapter know of the session that holds them together and stands above them all."""

    threads: Threads[ThreadState]
    scopes: Scopes
    buffers: Buffers
    slots: Any
    invocations: Any
    collectives: Any
    optimizers: Any
    compiling: Any
    forcing: Any
    shadow: Any
    function_mode: Any
    dispatch_mode: Any
    _always: list[Replacement]
    _entrances: list[Replacement]
    follows_functions: bool
    """Whether functions are seen; where modules are all that is, writes past the version counter go unseen."""
    skips_optimizer: bool
    passes_optimizer: bool
    """Whether an optimizer's functions pass by: no gradient flows through them, so operators need no mark of theirs."""
    around_model: Callable[[Callable[..., Any], torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None
    """Runs a module that begins outside any other, where somebody follows those: ``(run, module, args, kwargs)``."""
    enter_model: Callable[[torch.nn.Module], None]
    notice_thread: Callable[[ThreadState], None]
    function_mode_on: Callable[[], AbstractContextManager[Any]]
    pause_functions: Callable[[], None]
    resume_functions: Callable[[], None]

    def observing(self, state: ThreadState, what: str) -> Observing:
        """Return a block for our own work: nothing in it is a call, and its exceptions end the capture, not the training."""
        return Observing(state, self.failed, what)

    def sees(self) -> bool:
        """Tell whether what executes now is to be recorded; a graph that is being traced or exported is no computation."""
        return self.active and torch._C._get_tracing_state() is None and not torch.compiler._is_compiling_flag

    def forces(self, level: str) -> bool:
        """Tell whether calls of a level get a baseline's inputs."""
        return self.forcing is not None and level in self.forcing.levels

    @property
    def replacements(self) -> list[Replacement]:
        """What stands, or may stand, in place of functions of PyTorch that Dynamo traces into."""
        return [*self._always, *self._entrances]
