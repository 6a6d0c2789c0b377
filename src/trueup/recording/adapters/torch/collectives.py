"""Collectives: every communication operator of PyTorch is a call of phase ``collective``, at each level that is recorded.

    module, api   torch.distributed.all_reduce        the function that was called, or
                  c10d::allreduce_                    the operator, where C++ issued it (DDP's reducer)
    aten          c10d::allreduce_, _c10d_functional::all_reduce

They are seen by kernels of our own on the operators of `c10d` and `_c10d_functional` that pass on to the next kernel, so whoever
issues them, and on whichever thread, is seen, and no other operator pays for it. Two dispatch keys are needed: `ADInplaceOrView`
stands above tensor subclasses, whose tensors are then those that the user passed; `BackendSelect` is there in inference mode too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from trueup.recording.adapters.torch import communication
from trueup.recording.adapters.torch.communication import Communication
from trueup.recording.adapters.torch.context import ThreadState, enclosing, running_owner
from trueup.recording.adapters.torch.in_flight import Pending
from trueup.recording.recorder import Call
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session

KEYS = ("ADInplaceOrView", "BackendSelect")

UNFINISHED = (
    "a collective was still under way when the capture ended, and nobody had waited for it: its output was not read"
)
SPOILED = "the output of an asynchronous collective was written again before it could be read: it has no statistics"


class _Local(threading.local):
    """The communication operator that is executing on this thread."""

    op: Any = None
    works: list[Any] | None = None


class Collectives:
    """Sees and records the collectives of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._in_flight = session.buffers.in_flight
        self._local = _Local()
        self.refused: str | None = None
        """Why no collective may be issued now: this process executes something that the others do not."""
        self._libraries: list[Any] = []
        self._replacements: list[Replacement] = []

    # ---------------------------------------------------------------- life
    def install(self) -> None:
        """See collectives from now on, or from the moment there is a process group."""
        if not distributed.is_available():
            return
        # `_update_default_pg` is what every way of initialising goes through (PyTorch 2.1 to 2.13).
        c10d: Any = distributed.distributed_c10d
        self._replacements = [
            Replacement(c10d, "_update_default_pg", self._joining),
            Replacement(distributed.Work, "wait", self._waiting),
            Replacement(distributed.ProcessGroup, "_end_coalescing", self._coalescing),
            *(Replacement(owner, name, self._of_objects) for name in communication.OBJECTS for owner in (c10d, distributed)),
        ]
        for replacement in self._replacements:
            replacement.install()
        if distributed.is_initialized():
            self._register()

    def remove(self) -> None:
        """Stop to see them."""
        for replacement in self._replacements:
            replacement.remove()
        for library in self._libraries:
            library._destroy()
        self._replacements, self._libraries = [], []

    def _joining(self, original: Any) -> Any:
        @functools.wraps(original)
        def set_group(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._replacements and distributed.is_initialized():
                self._register()
            return result

        return set_group

    def _register(self) -> None:
        if self._libraries:
            return
        for namespace in communication.LIBRARIES:
            library = torch.library.Library(namespace, "IMPL")
            self._libraries.append(library)
            for name in torch._C._dispatch_get_all_op_names():
                if name.startswith(f"{namespace}::"):
                    packet, _, overload = name.partition("::")[2].partition(".")
                    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
                    for key in KEYS if communication.communicates(op) else ():
                        library.impl(op, self._kernel(op, key), key, with_keyset=True)
            if namespace == communication.WAIT.partition("::")[0]:
                op = torch.ops._c10d_functional.wait_tensor.default
                library.impl(op, self._wait_kernel(op), KEYS[-1], with_keyset=True)

    # ---------------------------------------------------------------- the operators
    def _kernel(self, op: Any, key: str) -> Callable[..., Any]:
        below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
        local = self._local

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            proceed = functools.partial(op.redispatch, keyset & below)
            if local.op is None:
                return self._run(op, proceed, args, kwargs)
            result = proceed(*args, **kwargs)
            if local.works is not None and local.op is not op:  # what a functional collective is made of
                local.works += _works(result)
            return result

        return kernel

    def _run(self, op: Any, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session, local = self._session, self._local
        if self.refused is not None:
            raise RuntimeError(self.refused)
        state = session.threads.state
        if state.busy or not session.sees():
            return proceed(*args, **kwargs)
        execution: _Execution | None = None
        with session.observing(state, op._schema.name):
            execution = self._begin(op, state, args, kwargs)
        if execution is None:  # the capture has just failed
            return proceed(*args, **kwargs)
        local.op, local.works = op, []
        try:
            result = proceed(*args, **kwargs)
            works = local.works
        finally:
            local.op = local.works = None
        if session.active:
            with session.observing(state, op._schema.name):
                self._launched(execution, result, works)
        return result

    def _begin(self, op: Any, state: ThreadState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Execution:
        said = communication.caller()
        found = communication.read(op, args, kwargs)
        if said.objects:
            found.inputs, found.outputs = [], []
        calls = self._calls(op._schema.name, said.function or op._schema.name, state)
        session = self._session
        text = communication.encode(found.arguments)
        for _, tensor in found.inputs:
            session.buffers.initialised(tensor)  # DDP fills its buckets from C++, where level api sees nothing
        for call in calls:
            if call.recorded:
                session.slots.inputs(call, found.inputs)
                session.recorder.value(call, text)
        task = torch._C._current_graph_task_id() if said.native else -1
        return _Execution(calls, found, task, functional=not op._schema.name.startswith("c10d::"))

    def _of_objects(self, original: Any) -> Any:
        """Make the exchange of pickled objects one call without tensors, instead of the many that it is made of."""

        @functools.wraps(original)
        def exchange(*args: Any, **kwargs: Any) -> Any:
            session = self._session
            state = session.threads.state
            if state.busy or not session.sees() or not distributed.is_initialized():
                return original(*args, **kwargs)
            with session.observing(state, original.__name__):
                function = f"torch.distributed.{original.__name__}"
                group = kwargs.get("group") or next((a for a in args if isinstance(a, distributed.ProcessGroup)), None)
                text = communication.encode(communication.describe({}, group or distributed.group.WORLD))
                for call in self._calls(function, function, state):
                    if call.recorded:
                        session.recorder.value(call, text)
            with _Unseen(state):
                return original(*args, **kwargs)

        return exchange

    def _calls(self, op: str, function: str, state: ThreadState) -> list[Call]:
        """Begin the call at each level recorded, coarse to fine, one inside the other."""
        session = self._session
        recorder = session.recorder
        parent, scope = _place(state, recorder)
        site = session.site(state)
        calls: list[Call] = []
        for level in ("module", "api", "aten"):
            if session.records(level):
                name = op if level == "aten" else function
                calls.append(recorder.begin(level, "collective", scope, name, parent=parent, site=site))
                parent = calls[-1].seq
        return calls

    def _launched(self, execution: _Execution, result: Any, works: list[Any]) -> None:
        """Take note of what is being written."""
        session, found = self._session, execution.communication
        outputs = found.outputs
        own = _works(result)
        if execution.functional and not outputs:
            outputs = communication.tensors("output", result)  # it returns what it writes
        if not outputs and not found.scratch:
            return
        pending = Pending(execution.calls, outputs, found.scratch, sync=found.sync, task=execution.task)
        pending.works, pending.step = own or works, session.recorder.step
        for call in execution.calls:
            session.slots.produced(call, outputs)
        self._in_flight.add(pending)

    # ---------------------------------------------------------------- completion
    def _wait_kernel(self, op: Any) -> Callable[..., Any]:
        below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, KEYS[-1]))

        def kernel(keyset: Any, tensor: torch.Tensor) -> Any:
            with _Unseen(self._session.threads.state):
                result = op.redispatch(keyset & below, tensor)
            if self._in_flight:
                with self._observing("a collective"):
                    for pending in self._in_flight.covering(tensor):
                        self._complete(pending, waited=True)
            return result

        return kernel

    def _waiting(self, original: Any) -> Any:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            with _Unseen(self._session.threads.state):
                result = original(work, *args, **kwargs)
            if self._in_flight:
                with self._observing("a collective"):
                    for pending in self._in_flight.of_work(work):
                        self._complete(pending, waited=True)
            return result

        return wait

    def _coalescing(self, original: Any) -> Any:
        """Give the operators that were issued as one their common `Work`: alone they have none."""

        def end(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            for pending in list(self._in_flight.pending.values()):
                if work is not None and not pending.works:
                    pending.works = [work]
            return work

        return end

    def settle(self) -> None:
        """Record the outputs of all collectives that are complete."""
        for pending in list(self._in_flight.pending.values()):
            if pending.complete:
                self._complete(pending)

    def defer(self, tensor: torch.Tensor, record: Callable[[bool], None]) -> bool:
        """Record a slot later if its tensor is being written; False: it may be read now."""
        for pending in self._in_flight.covering(tensor):
            if pending.complete:
                self._complete(pending)
            else:
                pending.deferred.append(record)
                return True
        return False

    def end(self) -> None:
        """Record what is complete and give up the rest, when the capture ends."""
        self.settle()
        if self._in_flight:
            self._session.recorder.note(UNFINISHED)
            self._in_flight.pending.clear()

    def _complete(self, pending: Pending, *, waited: bool = False) -> None:
        """Record the outputs; ``waited``: right after the training waited for them, which may itself have written them."""
        if not self._in_flight.drop(pending):
            return
        session = self._session
        if not waited:
            pending.look()
        if pending.spoiled:
            session.recorder.note(SPOILED)
        else:
            for _, tensor in [*pending.outputs, *pending.scratch]:
                session.buffers.written(tensor)
            for call in pending.calls:
                if call.recorded:
                    session.slots.outputs(call, pending.outputs, step=pending.step)
        for record in pending.deferred:
            record(not pending.spoiled)

    def _observing(self, what: str) -> Any:
        return self._session.observing(self._session.threads.state, what)


class _Unseen:
    """A block in which what executes is part of a collective and no call of its own (gloo copies results when one waits)."""

    __slots__ = ("_before", "_state")

    def __init__(self, state: ThreadState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._before, self._state.busy = self._state.busy, True

    def __exit__(self, *_: object) -> None:
        self._state.busy = self._before


@dataclass(frozen=True, slots=True)
class _Execution:
    """A communication operator between its begin and its launch."""

    calls: list[Call]
    communication: Communication
    task: int
    functional: bool
    """Whether it returns what it writes, and no `Work`."""


def _place(state: ThreadState, recorder: Any) -> tuple[int | None, str]:
    """Return the call that a collective runs in, and its scope."""
    above = enclosing(state)
    module = state.modules[-1] if state.modules else None
    if above is not None:
        return above.call.seq, above.scope
    if module is not None and module.graph_task == torch._C._current_graph_task_id():
        return module.call.seq, module.scope
    owner = running_owner()
    return (None, "") if owner is None else (owner.backward_call(recorder).seq, owner.scope)


def _works(result: Any) -> list[Any]:
    """Return the `Work` of an operator's result as the very object that Python will be given for it."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    boxed = [part for part in parts if isinstance(part, torch.ScriptObject)]
    return [work for part in boxed if (work := distributed.Work.unbox(part)) is not None]
