"""torch.compile under a capture: ``off`` runs the Python code instead, ``through`` follows the compiled run.

A dispatch mode makes Dynamo give up without a word; a function mode, or a replaced ``nn.Module.__call__``, would be traced
into. So with ``through`` everything of ours that Dynamo could meet is out of its sight while a compiled function runs. What it
executes is seen at its boundary (`Region`), by the dispatch mode, which tells Dynamo that it does not care (`FollowingMode`),
and inside the generated code (`Inductor`).

Every compiled function, whenever it was compiled, asks ``torch._dynamo.eval_frame._callback_from_stance`` how to run, and
calls what is in its list ``cleanups`` before it returns (PyTorch 2.6 to 2.13). That is how it is met, and left.

A compiled function is one call, with its inputs, its results, and the autograd nodes that it made.

Inside code that Inductor generated: each graph, and each fused kernel, as an `aten` call. A graph is ``inductor::graph``, with
all that goes in and comes out, in forward and in backward. Its kernels are functions (C++) or objects with a ``run`` (Triton)
among the globals of a generated Python module, named after what was fused; while a capture runs, wrappers stand there that make
each an ``inductor::<kernel>``. Library calls (``extern_kernels.addmm``) need nothing: they go through the dispatcher.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from trueup.recording.adapters.torch import functions
from trueup.recording.adapters.torch.context import Context, SessionCore
from trueup.recording.adapters.torch.functions import DispatchMode, Operator
from trueup.recording.adapters.torch.gradients import Edges, watch
from trueup.recording.adapters.torch.modes import without
from trueup.recording.adapters.torch.tensors import NamedTensors, named_tensors
from trueup.recording.engine.replacing import Around, Replacement
from trueup.recording.recorder import Call


class Region:
    """One execution of a compiled function, from the moment Dynamo is asked how to run it until `leave`. A compiled module is a
    call already, made by ``nn.Module.__call__``; the parameters of the modules inside are added, for those do not run on their
    own. Any other function becomes an `api` call ``torch.compile:<name>``. ``frame``, of Dynamo's wrapper, holds ``fn``,
    ``args``, ``kwargs`` and, at the end, ``result``."""

    def __init__(self, session: SessionCore, frame: FrameType) -> None:
        self._session, self._state = session, session.threads.state
        self._context: Context | None = None
        self._edges: Edges | None = None
        self._is_module = False
        function, args, kwargs = (frame.f_locals[name] for name in ("fn", "args", "kwargs"))
        owner = getattr(function, "__self__", None)
        self._optimizer = owner if isinstance(owner, torch.optim.Optimizer) else None
        if self._optimizer is not None:  # the hooks that would tell are out of Dynamo's sight
            session.optimizers.begin(self._optimizer, frame.f_code)
        elif not self._state.modules and (module := _module(function)) is not None:
            session.enter_model(module)
        if session.sees() and not self._state.busy:
            with session.observing(self._state, "a compiled function"):
                self._begin(function, args, kwargs)

    def leave(self, frame: FrameType) -> None:
        """End the call; without a result in ``frame`` it raised."""
        session, values, context = self._session, frame.f_locals, self._context
        if context is not None and not self._is_module:
            self._state.contexts.pop()
        if "result" not in values:
            return
        if context is not None and session.active:
            with session.observing(self._state, "a compiled function"):
                self._end(context, values["args"], values["kwargs"], values["result"])
        if self._optimizer is not None:
            session.optimizers.end(self._optimizer)

    def _begin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session, state = self._session, self._state
        inputs = named_tensors("input", args, kwargs)
        module = _module(function)
        self._is_module = module is not None and bool(state.running) and state.running[-1] is module
        if module is not None and self._is_module:
            self._context = state.modules[-1]
            if self._context.call.recorded:
                inside = [(f"param.{name}", p) for name, p in module.named_parameters() if "." in name]
                session.slots.inputs(self._context.call, inside)
        else:
            name = getattr(function, "__qualname__", type(function).__name__)
            self._context = functions.begin(session, state, f"torch.compile:{name}", inputs, function, args, kwargs)
            state.contexts.append(self._context)
        self._edges = Edges(inputs) if torch.is_grad_enabled() else None

    def _end(self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        outputs = named_tensors("output", result)
        if not self._is_module:
            inputs = named_tensors("input", args, kwargs)
            functions.end(self._session, context, self._edges, inputs, outputs, torch.compile, args, kwargs)
        elif self._edges is not None:  # so that what the compiled backward executes finds its module
            watch(context, self._edges, outputs, None, own=True)


def _module(function: Any) -> torch.nn.Module | None:
    """Return the module whose call is compiled: a bound method of it, or Dynamo's wrapper around it."""
    for found in (getattr(function, "__self__", None), getattr(function, "__wrapped__", None)):
        if isinstance(found, torch.nn.Module):
            return found
    return None


KERNEL = re.compile(r"(cpp|triton)_")
"""Names of fused kernels in a generated module (PyTorch 2.6 to 2.13)."""

ALLOCATION = re.compile(r"empty_strided_")
"""Functions of a generated module that allocate past the dispatcher."""

DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\((.*?)^'''", re.MULTILINE | re.DOTALL)
SIGNATURE = re.compile(r"(?:void\s+kernel|def \w+)\(([^)]*)\)")
"""How a generated module defines a kernel, and the kernel its parameters: ``in_ptr0``, ``in_out_ptr0``, ``out_ptr0``, sizes."""

GRAPH = Operator("inductor::graph", recorded=True, written=(), view=False)


class Inductor:
    """The replacements inside Inductor and the modules it generated."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._replacements: list[Replacement] = []
        self._seen = 0

    def look(self) -> None:
        """Wrap what was generated since the last look."""
        output_code = sys.modules.get("torch._inductor.output_code")
        codecache = sys.modules.get("torch._inductor.codecache")
        if output_code is None or codecache is None or "aten" not in self._session.options.levels:
            return
        if not self._replacements:
            self._install(Around(output_code.CompiledFxGraph, "__call__", self._graph))
        for module in codecache.PyCodeCache.modules[self._seen :]:
            self._wrap(module)
        self._seen = len(codecache.PyCodeCache.modules)

    def stop(self) -> None:
        """Put everything back."""
        for replacement in self._replacements:
            replacement.remove()
        self._replacements, self._seen = [], 0

    def _install(self, replacement: Replacement) -> None:
        replacement.install()
        self._replacements.append(replacement)

    def _wrap(self, module: ModuleType) -> None:
        parameters = _parameters(module)
        for name, value in list(vars(module).items()):
            if ALLOCATION.match(name) and callable(value):
                self._install(Around(module, name, self._allocation))
            elif KERNEL.match(name) and name in parameters and not isinstance(value, type):
                kernel = _Kernel(self._session, name, parameters[name])
                self._install(Replacement(module, name, kernel.function if callable(value) else kernel.launcher))

    def _allocation(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        result = original(*args, **kwargs)
        state = session.threads.state
        if session.sees() and not state.busy:
            with session.observing(state, "an allocation"):
                session.buffers.allocated(result)
        return result

    def _graph(self, original: Any, graph: Any, inputs: Sequence[Any]) -> Any:
        self.look()
        given = [(f"input.{k}", value) for k, value in enumerate(inputs)]  # the graph clears the list, to free what it can
        run = _Run(self._session, GRAPH)
        run.begin(given)
        del given
        with without(self._session.function_mode):
            result = original(graph, inputs)
        run.end(named_tensors("output", result), written=())
        return result


class _Run:
    """One execution of a graph or a kernel."""

    def __init__(self, session: SessionCore, operator: Operator) -> None:
        self._session, self._operator = session, operator
        self._state = session.threads.state
        self._call: Call | None = None

    def begin(self, inputs: Iterable[tuple[str, Any]]) -> None:
        session = self._session
        if self._state.busy or not session.sees():
            return
        with session.observing(self._state, self._operator.name):
            call = self._call = session.dispatch_mode.begin(self._operator, self._state)
            if call.recorded:
                session.slots.inputs(call, [(slot, t) for slot, t in inputs if isinstance(t, torch.Tensor)])

    def end(self, outputs: NamedTensors, *, written: Iterable[torch.Tensor]) -> None:
        session, call = self._session, self._call
        if call is None or not session.active:
            return
        with session.observing(self._state, self._operator.name):
            for tensor in written:
                session.buffers.written(tensor)
            session.slots.produced(call, outputs)
            if call.recorded:
                session.slots.outputs(call, outputs)


class _Kernel:
    """A fused kernel: the names of its parameters tell what it reads and writes."""

    def __init__(self, session: SessionCore, name: str, parameters: Sequence[str]) -> None:
        self._session, self._parameters = session, parameters
        self._operator = Operator(f"inductor::{name}", recorded=True, written=(), view=False)

    def function(self, original: Any) -> Any:
        """Wrap a kernel that is a function (C++)."""
        return lambda *args: self._call(original, args, {})

    def launcher(self, original: Any) -> Any:
        """Wrap a kernel that is an object with a ``run`` (Triton)."""
        return _Launcher(original, self._call)

    def _call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [(name, t) for name, t in zip(self._parameters, args, strict=False) if isinstance(t, torch.Tensor)]
        run = _Run(self._session, self._operator)
        run.begin((f"input.{name}", t) for name, t in tensors if name.startswith("in"))
        result = original(*args, **kwargs)
        written = [(f"output.{name}", t) for name, t in tensors if not name.startswith("in_ptr")]
        run.end(written, written=[t for _, t in written])
        return result


class _Launcher:
    """Stands in for a Triton kernel: ``run`` launches it, all else is its own."""

    def __init__(self, kernel: Any, call: Callable[..., Any]) -> None:
        self._kernel, self._call = kernel, call

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._kernel.run, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def _parameters(module: ModuleType) -> dict[str, list[str]]:
    """Read the parameters of each kernel from the source of a generated module."""
    try:
        source = Path(module.__file__ or "").read_text(encoding="utf-8")
    except OSError:
        return {}
    found = {}
    for name, body in DEFINITION.findall(source):
        signature = SIGNATURE.search(body)
        if signature is not None:
            declared = (part.partition(":")[0].split() for part in signature[1].split(","))
            found[name] = [words[-1] for words in declared if words]
    return found


OFF = (
    "torch.compile was used: with --compile=off its Python code ran instead of the compiled code during the whole capture, so the "
    "numerics of the compiled run were not observed; --compile=through observes them"
)
THROUGH = (
    "torch.compile was used: with --compile=through the compiled code ran; inside it only library calls and fused kernels were "
    "observed, not the functions and modules they were made of"
)
LOST = "a compiled function could not be followed with this version of PyTorch: its Python code ran instead"


class FollowingMode(DispatchMode):
    """The dispatch mode of ``through``: Dynamo and its compiled code work under it as if it was not there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator and record it; PyTorch keeps Dynamo off a method that stands in the class itself."""
        return super().__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile under this mode (PyTorch 2.10 on)."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say the same to older versions of PyTorch."""
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")


class Compiling:
    """What a session does about compiled functions."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self._through = session.options.compile == "through"
        self._here = threading.local()
        self._lock = threading.Lock()
        self._running = 0  # compiled functions that run at present, on all threads
        self._replacements: list[Replacement] = []
        self._away: list[Callable[[], None]] = []  # functions that put back what was taken out of Dynamo's sight
        self._inductor = Inductor(session) if self._through else None
        self._compile = Around(torch, "compile", self._compiles)
        self._eager: Any = None

    def start(self) -> None:
        """Meet every compiled function from now on, whether its step is recorded or not."""
        self._compile.install()
        self.look()

    def look(self) -> None:
        """See whether Dynamo was imported, without which nothing is compiled."""
        if not self._replacements and hasattr(sys.modules.get("torch._dynamo"), "eval_frame"):
            self._begin()

    def stop(self) -> None:
        """Leave nothing behind."""
        self._compile.remove()
        for replacement in self._replacements:
            replacement.remove()
        self._replacements = []
        if self._inductor is not None:
            self._inductor.stop()
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None

    def _begin(self) -> None:
        from torch._dynamo import callback, convert_frame, eval_frame

        self._replacements = [
            Replacement(eval_frame, "_callback_from_stance", self._meeting),
            Around(eval_frame.OptimizedModule, "_initialize", self._unseen),
            Around(convert_frame, "_fullgraph_capture_frame", self._unseen),  # a strict torch.export
            Around(callback.CompilationCallbackHandler, "install_callbacks", self._hiding),
        ]
        for replacement in self._replacements:
            replacement.install()
        self._correct_dynamo()
        if not self._through:
            self._eager = torch.compiler.set_stance("force_eager")

    def _compiles(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Import Dynamo, and hide our functions from it, before anything is compiled."""
        if vars(torch).get("compile") is self._compile.ours:  # else the capture is over
            with self._session.observing(self._session.threads.state, "torch.compile"):
                import_module("torch._dynamo.eval_frame")
                self.look()
        return original(*args, **kwargs)

    # ---------------------------------------------------------------- what Dynamo calls
    def _meeting(self, original: Any) -> Any:
        def _callback_from_stance(callback: Any) -> Any:
            found = original(callback)
            if callback in (None, False) or not self._replacements:  # nothing compiled, or the capture is over
                return found
            frame = sys._getframe(1)
            exports = bool(getattr(frame.f_locals.get("self"), "export", False))
            if not self._through and not exports:
                self._session.recorder.note(OFF)
                return None
            cleanups = frame.f_locals.get("cleanups")
            if not isinstance(cleanups, list):
                self._session.recorder.note(LOST)
                return None
            if not exports:
                self._session.recorder.note(THROUGH)
            if not getattr(self._here, "inside", False):  # what a compiled function calls belongs to it, compiled or not
                cleanups.append(self._enter(None if exports else Region(self._session, frame)))
            return callback if exports else found

        return _callback_from_stance

    def _enter(self, region: Region | None) -> Callable[[], None]:
        gone = contextlib.ExitStack()
        gone.enter_context(self.out_of_sight())
        gone.enter_context(without(self._session.function_mode))
        self._here.inside = True
        if self._inductor is not None:
            self._inductor.look()

        def leave() -> None:
            self._here.inside = False
            gone.close()
            if self._inductor is not None:
                self._inductor.look()
            if region is not None:
                region.leave(sys._getframe(1))

        return leave

    def _unseen(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a function of Dynamo's neither bind nor trace what is ours."""
        with self.out_of_sight(), without(self._session.function_mode):
            return original(*args, **kwargs)

    @contextlib.contextmanager
    def _hiding(self, original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Keep what a compilation tries and measures apart from the training; Dynamo begins and ends each with this block."""
        state = self._session.threads.state
        before, state.busy = state.busy, True
        try:
            with original(*args, **kwargs):
                yield
        finally:
            state.busy = before

    # ---------------------------------------------------------------- out of sight
    @contextlib.contextmanager
    def out_of_sight(self) -> Iterator[None]:
        """Remove our replacements and optimizer hooks, for all threads."""
        with self._lock:
            self._running += 1
            if self._running == 1:
                ours = [self._compile, *self._session.replacements]
                self._away = [r.install for r in ours if r.remove()] + _hooks_removed(self._session.optimizers.hooks)
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    away, self._away = self._away, []
                    for put_back in away:
                        put_back()

    def _correct_dynamo(self) -> None:
        """Tell Dynamo what ``nn.Module.__call__`` is, if it was imported while ours stood there: it compares by identity."""
        from torch._dynamo import utils
        from torch._dynamo.variables import nn_module

        for module in (utils, nn_module):
            for replacement in self._session.replacements:
                if vars(module).get("unpatched_nn_module_call") is replacement.ours:
                    module.unpatched_nn_module_call = replacement.original


def _hooks_removed(handles: list[Any]) -> list[Callable[[], None]]:
    """Remove hooks from the dictionaries that hold them; return a function that puts them back."""
    found: list[Callable[[], None]] = []
    for hooks in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
        for handle in handles:
            if handle.hooks_dict_ref() is hooks and handle.id in hooks:
                found.append(functools.partial(hooks.__setitem__, handle.id, hooks.pop(handle.id)))
    return found
