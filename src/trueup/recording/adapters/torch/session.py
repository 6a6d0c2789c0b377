"""A running capture of PyTorch: the modes, the module calls, the optimizer hooks, and what they all record through.

What a call's tensors become: rows with statistics and producers.

The compiled short way from a tensor to a row (native/), for plain tensors in host memory. It does what `Slots` and `Buffers` do,
on the same objects, and hands to them whatever is not plain; where it was not built they do everything. It was measured to save
two thirds of what a row costs the training.

Level `module`: each call of an `nn.Module`, with its parameters, and its backward.

`nn.Module.__call__` is wrapped for the time of the capture. Global module hooks would not see keyword arguments before the
call, hooks on each module would stay in the user's model when it is pickled, and full backward hooks change the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trueup.foundation import kernels
from trueup.recording.adapters.torch import models, modes
from trueup.recording.adapters.torch.buffers import Buffers, Storage, in_host_memory, resolve
from trueup.recording.adapters.torch.collectives import Collectives
from trueup.recording.adapters.torch.compiling import Compiling, FollowingMode
from trueup.recording.adapters.torch.context import (
    Context,
    Observing,
    Scopes,
    SessionCore,
    Shared,
    ThreadState,
    phase_of,
    running_owner,
)
from trueup.recording.adapters.torch.environment import describe_run, rank_and_world, schemas, seeds
from trueup.recording.adapters.torch.functions import DispatchMode, FunctionMode
from trueup.recording.adapters.torch.gradients import Edges, GradientHook, Gradients, hook_sums, next_node, watch
from trueup.recording.adapters.torch.invocations import Invocations, autocast
from trueup.recording.adapters.torch.modes import put_on, take_off
from trueup.recording.adapters.torch.optimizers import Optimizers
from trueup.recording.adapters.torch.replacing import entrances
from trueup.recording.adapters.torch.tensors import (
    LAYOUTS,
    NamedTensors,
    describe,
    describe_values,
    encode_values,
    is_plain,
    layout_of,
    local,
    named_tensors,
    part_of,
    parts,
    quick_module,
)
from trueup.recording.engine import session as engine
from trueup.recording.engine.checkpointing import link
from trueup.recording.engine.policies import AppliedPolicy, applied
from trueup.recording.engine.replacing import Replacement
from trueup.recording.engine.session import RUN_MODULE, Capture, Running, Signatures, Threads, execute_module, running_of
from trueup.recording.engine.settings import Delivered
from trueup.recording.recorder import Call, CaptureOptions, Slot
from trueup.recording.recorder.arguments import MAX_VALUES
from trueup.recording.recorder.recorder import ARGUMENTS
from trueup.recording.registry import adapter

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.forcing import Forcing
    from trueup.recording.adapters.torch.shadowing import ShadowMode


def module_calls(session: SessionCore) -> Replacement:
    """Return the replacement of `nn.Module.__call__` that makes each call of a module one of the capture."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            state = session.threads.state
            if not state.modules and not state.busy:
                session.enter_model(module)
                if session.around_model is not None and session.sees():
                    return session.around_model(partial(run, state, original), module, args, kwargs)
            if not session.active or state.busy or not session.sees():
                return original(module, *args, **kwargs)
            return run(state, original, module, args, kwargs)

        return call

    short = None if session.forces("module") else session.slots.short
    run: Callable[..., Any] = partial(_run, session) if short is None else short.module
    if short is not None:
        short.teach(
            run_module=RUN_MODULE, execute_module=execute_module, module_at_length=partial(_run, session),
            begin_module=partial(_begin, session), parameters_of=lambda module: _own("param", _parameters(module)),
            buffers_of=lambda module: _own("output.buffer", _buffers(module)),
        )  # fmt: skip

    return Replacement(torch.nn.Module, "__call__", make)


def _run(
    session: SessionCore, state: ThreadState, original: Callable[..., Any], module: torch.nn.Module,
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    called = module._orig_mod if type(module).__name__ == "OptimizedModule" else module  # torch.compile's wrapper is no module
    return session.run_module(state, original, module, args, kwargs, _before, _after, called)


def _before(
    session: SessionCore, state: ThreadState, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Context, Edges | None]:
    context = _begin(session, state, module)
    call = context.call
    if not session.records("module"):
        return context, None
    inputs = named_tensors("input", args, kwargs)
    if session.forcing is not None and session.forces("module"):
        session.forcing.give(call, inputs + _own("param", _parameters(module)))
    if call.recorded:
        session.slots.inputs(call, inputs)
        session.slots.inputs(call, _own("param", _parameters(module)))
        if (values := describe_values(args, kwargs)) is not None:
            session.recorder.value(call, values)
    return context, Edges(inputs) if torch.is_grad_enabled() else None


def _after(session: SessionCore, module: torch.nn.Module, context: Context, edges: Edges | None, result: Any) -> None:
    outputs = named_tensors("output", result)
    session.slots.module_outputs(context.call, outputs)
    if context.call.recorded:
        session.slots.outputs(context.call, outputs)
        session.slots.outputs(context.call, _own("output.buffer", _buffers(module)))
    if session.forcing is not None and session.forces("module"):
        session.forcing.watch(context.call, outputs)
    if edges is not None:
        watch(context, edges, outputs, session.slots, own=False)


def _own(prefix: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> NamedTensors:
    """Name the parameters or buffers of a module, those left out that have no shape before its first call (lazy modules)."""
    return [(f"{prefix}.{name}", tensor) for name, tensor in tensors if not is_lazy(tensor)]


def _parameters(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Return a module's own parameters, faster than ``named_parameters(recurse=False)``, which looks for duplicates."""
    held = module._parameters
    if type(module).named_parameters is not torch.nn.Module.named_parameters or len(held) > len({*map(id, held.values())}):
        return module.named_parameters(recurse=False)  # type: ignore[no-any-return]
    return [(name, tensor) for name, tensor in held.items() if tensor is not None]


def _buffers(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Return a module's own buffers; most modules have none."""
    if type(module).named_buffers is torch.nn.Module.named_buffers and not module._buffers:
        return ()
    return module.named_buffers(recurse=False)  # type: ignore[no-any-return]


def _begin(session: SessionCore, state: ThreadState, module: torch.nn.Module) -> Context:
    parent = state.modules[-1] if state.modules else None
    scope = session.scopes.path(module, state.running[-1] if state.running else None)
    session.notice_thread(state)
    task = torch._C._current_graph_task_id()
    if state.contexts:
        phase = state.contexts[-1].call.phase
    elif task == -1:
        phase = "forward"
    else:  # with gradients on, a module that runs inside a backward pass is re-run by activation checkpointing
        phase = "recompute" if torch.is_grad_enabled() else phase_of(state)
    call = session.recorder.begin(
        "module", phase, scope, type(module).__name__,
        parent=None if parent is None else parent.call.seq,
        site=session.site(state),
    )  # fmt: skip
    if state.runs:
        link(state.runs, call)
    return Context(call, parent, scope, session.threads, graph_task=task)


def quick(session: SessionCore, devices: dict[str, None], producing: str, slot: Callable[..., None]) -> Any | None:
    """Return the short way into a session's recorder, or None without the compiled parts; the session's `observing` and
    `Buffers.storage` become the short ones. ``producing`` is the level whose calls are the producers of what functions and
    modules are given, ``slot`` the long way of a row: ``(call, name, tensor, storage, producer, step)``."""
    compiled, buffers, recorder = quick_module(), session.buffers, session.recorder
    if compiled is None:
        return None
    sites = recorder.sites
    short = compiled.Quick(
        session=session, threads=session.threads, recorder=recorder, buffers=buffers, slot_at_length=slot,
        storage_at_length=buffers.storage, in_flight=buffers.in_flight.pending, storages=buffers.storages, devices=devices,
        layouts=LAYOUTS, tensor=torch.Tensor, parameter=torch.nn.Parameter,
        transforms=torch._C._functorch.maybe_current_level, count_threads=torch.get_num_threads,
        graph_task=torch._C._current_graph_task_id, no_overrides=torch._C.DisableTorchFunction, entrance=kernels.native().entrance,
        detail=session.options.detail, sees_writes=buffers.sees_writes, levels=tuple(session.options.levels), producing=producing,
        kinds=recorder._kinds, seqs=recorder._seqs, context_type=Context, no_task=-1, link=link,
        sites=sites, codes=sites._codes, known_sites=sites._known, scopes=session.scopes,
        values={}, most_values=MAX_VALUES, describe_values=encode_values, arguments=ARGUMENTS, size_type=torch.Size,
        simple_types=frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format}),
        tracing=torch._C._get_tracing_state, compiler=torch.compiler,
        phase_of=phase_of, running_owner=running_owner, grad_enabled=torch.is_grad_enabled, next_node=next_node,
        function_modes=torch._C._len_torch_function_stack, output_buffer="output.buffer", own_names={}, usual={},
        is_usual=_is_usual,
        invocation=session.invocations, invocations={}, autocast=autocast, generator_state=torch.default_generator.get_state,
        hook_sums=lambda context, boundary: hook_sums(context, boundary, session.slots),
    )  # fmt: skip
    buffers.storage = short.storage  # type: ignore[method-assign]
    session.observing = short.observing  # type: ignore[method-assign]
    return short


def _is_usual(kind: type) -> bool:
    """Tell whether a class of modules names what it holds as `torch.nn.Module` does."""
    module = torch.nn.Module
    return all(getattr(kind, name) is getattr(module, name) for name in ("named_parameters", "named_buffers"))


class Slots:
    """Records the tensors of calls, and which call produced which storage."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._recorder, self._buffers = session.recorder, session.buffers
        levels = session.options.levels
        self._has_aten, self._has_api = "aten" in levels, "api" in levels
        self._producing = "api" if self._has_api else "aten" if self._has_aten else "module"
        """Level whose calls are the producers of api and module inputs: the finest there is, short of aten beside api."""
        self.devices: dict[str, None] = {}
        self.short = quick(session, self.devices, self._producing, self._at_length)
        """The short way, in C, for functions, operators and modules to learn; None where it was not built."""
        self._slot = self._at_length if self.short is None else self.short.slot

    @property
    def active(self) -> bool:
        """Whether anything is recorded at present."""
        return self._session.active

    def observing(self, context: Context) -> Observing:
        """Return a block of bookkeeping for the backward of a call, on whichever thread autograd executes it."""
        session = self._session
        return session.observing(session.threads.state, context.call.kind.op)

    def inputs(self, call: Call, tensors: NamedTensors) -> None:
        """Record inputs, with the call that produced each."""
        level = "aten" if call.kind.level == "aten" else self._producing
        if self.short is not None:
            self.short.inputs(call, tensors, level)
            return
        for slot, tensor in tensors:
            storage = self._buffers.storage(tensor)
            self._slot(call, slot, tensor, storage, None if storage is None else storage.producer(level))

    def outputs(self, call: Call, tensors: NamedTensors, inputs: NamedTensors | tuple[()] = (), step: int | None = None) -> None:
        """Record outputs, but for views of ``inputs`` whose memory nobody has written yet; ``step``: if not the present one."""
        if self.short is not None:
            self.short.outputs(call, tensors, inputs, step)
            return
        storage_of = self._buffers.storage
        for slot, tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and storage.uninitialised and any(storage is storage_of(t) for _, t in inputs):
                continue
            self._slot(call, slot, tensor, storage, None, step)

    def gradients(self, context: Context, gradients: Gradients, task: int) -> None:
        """Record gradients that autograd delivers to or from a call."""
        call = context.backward_call(self._recorder, task)
        for slot, tensor in gradients if call.kind.recorded else ():
            if tensor is None:
                continue
            storage = self._buffers.storage(tensor)
            if storage is not None:
                storage.uninitialised = False
            if slot.startswith("grad_output"):
                self._slot(call, slot, tensor, storage, None if storage is None else storage.producer(call.kind.level))
            else:
                self._slot(call, slot, tensor, storage, None)
                if storage is not None:
                    storage.producers[call.kind.level] = (call.seq, slot)
                elif not is_plain(tensor):
                    self._buffers.produced(tensor, call.kind.level, call, slot)

    def hook(self, context: Context, slots: list[tuple[int, str]], *, received: bool) -> Callable[..., None]:
        """Return the hook for autograd to call at a node: it records gradients, by position, under the names of their slots.
        ``received``: they come to the call; else they are its results."""
        return GradientHook(context, slots, self) if self.short is None else self.short.hook(context, slots, received)

    def loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the tensor on which `backward()` is called: the loss curve, kept whatever the filters say."""
        loss = args[0] if args else kwargs.get("self")
        if not isinstance(loss, torch.Tensor):
            return
        self._session.loss("torch.Tensor.backward", loss)

    def produced(self, call: Call, tensors: NamedTensors) -> None:
        """Note that a call computed these tensors."""
        if self.short is not None and call.kind.recorded:
            self.short.produced(call, tensors, call.kind.level)
            return
        for slot, tensor in tensors:
            self._buffers.produced(tensor, call.kind.level, call, slot)

    def results(self, call: Call, inputs: NamedTensors, outputs: NamedTensors) -> None:
        """Record the results of an api call: views, new buffers and, without the aten level, buffers that it wrote in place."""
        if not outputs:
            return
        follows, recorded, storage_of = self._has_api or not self._has_aten, call.kind.recorded, self._buffers.storage
        before = [storage_of(t) for _, t in inputs]
        for slot, tensor in outputs:
            storage = storage_of(tensor)
            known = storage is not None and storage in before
            if follows:
                in_place = any(tensor is t for _, t in inputs)
                if in_place and not self._has_aten:
                    self._buffers.written(tensor)
                if in_place or not known:
                    self._buffers.produced(tensor, "api", call, slot)
            if recorded and not (known and storage is not None and storage.uninitialised):  # a view of what nobody has written
                self._slot(call, slot, tensor, storage, None)

    def module_outputs(self, call: Call, outputs: NamedTensors) -> None:
        """Note what a module returned; where modules are all that is recorded, they are the producers."""
        for slot, tensor in outputs:
            self._buffers.initialised(tensor)
            if self._producing == "module":
                self._buffers.produced(tensor, "module", call, slot)

    def _at_length(
        self, call: Call, name: str, tensor: torch.Tensor, storage: Storage | None, producer: tuple[int, str] | None,
        step: int | None = None, *, late: bool = False, readable: bool = True,
    ) -> None:  # fmt: skip
        if self._buffers.in_flight and not late:  # of a collective under way: once it is complete
            now = self._recorder.step if step is None else step
            if self._session.collectives.defer(
                local(tensor), lambda can: self._at_length(call, name, tensor, storage, producer, now, late=True, readable=can)
            ):
                return
        if modes.inside() and (whole := modes.below(tensor)) is not tensor:
            tensor, storage = whole, None  # all samples of a vmap: the tensor that exists, and that is measured
        layout = layout_of(tensor)
        part = None
        if layout is None and (inner := local(tensor)) is not tensor:
            part, tensor, layout = part_of(tensor), inner, layout_of(inner)
        slot = Slot(name, describe(tensor)) if layout is None else layout.slot(name)
        described = slot.tensor
        if described is not None and described.device not in self.devices:
            self.devices[described.device] = None
        stats = self._buffers.statistics(tensor, layout, storage) if readable else None
        self._recorder.add(call, slot, part, producer, stats, step)
        if stats is None and readable and not is_plain(tensor):
            self._parts(call, name, tensor)

    def _parts(self, call: Call, name: str, tensor: torch.Tensor) -> None:
        """Record the arrays of a tensor that is no plain one, each as a slot below the tensor's own."""
        level = "aten" if call.kind.level == "aten" else self._producing
        received = name.startswith(("input", "grad_output", "param"))
        for below, part in parts(name, tensor):
            storage = self._buffers.storage(part)
            self._slot(call, below, part, storage, storage.producer(level) if received and storage is not None else None)


TORCH = str(Path(torch.__file__).parent)


class Session(SessionCore):
    """Everything the modes share. One at a time in a process."""

    adapter = adapter("torch")
    nothing_ran = "no PyTorch call was executed while the capture was on"
    optimizers: Optimizers

    def __init__(self, directory: Path, options: CaptureOptions, root: dict[str, Any], scopes: Scopes | None = None) -> None:
        super().__init__(
            directory, options, root, scopes or Scopes(), facts=partial(models.optimizer_facts, waits=False),
            modules=models.settings, optimizers=torch.optim.Optimizer, loaders=(torch.utils.data.DataLoader,), internal=(TORCH,),
            resolve=resolve, seeds=seeds, autocast=models.autocast,
        )  # fmt: skip
        self.signatures = Signatures("torch", schemas)
        if self.settings is not None:
            self.settings.delivered = Delivered(
                (_BaseDataLoaderIter,), in_host_memory, lambda: torch.is_grad_enabled() and rank_and_world()[1] > 1
            )
        self.threads = Threads(partial(ThreadState, Shared()))
        self.buffers = Buffers(self.recorder)
        self.invocations = Invocations(self) if options.detail == "tensor" else None
        self.slots = Slots(self)
        self.collectives = Collectives(self)
        self.forcing: Forcing | None = None
        if options.inputs_from is not None:
            from trueup.recording.adapters.torch.forcing import Forcing

            self.forcing = Forcing(self, options.inputs_from, options.force)
        self.function_mode = FunctionMode(self)
        self.shadow: ShadowMode | None = None
        if options.shadow is not None:
            from trueup.recording.adapters.torch.shadowing import ShadowMode

            self.shadow = ShadowMode(self)
        self.dispatch_mode = self.shadow or (DispatchMode if options.compile == "off" else FollowingMode)(self)
        self._modes = self._modes_for(options.levels)
        self.follows_functions = bool(self._modes)
        self.optimizers = Optimizers(self)
        self._always = [module_calls(self), *self.optimizers.replacements()]
        self._entrances = entrances(self, functions=bool(self._modes))
        self.compiling = Compiling(self)
        self._on = self._paused = False
        self.policies: list[AppliedPolicy] = []  # policies that were at work while it ran
        self.skips_optimizer = "optimizer" not in options.phases
        self.passes_optimizer = self.skips_optimizer or "api" not in options.levels

    def _modes_for(self, levels: tuple[str, ...]) -> list[FunctionMode | DispatchMode]:
        """Return the modes that levels need: modules alone are seen by replacing their call."""
        if tuple(levels) == ("module",):
            return []
        return [self.function_mode, self.dispatch_mode] if "aten" in levels else [self.function_mode]

    # ---------------------------------------------------------------- life
    def start(self) -> None:
        self._thread = threading.get_ident()
        self.policies += applied("torch")
        self.recorder.policy = lambda: [use.to_json() for policy in self.policies for use in policy.uses()]
        for replacement in self._always:
            replacement.install()
        self.collectives.install()
        self.compiling.start()
        self.optimizers.watch()
        self.threads.state.observed = True
        self.update_active()

    def take_off(self) -> None:
        self._switch(on=False)
        if threading.get_ident() == self._thread:
            for mode in self._modes:
                take_off(mode, left=True)
        self.compiling.stop()
        for replacement in reversed(self._always):
            replacement.remove()
        self.collectives.remove()
        self.optimizers.leave()

    def settle(self) -> None:
        self.collectives.end()
        if self.shadow is not None:
            self.shadow.finish()
        if self.forcing is not None:
            self.forcing.finish()

    def steps_by_hand(self) -> None:
        """From now on only `step` ends steps."""
        self.optimizers.steps.manual = True

    def enter_model(self, module: torch.nn.Module) -> None:
        """Called when a module begins to run outside any other: a step may be due."""
        self.compiling.look()
        self.resume_functions()  # in a closure that an optimizer evaluates, or after a step of it that raised
        if self.active != self._on:  # another thread ended the step
            self._switch(on=self.active)
        state = self.threads.state
        with self.observing(state, "the end of a step"):
            self.optimizers.entered(module, state)

    def close_step(self) -> None:
        """Record the collectives that are complete."""
        self.collectives.settle()
        if self.shadow is not None:
            self.shadow.end_step()
        if not self._modes:  # writes through `.data` were seen by nobody
            self.buffers.forget()

    def update_active(self) -> None:
        """Record from now on, or no more: PyTorch calls us in the steps that are recorded, and in no other."""
        super().update_active()
        self._switch(on=self.active)

    def forget(self) -> None:
        self.buffers.forget()

    def _switch(self, *, on: bool) -> None:
        """Install the modes and hooks in the steps that are recorded, and in no others: elsewhere they would only cost."""
        if threading.get_ident() != self._thread or on == self._on:
            return
        self._on, self._paused = on, False
        for replacement in self._entrances:
            replacement.install() if on else replacement.remove()
        for mode in self._modes:
            put_on(mode) if on else take_off(mode)

    def pause_functions(self) -> None:
        """Switch observation off around an optimizer's functions, which would be let through one by one."""
        if (
            self._on and self._modes and self.passes_optimizer and not self.threads.state.modules
            and threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1
        ):  # fmt: skip
            take_off(self.function_mode)
            self._paused = True

    def resume_functions(self) -> None:
        """See functions again."""
        if self._paused and threading.get_ident() == self._thread:
            put_on(self.function_mode)
            self._paused = False

    # ---------------------------------------------------------------- who this process is
    def rank_and_world(self) -> tuple[int | None, int]:
        return rank_and_world()

    def describe(self) -> dict[str, Any]:
        return describe_run(list(self.slots.devices))

    # ---------------------------------------------------------------- what the modes call
    def function_mode_on(self) -> AbstractContextManager[Any]:
        """Return a context in which the function mode is on, if it belongs to this thread and was switched off. It belongs to the
        thread that began the capture and to those of autograd's own, which Python did not start."""
        ours = self.threads.state.observed or isinstance(threading.current_thread(), threading._DummyThread)
        belongs = self._modes and ours
        return self.function_mode if belongs and self.function_mode not in _get_current_function_mode_stack() else nullcontext()

    def notice_thread(self, state: ThreadState) -> None:
        """Note that modules run on a thread on which only they are observed."""
        if self._modes and not state.observed and torch._C._current_graph_task_id() == -1:
            state.observed = True
            name = threading.current_thread().name
            self.recorder.note(f"thread {name} runs modules; only its module calls are seen, not its api and aten calls")


running: Running[Session] = running_of("torch")


def capture(
    directory: str | Path, model: torch.nn.Module | Iterable[torch.nn.Module] | None, options: CaptureOptions
) -> Capture[Session]:
    """Make a capture of what runs inside its ``with`` block; see `trueup.capture`."""
    return engine.capture(Session, directory, model, options)
