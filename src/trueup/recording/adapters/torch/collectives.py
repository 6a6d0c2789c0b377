"""Collectives: every communication operator of PyTorch is a call of phase ``collective``, at each level that is recorded.

    module, api   torch.distributed.all_reduce        the function that was called, or
                  c10d::allreduce_                    the operator, where C++ issued it (DDP's reducer)
    aten          c10d::allreduce_, _c10d_functional::all_reduce

They are seen by kernels of our own on the operators of `c10d` and `_c10d_functional` that pass on to the next kernel, so whoever
issues them, and on whichever thread, is seen, and no other operator pays for it. Two dispatch keys are needed: `ADInplaceOrView`
stands above tensor subclasses, whose tensors are then those that the user passed; `BackendSelect` is there in inference mode too.

An operator's schema and arguments say what it reads and writes, and among which ranks; the stack says who asked for it.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import distributed

from trueup.foundation.words.wording import in_runs
from trueup.recording.adapters.torch.buffers import Pending
from trueup.recording.adapters.torch.context import SessionCore, ThreadState, enclosing, running_owner
from trueup.recording.adapters.torch.tensors import FACTS, named_tensors
from trueup.recording.engine.replacing import Around, Replacement
from trueup.recording.recorder import Call

LIBRARIES = ("c10d", "_c10d_functional")
"""Operator libraries of PyTorch that communicate."""

WAIT = "_c10d_functional::wait_tensor"

NAMES: dict[str, list[str]] = {kind: names.split() for kind, names in FACTS["collectives"].items()}
MODULES, PASSED = (tuple(f"{torch.__path__[0]}/{name}" for name in NAMES[kind]) for kind in ("modules", "passed"))

PARTING = 0.05
"""Seconds for which a process that leaves its group lets other threads run. A thread of the backend (gloo's, PyTorch 2.13) still
lets go of the last communication, and of our mode with it, for which it needs the interpreter's lock; the group's destructor holds
that while it waits for the thread: for ever."""

TORCH = f"{torch.__path__[0]}/"
OURS = __file__.rpartition("/")[0]
"""Folder of ours, whose frames stand there too."""


def communicates(op: Any) -> bool:
    """Tell whether an operator of `LIBRARIES` talks to other ranks: it then takes a group."""
    return any(argument.name in ("process_group", "group_name") for argument in op._schema.arguments)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who issued a collective: ``torch.distributed``'s public function, or None; ``native``: autograd, from C++; ``inside``: other
    C++ of PyTorch's own (DistributedDataParallel compares shapes, hands out weights), which waits for it where nobody sees it."""

    function: str | None
    native: bool
    inside: bool

    @property
    def objects(self) -> bool:
        """Whether pickled objects are sent."""
        return self.function is not None and self.function.rpartition(".")[2] in NAMES["objects"]


@dataclass(slots=True)
class Communication:
    """One execution of a communication operator."""

    inputs: list[tuple[str, torch.Tensor]]
    outputs: list[tuple[str, torch.Tensor]]
    scratch: list[tuple[str, torch.Tensor]]
    """Inputs that it may write to without a meaning: what a rank that is not the root of a reduction ends up with."""
    group: Any
    """The `ProcessGroup`; None where it is not known."""
    sync: bool
    arguments: dict[str, Any]


def read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Communication:
    """Sort the arguments of a communication operator: those that it reads, those that it writes, and the rest."""
    schema = op._schema
    name = schema.name.partition("::")[2]
    given = {a.name: args[k] if k < len(args) else kwargs.get(a.name, a.default_value) for k, a in enumerate(schema.arguments)}
    group = _group(given)
    rank = group.rank() if group is not None else -1
    found = Communication([], [], [], group, given.get("async_op") is False, {})
    root = given.get("root_rank")
    for argument, value in given.items():
        if argument in NAMES["inputs"] or (argument in NAMES["in_place"] and _is_read(name, root, rank)):
            found.inputs += tensors("input", value)
        if argument in NAMES["outputs"] or (argument in NAMES["in_place"] and _is_written(name, root, rank)):
            found.outputs += tensors("output", value)
    if name in NAMES["to_root"] and root != rank:
        found.scratch = found.inputs
    found.arguments = describe(given, group)
    return found


def _is_read(name: str, root: int | None, rank: int) -> bool:
    if name in NAMES["from_root"]:
        return root == rank
    return name not in NAMES["receives"] + NAMES["nothing"]


def _is_written(name: str, root: int | None, rank: int) -> bool:
    if name in NAMES["to_root"] + NAMES["from_root"]:
        return (root == rank) == (name in NAMES["to_root"])
    return name not in NAMES["sends"] + NAMES["nothing"]


def tensors(prefix: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """Name the tensors of an argument; a list of one list is that list."""
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    return list(named_tensors(prefix, value))


def _group(given: dict[str, Any]) -> Any:
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        try:
            return torch._C._distributed_c10d._resolve_process_group(group)
        except RuntimeError:
            return None
    return distributed.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


def describe(given: dict[str, Any], group: Any) -> dict[str, Any]:
    """Return the arguments of a collective that are no tensors; ranks as global ones."""
    said: dict[str, Any] = {name: given[name] for name in NAMES["scalars"] if given.get(name) is not None}
    if (reduction := given.get("reduce_op")) is not None:
        said["reduce_op"] = reduction.upper() if isinstance(reduction, str) else _reduction(reduction)
    if "async_op" in given:
        said["async_op"] = bool(given["async_op"])
    if group is None:
        return said
    ranks = _ranks(group)
    if ranks is not None:
        said["ranks"] = in_runs(ranks)
        for name in ("src", "dst"):
            if name in said:
                said[name] = ranks[said[name]]
        if (root := given.get("root_rank")) is not None:
            said["root"] = ranks[root]
    said["group"], said["group_desc"] = group.group_name, group.group_desc
    return said


def _reduction(boxed: Any) -> str | None:
    try:
        value = boxed.op()
    except (RuntimeError, AttributeError):  # PyTorch before 2.9 boxed it without methods
        return None
    return next((name for name, member in distributed.ReduceOp.RedOpType.__members__.items() if int(member) == value), None)


def _ranks(group: Any) -> list[int] | None:
    """Return the global ranks of a group in its own order, None for one that `torch.distributed` does not know."""
    try:
        return list(distributed.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return None


def caller() -> Caller:
    """Find who issued the operator that is executing, from the stack."""
    frame: FrameType | None = sys._getframe(2)
    function = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename in MODULES:
            if not code.co_name.startswith("_") and code.co_name != "batch_isend_irecv":  # what it calls says more
                function = code.co_name
        elif not code.co_filename.startswith(PASSED) and not code.co_filename.startswith(OURS):
            break
        frame = frame.f_back
    native = function is None and (frame is None or frame.f_code.co_name == "_engine_run_backward")
    inside = function is None and not native and frame is not None and frame.f_code.co_filename.startswith(TORCH)
    return Caller(None if function is None else f"torch.distributed.{function}", native, inside)


KEYS = ("ADInplaceOrView", "BackendSelect")

UNFINISHED = "a collective was still under way when the capture ended, and nobody had waited for it: its output was not read"
SPOILED = "the output of an asynchronous collective was written again before it could be read: it has no statistics"


class _Local(threading.local):
    """The communication operator that is executing on this thread."""

    op: Any = None
    works: list[Any] | None = None


class Collectives:
    """Sees and records the collectives of a session."""

    def __init__(self, session: SessionCore) -> None:
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
            Around(c10d, "_update_default_pg", self._joining_or_leaving),
            Around(distributed.Work, "wait", self._waiting),
            Around(distributed.ProcessGroup, "_end_coalescing", self._coalescing),
            *(Around(owner, name, self._of_objects) for name in NAMES["objects"] for owner in (c10d, distributed)),
        ]
        for replacement in self._replacements:
            replacement.install()
        if distributed.is_initialized():
            self._register()

    def remove(self) -> None:
        for replacement in self._replacements:
            replacement.remove()
        for library in self._libraries:
            library._destroy()
        self._replacements, self._libraries = [], []

    def _joining_or_leaving(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._replacements and distributed.is_initialized():
            self._register()
        elif self._replacements:
            time.sleep(PARTING)
        return result

    def _register(self) -> None:
        if self._libraries:
            return
        for namespace in LIBRARIES:
            library = torch.library.Library(namespace, "IMPL")
            self._libraries.append(library)
            for name in torch._C._dispatch_get_all_op_names():
                if name.startswith(f"{namespace}::"):
                    packet, _, overload = name.partition("::")[2].partition(".")
                    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
                    for key in KEYS if communicates(op) else ():
                        library.impl(op, self._kernel(op, key), key, with_keyset=True)
            if namespace == WAIT.partition("::")[0]:
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
        said = caller()
        found = read(op, args, kwargs)
        if said.objects:
            found.inputs, found.outputs = [], []
        calls = self._calls(op._schema.name, said.function or op._schema.name, state)
        session = self._session
        text = json.dumps(found.arguments, sort_keys=True)
        for _, tensor in found.inputs:
            session.buffers.initialised(tensor)  # DDP fills its buckets from C++, where level api sees nothing
        for call in calls:
            if call.recorded:
                session.slots.inputs(call, found.inputs)
                session.recorder.value(call, text)
        task = torch._C._current_graph_task_id() if said.native else -1
        return _Execution(calls, found, task, inside=said.inside, functional=not op._schema.name.startswith("c10d::"))

    def _of_objects(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the exchange of pickled objects one call without tensors, instead of the many that it is made of."""
        session = self._session
        state = session.threads.state
        if state.busy or not session.sees() or not distributed.is_initialized():
            return original(*args, **kwargs)
        with session.observing(state, original.__name__):
            function = f"torch.distributed.{original.__name__}"
            group = kwargs.get("group") or next((a for a in args if isinstance(a, distributed.ProcessGroup)), None)
            text = json.dumps(describe({}, group or distributed.group.WORLD), sort_keys=True)
            for call in self._calls(function, function, state):
                if call.recorded:
                    session.recorder.value(call, text)
        with _Unseen(state):
            return original(*args, **kwargs)

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
        """Record the tensors that are being written."""
        session, found = self._session, execution.communication
        outputs = found.outputs
        own = _works(result)
        if execution.functional and not outputs:
            outputs = tensors("output", result)  # it returns what it writes
        if not outputs and not found.scratch:
            return
        pending = Pending(execution.calls, outputs, found.scratch, sync=found.sync, task=execution.task)
        pending.works, pending.step = own or works, session.recorder.step
        for call in execution.calls:
            session.slots.produced(call, outputs)
        self._in_flight.add(pending)
        if execution.inside and all(tensor.device.type == "cpu" for _, tensor in outputs):
            with _Unseen(session.threads.state):
                for work in pending.works:
                    work.wait()
            self._complete(pending, waited=True)

    # ---------------------------------------------------------------- completion
    def _wait_kernel(self, op: Any) -> Callable[..., Any]:
        below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, KEYS[-1]))

        def kernel(keyset: Any, tensor: torch.Tensor) -> Any:
            return self._waited(lambda: op.redispatch(keyset & below, tensor), lambda: self._in_flight.covering(tensor))

        return kernel

    def _waiting(self, original: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
        return self._waited(lambda: original(work, *args, **kwargs), lambda: self._in_flight.of_work(work))

    def _waited(self, wait: Callable[[], Any], ended: Callable[[], list[Pending]]) -> Any:
        with _Unseen(self._session.threads.state):
            result = wait()
        if self._in_flight:
            with self._session.observing(self._session.threads.state, "a collective"):
                for pending in ended():
                    self._complete(pending, waited=True)
        return result

    def _coalescing(self, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        """Give the operators that were issued as one their common `Work`: alone they have none."""
        work = original(group, *args, **kwargs)
        for pending in list(self._in_flight.pending.values()):
            if work is not None and not pending.works:
                pending.works = [work]
        return work

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
    inside: bool  # whether C++ issued it that waits right away, and may write its results over before anybody reads them
    functional: bool  # whether it returns what it writes, and no `Work`


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
