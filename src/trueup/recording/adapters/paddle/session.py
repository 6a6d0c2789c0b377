"""A running capture of Paddle: the entrances, the Layer calls, the optimizers, and what they all record through.

What the installed Paddle can do of what a capture stands on, tried on tensors of a few elements before anything is recorded.

GradNode hooks, ``_C_ops`` and addresses are private parts of Paddle. Where one does not behave as it did, the capture falls back
and says so: without post-hooks the gradients that calls make are not recorded; without hooks there is no backward; where
operators cannot be replaced, only Layers are recorded.

Level `module`: each call of a Layer, with its parameters, and its backward.

``Layer.__call__`` is replaced for the time of the capture: hooks on each Layer would stay in the user's model when it is pickled,
and miss keyword arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops
from paddle.base import core, framework, unique_name
from paddle.io.dataloader import dataloader_iter

from trueup.foundation.model import TrueupError
from trueup.recording.adapters.paddle import models
from trueup.recording.adapters.paddle.buffers import Buffers, Slots
from trueup.recording.adapters.paddle.collectives import Collectives, Reductions
from trueup.recording.adapters.paddle.context import Context, Scopes, SessionCore, ThreadState, enclosing, phase_of
from trueup.recording.adapters.paddle.gradients import Edges, Graph, Passes
from trueup.recording.adapters.paddle.invocations import Invocations, amp, flags, listed
from trueup.recording.adapters.paddle.operators import entrances, programs, recomputations
from trueup.recording.adapters.paddle.optimizers import Optimizers
from trueup.recording.adapters.paddle.tensors import (
    FACTS,
    NamedTensors,
    describe_values,
    holds,
    in_host_memory,
    layout_of,
    named_tensors,
    to_numpy,
)
from trueup.recording.engine import environment
from trueup.recording.engine.checkpointing import link
from trueup.recording.engine.environment import rank_and_world
from trueup.recording.engine.policies import AppliedPolicy, applied
from trueup.recording.engine.replacing import Replacement
from trueup.recording.engine.session import Running, Threads, running_of
from trueup.recording.engine.settings import Delivered
from trueup.recording.recorder import CaptureOptions
from trueup.recording.registry import adapter

RUNNING = ("_mean", "_variance")
"""What batch norms keep among their parameters and write in their forward (Paddle 3.3)."""


def layer_calls(session: SessionCore) -> Replacement:
    """Return the replacement of ``Layer.__call__`` that makes each call of a Layer one of the capture."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: paddle.nn.Layer, *args: Any, **kwargs: Any) -> Any:
            state = session.threads.state
            if state.busy or not framework.in_dygraph_mode():
                return original(layer, *args, **kwargs)
            if not state.modules:
                session.enter_model(layer, state)
            if not session.active:
                return original(layer, *args, **kwargs)
            return session.run_module(state, original, layer, args, kwargs, _before, _after)

        return call

    return Replacement(paddle.nn.Layer, "__call__", make)


def _before(
    session: SessionCore, state: ThreadState, layer: paddle.nn.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Context, Edges | None]:
    context = _begin(session, state, layer)
    call = context.call
    if isinstance(layer, paddle.DataParallel):
        session.reductions.meet(layer)
    if not session.records("module"):
        return context, None
    inputs = named_tensors("input", args, kwargs)
    if call.recorded:
        session.slots.inputs(call, inputs)
        session.slots.inputs(call, _own("param", layer._parameters.items()))
        if (values := describe_values(args, kwargs)) is not None:
            session.recorder.value(call, values)
    return context, Edges(inputs) if paddle.is_grad_enabled() else None


def _begin(session: SessionCore, state: ThreadState, layer: paddle.nn.Layer) -> Context:
    _, parent = enclosing(state)
    scope = session.scopes.path(layer, state.running[-1] if parent is not None else None)
    session.notice_thread(state)
    call = session.recorder.begin(
        "module", phase_of(state), scope, type(layer).__name__,
        parent=None if parent is None else parent.call.seq, site=session.site(state),
    )  # fmt: skip
    if state.runs:
        link(state.runs, call)
    return Context(call, parent, scope, opaque=False, depth=len(state.passes))


def _after(session: SessionCore, layer: paddle.nn.Layer, context: Context, edges: Edges | None, result: Any) -> None:
    outputs = named_tensors("output", result)
    session.slots.outputs(context.call, outputs)
    if context.call.recorded and (layer._buffers or isinstance(layer._parameters.get(RUNNING[0]), paddle.Tensor)):
        running = [(name, tensor) for name in RUNNING if (tensor := layer._parameters.get(name)) is not None]
        buffers = _own("output.buffer", [*running, *layer._buffers.items()])
        for _, tensor in buffers if not session.records("api") else ():
            session.buffers.written(tensor)  # a batch norm does not count it in the version, and its operator is not seen
        session.slots.outputs(context.call, buffers)
    if edges is not None:
        session.graph.watch(context, edges, outputs, listed=False, own=False)


def _own(prefix: str, tensors: Iterable[tuple[str, Any]]) -> NamedTensors:
    return [(f"{prefix}.{name}", tensor) for name, tensor in tensors if holds(tensor)]


@dataclass(frozen=True)
class Abilities:
    """What works, and a sentence for each thing that does not."""

    operators: bool
    backward: bool
    nodes: bool
    sentences: tuple[str, ...]


def examine() -> Abilities:
    """Try what a capture needs, drawing no random number; raise `TrueupError` where tensors cannot be read, which leaves nothing
    to record."""
    return _examine(paddle.__version__)


@lru_cache(maxsize=1)
def _examine(version: str) -> Abilities:
    with unique_name.guard():
        _tried("the memory of tensors", _reads_memory, version, needed=True)
        said = [
            _tried("the operators of paddle._C_ops and of paddle.Tensor cannot be replaced", _replaces_operators, version),
            _tried("hooks on tensors do not tell gradients", _hooks_tensors, version),
            _tried("post-hooks of GradNodes do not tell gradients", _hooks_nodes, version),
        ]
    ends = ("operators are not recorded, only Layers", "no backward is recorded", "gradients that a call makes are not recorded")
    operators, backward, nodes = (one is None for one in said)
    sentences = tuple(f"{one}; {end}" for one, end in zip(said, ends, strict=True) if one is not None)
    return Abilities(operators, backward, nodes and backward, sentences)


def _tried(what: str, check: object, version: str, *, needed: bool = False) -> str | None:
    assert callable(check)
    try:
        check()
    except Exception as error:  # noqa: BLE001 - whatever it is, it does not work
        said = f"Paddle {version}: {what} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        if needed:
            raise TrueupError(f"{said}: nothing can be recorded; docs/paddle.md names the versions that were tested") from None
        return said
    return None


def _tensor(values: list[float], *, gradient: bool = False) -> paddle.Tensor:
    return paddle.to_tensor(values, dtype="float32", place=paddle.CPUPlace(), stop_gradient=not gradient)


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _reads_memory() -> None:
    whole = _tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])  # type: ignore[list-item]
    part = whole[1:]
    for tensor in (whole, part):
        layout = layout_of(tensor)
        _expect(layout is not None, "a plain tensor is not dense")
        assert layout is not None
        _expect(bool(np.array_equal(to_numpy(tensor, layout), tensor.numpy())), "address and strides show different numbers")
    shared = part.data_ptr() == whole.data_ptr() + part._offset() - whole._offset()
    _expect(shared or part._offset() == 0, "the offset of a view is not in its address")
    before = whole._inplace_version()
    whole.add_(_tensor([1.0, 1.0, 1.0]))
    _expect(whole._inplace_version() != before, "a write does not count in the version")


def _replaces_operators() -> None:
    seen: list[str] = []

    def make(original: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            seen.append("seen")
            return original(*args, **kwargs)  # type: ignore[operator]

        return call

    left, right = _tensor([1.0, 2.0]), _tensor([3.0, 4.0])
    parts = [Replacement(_C_ops, "relu", make), Replacement(paddle.Tensor, "__add__", make)]
    for part in parts:
        part.install()
    try:
        _C_ops.relu(left)
        found = left + right
    finally:
        for part in reversed(parts):
            part.remove()
    _expect(seen == ["seen", "seen"] and found.tolist() == [4.0, 6.0], "a call went past what stands there")


def _hooks_tensors() -> None:
    _expect(all(hasattr(core.eager, name) for name in ("run_backward", "run_partial_grad")), "core.eager starts no backward")
    seen: list[list[float]] = []
    with paddle.enable_grad():
        leaf = _tensor([1.0, 2.0], gradient=True)
        middle = leaf * 3.0
        middle._register_grad_hook(lambda gradient: seen.append(gradient.tolist()))
        (middle * 2.0).sum().backward()
    _expect(seen == [[2.0, 2.0]] and leaf.grad.tolist() == [6.0, 6.0], "another gradient than expected")


def _hooks_nodes() -> None:
    seen: list[list[float]] = []

    def hook(made: tuple[paddle.Tensor, ...], _: object) -> tuple[paddle.Tensor, ...]:
        seen.append(made[0].tolist())
        return made

    with paddle.enable_grad():
        leaf, fixed = _tensor([1.0, 2.0], gradient=True), _tensor([5.0, 7.0])
        result = paddle.multiply(leaf, fixed)
        node = result.grad_fn
        edges = [None if following is None else following.node_ptr() for following in node.next_functions]
        _expect(edges == [leaf.grad_fn.node_ptr(), None], "the edges of a node are others")
        node._register_post_hook(hook)
        result.sum().backward()
    _expect(seen == [[5.0, 7.0]] and leaf.grad.tolist() == [5.0, 7.0], "another gradient than expected")


_ITERATORS = (dataloader_iter._DataLoaderIterSingleProcess, dataloader_iter._DataLoaderIterMultiProcess)
PADDLE = str(Path(paddle.__file__).parent)


class Session(SessionCore):
    """Everything that the parts share, one at a time in a process; raises `TrueupError` for options that Paddle has not."""

    adapter = adapter("paddle")
    nothing_ran = "no Paddle operator was executed in dynamic mode while the capture was on"
    optimizers: Optimizers

    def __init__(self, directory: Path, options: CaptureOptions, root: dict[str, Any], scopes: Scopes | None = None) -> None:
        super().__init__(
            directory, options, root, scopes or Scopes(), facts=models.optimizer_facts, modules=models.settings,
            optimizers=paddle.optimizer.Optimizer, loaders=(paddle.io.DataLoader,), internal=(PADDLE,), seeds=_seeds,
            autocast=lambda _: "" if (on := amp()) is None else on[1],
        )  # fmt: skip
        if self.settings is not None:
            self.settings.delivered = Delivered(
                _ITERATORS, in_host_memory, lambda: paddle.is_grad_enabled() and rank_and_world()[1] > 1
            )
        self.threads = Threads(ThreadState)
        self.buffers = Buffers(self.recorder)
        self.slots = Slots(self.recorder, self.buffers)
        self.invocations = Invocations(self) if options.detail != "digest" else None
        self.graph = Graph(self)
        self.passes = Passes(self)
        self.optimizers = Optimizers(self)
        self.collectives = Collectives(self)
        self.reductions = Reductions(self)
        self._parts: list[Any] = []
        self.policies: list[AppliedPolicy] = []  # policies that were at work in this run

    # -------------------------------------------------------------------------------------------------------------- life
    def start(self) -> None:
        self.policies += applied("paddle")
        self.recorder.policy = lambda: [use.to_json() for policy in self.policies for use in policy.uses()]
        self._thread = threading.get_ident()
        self.threads.state.known = True
        self._fall_back(examine())
        self.put_on()
        self.update_active()

    def put_on(self) -> None:
        """Stand in front of what Paddle holds now."""
        self._parts = [layer_calls(self), *self.optimizers.replacements()]
        if self.graph.tensors:
            self._parts += self.passes.replacements()
        if "api" in self._levels:
            self._parts.append(entrances(self))
        self._parts += [*recomputations(self), *programs(self)]
        self._parts.append(self.collectives)
        for part in self._parts:
            part.install()

    def _fall_back(self, found: Abilities) -> None:
        for said in found.sentences:
            self.recorder.note(said)
        if not found.operators:
            self._levels.discard("api")
        self.graph.posts = found.nodes
        self.graph.tensors = found.backward

    def take_off(self) -> None:
        parts, self._parts = self._parts, []
        for part in reversed(parts):
            part.remove()
        self.graph.release()
        self.reductions.remove()

    def settle(self) -> None:
        self.collectives.end()

    def enter_model(self, layer: paddle.nn.Layer, state: ThreadState) -> None:
        """Called when a Layer begins to run outside any other: a step may be due."""
        with self.observing(state, "the end of a step"):
            self.optimizers.entered(layer, state)

    def updates(self, optimizer: Any, *, scaled: bool) -> None:
        """Called when an optimizer is about to change its parameters (for a watch)."""

    def scaled(self, scaler: Any, scale: Any, *, stepped: bool) -> None:
        """Hear that a GradScaler has made a step, with which scale, and whether that came to its optimizer (for a watch)."""

    def close_step(self) -> None:
        """Record the collectives that are complete, and forget who made the gradients of the step."""
        self.collectives.settle()
        self.buffers.end_step()
        if "api" not in self._levels:  # writes were seen by nobody
            self.buffers.forget()

    def forget(self) -> None:
        self.buffers.forget()
        self.graph.reset()

    def describe(self) -> dict[str, Any]:
        return described(list(self.slots.devices))

    def names(self) -> dict[str, Any]:
        found = super().names()
        with suppress(Exception):  # another version names its kernels otherwise
            forward = {op for level, phase, _, op in self.recorder.seen().keys if phase == "forward" and level != "module"}
            found["auto_cast"] = listed(forward)
        return found


running: Running[Session] = running_of("paddle")


@contextmanager
def aside() -> Iterator[None]:
    """Take a running capture out of the operators' places for a moment, so that what is put there (a broken kernel, in an
    example) lies below it; in front it would change results that were recorded already."""
    session = running.session
    if session is not None:
        session.take_off()
    try:
        yield
    finally:
        if session is not None:
            session.put_on()


# ------------------------------------------------------------------------------------------------- what the run is made of
def _seeds() -> dict[str, int]:
    with suppress(Exception):  # private, and of no use to anything but the manifest
        return {"paddle": int(core.default_cpu_generator().initial_seed())}
    return {}


def switches() -> dict[str, str]:
    """Return the effective values of Paddle's numeric switches."""
    found: dict[str, Any] = {"default_dtype": paddle.get_default_dtype(), "device": paddle.get_device()}
    return {k: str(v) for k, v in (found | flags(FACTS["flags"].split())).items()}


def described(devices: list[str]) -> dict[str, Any]:
    """Describe this process for its rank's manifest."""
    found = environment.described(
        "paddle", paddle.__version__, devices, rank_and_world(), seeds=_seeds(), switches=switches(),
        libraries=("numpy", "paddlenlp", "paddleocr", "ppocr", "ppdet", "paddle_custom_device"),
    )  # fmt: skip
    with suppress(Exception):  # a build without a commit
        found["versions"]["paddle commit"] = str(paddle.version.commit)
    return found
