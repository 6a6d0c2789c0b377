"""Inside code that Inductor generated: each graph, and each fused kernel, as an `aten` call.

A graph is ``inductor::graph``, with all that goes in and comes out, in forward and in backward. Its kernels are functions (C++)
or objects with a ``run`` (Triton) among the globals of a generated Python module, named after what was fused; while a capture
runs, wrappers stand there that make each an ``inductor::<kernel>``. Library calls (``extern_kernels.addmm``) need nothing: they
go through the dispatcher.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from trueup.recording.adapters.torch.dispatch import Operator
from trueup.recording.adapters.torch.modes import without
from trueup.recording.adapters.torch.tensors import NamedTensors, named_tensors
from trueup.recording.recorder import Call
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session

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

    def __init__(self, session: Session) -> None:
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
            self._install(Replacement(output_code.CompiledFxGraph, "__call__", self._graph))
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
                self._install(Replacement(module, name, self._allocation))
            elif KERNEL.match(name) and name in parameters and not isinstance(value, type):
                kernel = _Kernel(self._session, name, parameters[name])
                self._install(Replacement(module, name, kernel.function if callable(value) else kernel.launcher))

    def _allocation(self, original: Any) -> Any:
        session = self._session

        def allocate(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            state = session.threads.state
            if session.sees() and not state.busy:
                with session.observing(state, "an allocation"):
                    session.buffers.allocated(result)
            return result

        return allocate

    def _graph(self, original: Any) -> Any:
        def call(graph: Any, inputs: Sequence[Any]) -> Any:
            self.look()
            given = [(f"input.{k}", value) for k, value in enumerate(inputs)]  # the graph clears the list, to free what it can
            run = _Run(self._session, GRAPH)
            run.begin(given)
            del given
            with without(self._session.function_mode):
                result = original(graph, inputs)
            run.end(named_tensors("output", result), written=())
            return result

        return call


class _Run:
    """One execution of a graph or a kernel."""

    def __init__(self, session: Session, operator: Operator) -> None:
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

    def __init__(self, session: Session, name: str, parameters: Sequence[str]) -> None:
        self._session, self._parameters = session, parameters
        self._operator = Operator(f"inductor::{name}", recorded=True, written=(), view=False)

    def function(self, original: Any) -> Any:
        """Wrap a kernel that is a function (C++)."""

        def kernel(*args: Any) -> Any:
            return self._call(original, args, {})

        return kernel

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
