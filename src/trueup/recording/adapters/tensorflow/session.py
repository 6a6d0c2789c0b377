"""A running capture of TensorFlow: what sees operations, layers, gradients and functions, and what they record through.

Level `module`: each call of a Keras layer, with its weights.

``Layer.__call__`` is replaced for the time of the capture. A call with symbolic tensors builds a model and computes nothing.

Optimizers: what they are given, and when a training step ends.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, record

from trueup.foundation.frameworks.trees import OptimizerFacts
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.tensorflow.context import (
    NamedTensors,
    Node,
    Scopes,
    SessionCore,
    Slots,
    ThreadState,
    describe_values,
    has_weights,
    holds_numbers,
    layer_class,
    named_tensors,
    number_of,
    phase_of,
)
from trueup.recording.adapters.tensorflow.functions import Functions, Programs, PythonFunctions
from trueup.recording.adapters.tensorflow.gradients import Gradients, Operations
from trueup.recording.adapters.tensorflow.tf1_sessions import Sessions
from trueup.recording.engine import environment
from trueup.recording.engine.replacing import Around, Replacement, WhenLoaded
from trueup.recording.engine.session import Running, Threads, running_of
from trueup.recording.engine.steps import Optimizers as BaseOptimizers
from trueup.recording.recorder import CaptureOptions
from trueup.recording.registry import adapter


class Optimizers(BaseOptimizers):
    """Stands around the steps of Keras's optimizers and of those of TensorFlow 1."""

    def keras_steps(self) -> Replacement:
        return Around(sys.modules["keras.src.optimizers.base_optimizer"].BaseOptimizer, "apply", self._apply)

    def keras_scaler(self) -> Replacement:
        kind = sys.modules["keras.src.optimizers.loss_scale_optimizer"].LossScaleOptimizer
        return Around(kind, "apply", self._scaled_apply)

    def replacements(self) -> list[Replacement]:
        return [Around(tf.compat.v1.train.Optimizer, "apply_gradients", self._apply)]

    # ---------------------------------------------------------------------------------------------------- what happens
    def entered(self, layer: Any | None, state: ThreadState) -> None:
        """A layer, or a function (None), begins to run outside any other. Steps are counted idle or not."""
        if not self._session.over and (layer is None or has_weights(layer)):
            self.forward(layer, inside=bool(state.stepping))

    def parameters(self, optimizers: list[Any]) -> set[int]:  # noqa: ARG002
        """Return nothing: which layers ran in a graph nobody knows."""
        return set()

    def begun(self, optimizer: Any) -> None:
        """An optimizer begins to step; those of a strategy's replicas do on threads of their own."""
        if self.counts():
            super().begun(optimizer)

    def stepped(self, optimizer: Any) -> None:
        self.begun(optimizer)
        self.done(optimizer)

    def _apply(self, original: Callable[..., Any], optimizer: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        state = session.threads.state
        if session.over or state.busy:
            return original(optimizer, grads, *args, **kwargs)
        graph = session.graph_here()
        follows = session.active and (graph is None or session.programs.follows(graph))
        outermost = not state.stepping
        counts = outermost and not state.scaling  # a scaler around it steps, whether it lets it step or not
        if counts:
            self._steps(optimizer, graph, follows=follows)
        if outermost and follows:
            with session.observing(state, "what an optimizer is given"):
                self._given(optimizer, grads, args, kwargs, state, graph)
            if graph is None and counts:
                session.updates(optimizer)
        state.stepping += 1
        try:
            result = original(optimizer, grads, *args, **kwargs)
        finally:
            state.stepping -= 1
        if counts and graph is None:
            self.done(optimizer)
        return result

    def _steps(self, optimizer: Any, graph: Any, *, follows: bool) -> None:
        """An optimizer or a scaler is about to step, or its step is put into a graph."""
        session = self._session
        if graph is None:
            self.begun(optimizer)
            return
        session.functions.steps(optimizer)
        if follows:
            session.programs.of(graph).optimizers.append(optimizer)

    def _scaled_apply(self, original: Callable[..., Any], scaler: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step of a ``LossScaleOptimizer``, which leaves out that of its optimizer where a gradient is not finite."""
        session = self._session
        state = session.threads.state
        if session.over or state.busy or state.scaling or state.stepping:
            return original(scaler, grads, *args, **kwargs)
        graph = session.graph_here()
        follows = session.active and (graph is None or session.programs.follows(graph))
        self._steps(scaler, graph, follows=follows)
        if follows:
            with session.observing(state, "what a scaler of the loss is given"):
                self._scale(scaler, grads, state, graph)
            if graph is None:
                session.updates(scaler)
        state.scaling = True
        try:
            result = original(scaler, grads, *args, **kwargs)
        finally:
            state.scaling = False
        if graph is None:
            if follows:
                session.updates(scaler)  # it read the gradients once more: what is bad in them is no fault now either
            self.done(scaler)
        return result

    def _scale(self, scaler: Any, grads: Any, state: ThreadState, graph: Any) -> None:
        """Record the scale that a step begins with, float32 of no dimension, and whether a gradient is not finite: 1.0."""
        scale = scaler.dynamic_scale.value.read_value() if scaler.built else tf.constant(scaler.initial_scale, tf.float32)
        bad = 1.0 - tf.cast(scaler.check_finite(list(grads)), tf.float32)
        found: NamedTensors = [("input.scale", scale), ("input.found_inf", bad)]
        op = "keras.optimizers.LossScaleOptimizer.step"
        node = self._session.begin("api", "optimizer", "", op, site=self._session.site(state, graph), graph=graph)
        self._session.slots.record(node, found)
        if graph is not None:
            self._session.programs.tap(graph, node, found)

    # ------------------------------------------------------------------------------------------------------------- inside
    def _given(self, optimizer: Any, grads: Any, args: Any, kwargs: Any, state: ThreadState, graph: Any) -> None:
        """Record the gradients by the names of their variables."""
        session = self._session
        pairs = list(grads) if not hasattr(grads, "dtype") else []
        if not pairs or not isinstance(pairs[0], tuple):
            variables = args[0] if args else kwargs.get("trainable_variables")
            variables = variables if variables is not None else getattr(optimizer, "_trainable_variables", ())
            pairs = list(zip(pairs, variables, strict=False))
        found: NamedTensors = []
        for gradient, variable in pairs:
            name = session.scopes.weight(variable)
            if holds_numbers(gradient):
                found.append((f"input.{name}", gradient))
            elif isinstance(gradient, tf.IndexedSlices):
                found += [(f"input.{name}.values", gradient.values), (f"input.{name}.indices", gradient.indices)]
        op = f"keras.optimizers.{type(optimizer).__name__}.apply"
        node = session.begin("api", "optimizer", "", op, site=session.site(state, graph), graph=graph)
        session.slots.record(node, found)
        if graph is not None:
            session.programs.tap(graph, node, found)


def layer_calls(session: SessionCore, kind: Any) -> Replacement:
    """Return the replacement of ``Layer.__call__`` that makes each call of a layer one of the capture."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            state = session.threads.state
            if state.busy or not (session.counts and state.known) or symbolic(args, kwargs):
                return original(layer, *args, **kwargs)
            graph = session.graph_here()
            if graph is None and not state.modules:
                session.enter_model(layer, state)
            if not session.active or (graph is not None and not session.programs.follows(graph)):
                return original(layer, *args, **kwargs)
            return session.run_module(state, original, layer, args, kwargs, _begin, _end)

        return call

    return Replacement(kind, "__call__", make)


def symbolic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an argument is a symbol of which Keras builds a model."""
    return any(type(value).__name__ == "KerasTensor" for value in tf.nest.flatten((args, kwargs)))


def _begin(session: SessionCore, state: ThreadState, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Node, Any]:
    graph = session.graph_here()
    parent = state.modules[-1] if state.modules else None
    if parent is None and session.settings is not None:
        session.settings.entered(layer)  # in a function, too, which alone begins outside any layer
    scope = session.scopes.path(layer, state.running[-1] if parent is not None else None)
    phase = "recompute" if state.passes and not state.stepping else phase_of(state, graph)
    node = session.begin("module", phase, scope, type(layer).__name__, parent=parent, site=session.site(state, graph), graph=graph)
    if not session.records("module"):
        return node, graph
    inputs = named_tensors("input", args, kwargs)
    weights = _weights(layer, "param")
    for variable in getattr(layer, "_trainable_variables", ()):
        session.scopes.name_weight(variable, f"{scope}.{variable.name}" if scope else variable.name)
    node.inputs = {number_of(tensor): name for name, tensor in inputs}
    session.slots.record(node, inputs)
    session.slots.record(node, weights)
    given = {k: v for k, v in kwargs.items() if v is not None}
    if (values := describe_values(args, given)) is not None:
        session.slots.value(node, values)
    if graph is not None:
        session.programs.tap(graph, node, [*inputs, *weights], [])
    return node, graph


def _end(session: SessionCore, layer: Any, node: Node, graph: Any, result: Any) -> None:
    if not session.records("module"):
        return
    outputs = named_tensors("output", result)
    node.outputs = {number_of(tensor): name for name, tensor in outputs}
    session.slots.record(node, outputs)
    session.gradients.layer(node)
    written = _weights(layer, "output.buffer", trained=False)
    session.slots.record(node, written)
    if graph is not None:
        session.programs.tap(graph, node, [], [*outputs, *written])


def _weights(layer: Any, prefix: str, *, trained: bool | None = None) -> NamedTensors:
    """Return the values of a layer's own weights, unseen by tapes; ``trained`` False: only those that a forward writes (running
    means)."""
    found: NamedTensors = []
    own = [] if trained is False else list(getattr(layer, "_trainable_variables", ()))
    own += list(getattr(layer, "_non_trainable_variables", ()))
    with record.stop_recording():
        for variable in own:
            value = getattr(variable, "_value", None)
            if not isinstance(value, tf.Variable) or value.dtype.base_dtype in (tf.string,):
                continue
            name = str(getattr(variable, "name", "weight"))
            if name.startswith("seed_generator"):
                continue
            tensor = value.read_value()
            if holds_numbers(tensor):
                found.append((f"{prefix}.{name}", tensor))
    return found


TENSORFLOW = str(Path(tf.__file__).parent)

PADDLE = (
    "PaddlePaddle and TensorFlow are both loaded in this process: TensorFlow is not recorded\n"
    "  expected: one of the two in a process; loaded in the other order they crash it\n"
    "  got:      both\n"
    "  next:     run the TensorFlow training in a process that does not import paddle"
)


class Session(SessionCore):
    """Everything that the parts share; raises `TrueupError` for options that TensorFlow has not, and beside PaddlePaddle."""

    adapter = adapter("tensorflow")
    nothing_ran = "no TensorFlow operation was executed while the capture was on"
    optimizers: Optimizers

    def __init__(self, directory: Path, options: CaptureOptions, root: dict[str, Any], scopes: Scopes | None = None) -> None:
        if "paddle" in sys.modules:
            raise TrueupError(PADDLE)
        internal = (TENSORFLOW, str(Path(TENSORFLOW).parent / "keras"))
        super().__init__(
            directory, options, root, scopes or Scopes(), facts=_facts, modules=_settings, loaders=(tf.data.Dataset,),
            loader=_dataset, internal=internal,
        )  # fmt: skip
        self.threads = Threads(ThreadState)
        self.slots = Slots(self)
        self.gradients = Gradients(self)
        self.programs = Programs(self)
        self.functions = Functions(self)
        self.optimizers = Optimizers(self)
        self.sessions = Sessions(self)
        self.operations = Operations(self)
        self._python_functions = PythonFunctions(self)
        self._parts: list[Any] = []

    # -------------------------------------------------------------------------------------------------------------- life
    def start(self) -> None:
        self._thread = threading.get_ident()
        self.threads.state.known = True
        self._parts = [*self.optimizers.replacements(), *self.gradients.replacements(), *self.functions.replacements()]
        self._parts += [*self._python_functions.replacements(), *self.sessions.replacements()]
        self._parts += [self.gradients, self.operations]
        self._parts.append(self._once_loaded("keras.src.layers.layer", lambda: layer_calls(self, layer_class())))
        self._parts.append(self._once_loaded("keras.src.optimizers.base_optimizer", self.optimizers.keras_steps))
        scalers = "keras.src.optimizers.loss_scale_optimizer"
        self._parts.append(self._once_loaded(scalers, self.optimizers.keras_scaler))
        for part in list(self._parts):
            part.install()
        self.update_active()

    def _once_loaded(self, module: str, make: Callable[[], Replacement]) -> WhenLoaded:
        """Return the replacement of an attribute of Keras, which TensorFlow loads when somebody asks for it."""

        def stand_in() -> None:
            self._parts.append(make())
            self._parts[-1].install()

        return WhenLoaded(module, stand_in)

    def take_off(self) -> None:
        parts, self._parts = self._parts, []
        for part in reversed(parts):
            part.remove()

    def enter_model(self, layer: Any | None, state: ThreadState) -> None:
        """Called when a layer, or a function (None), begins to run outside any other: a step may be due."""
        with self.observing(state, "the end of a step"):
            self.optimizers.entered(layer, state)

    def forget(self) -> None:
        self.slots.forget()

    def close_step(self) -> None:
        self.slots.forget()
        self.gradients.forget()

    def flush(self) -> bool:
        """Make calls of the values that came from graphs; return whether any did."""
        if not self.programs.waiting:
            return False
        stepped: list[Any] = []
        with self.observing(self.threads.state, "what functions computed"):
            stepped = self.programs.executed()
        for optimizer in stepped:
            self.updates(optimizer)
            self.optimizers.stepped(optimizer)
        return True

    def updates(self, optimizer: Any) -> None:
        """Called when an optimizer is about to change the weights, or has changed them in a function."""

    # --------------------------------------------------------------------------------------------------- who this process is
    def rank_and_world(self) -> tuple[int | None, int]:
        return rank_and_world()

    def describe(self) -> dict[str, Any]:
        return described(list(self.slots.devices))


running: Running[Session] = running_of("tensorflow")


def _facts(optimizer: Any) -> OptimizerFacts | None:
    """Return what an optimizer is; None inside a graph, to which reading a variable would add."""
    if not tf.executing_eagerly():
        return None
    import keras

    from trueup.recording.adapters.tensorflow import models

    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a scaler
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return OptimizerFacts("tensorflow", (type(optimizer).__name__,), vars(optimizer))
    return models.optimizer_facts(optimizer)


def _settings(layer: Any) -> dict[str, dict[str, Any]]:
    from trueup.recording.adapters.tensorflow import models

    return models.settings(layer)


INSTEAD_OF_0 = 2**31 - 1
"""The second seed where both were 0: `tensorflow.python.framework.random_seed.get_seed`, TensorFlow 2.21."""


def _dataset(made: Any) -> dict[str, Any]:
    """Return the settings of a data set; the seed is the second one: the first is the whole process's."""
    read = {name.strip("_"): _number(one) for name, one in vars(made).items() if name not in ("_name", "_seed")}
    held = {name: 0 if one == INSTEAD_OF_0 else one for name, one in read.items() if one is not None}
    kind = type(made).__name__.strip("_")
    named = {"seed2": "seed", **({"buffer_size": "prefetch_factor"} if kind.startswith("Prefetch") else {})}
    return {"class": kind, **{named.get(name, name): one for name, one in held.items()}}


def _number(held: Any) -> Any:
    """Return the number that a tensor holds, and what is no tensor as it is; None of any other tensor."""
    if not tf.is_tensor(held):
        return held
    known = tf.get_static_value(held) if held.dtype in (tf.int64, tf.bool) and held.shape.rank == 0 else None
    return None if known is None else known.item()


# ------------------------------------------------------------------------------------------------- what the run is made of
def rank_and_world() -> tuple[int | None, int]:
    """Return this process's rank (None when nothing says so) and the world size: by ``TF_CONFIG``, else by the launcher."""
    try:
        said = json.loads(os.environ.get("TF_CONFIG", "{}"))
        cluster = said.get("cluster", {})
        workers = [*cluster.get("chief", []), *cluster.get("worker", [])]
        task = said.get("task", {})
        if workers and task.get("type") in ("chief", "worker"):
            before = len(cluster.get("chief", [])) if task["type"] == "worker" else 0
            return before + int(task.get("index", 0)), len(workers)
    except (ValueError, AttributeError, TypeError):  # a TF_CONFIG that says nothing
        pass
    return environment.rank_and_world()


def switches() -> dict[str, str]:
    """Return the effective values of TensorFlow's numeric switches."""
    keras: Any = sys.modules.get("keras")
    asked: dict[str, Callable[[], Any]] = {
        "op_determinism": lambda: importlib.import_module("tensorflow.python.framework.config").is_op_determinism_enabled(),
        "tensor_float_32": lambda: tf.config.experimental.tensor_float_32_execution_enabled(),
        "jit": lambda: tf.config.optimizer.get_jit(),
        "functions_run_eagerly": lambda: tf.config.functions_run_eagerly(),
        "keras.floatx": lambda: keras.config.floatx(),
        "keras.dtype_policy": lambda: keras.config.dtype_policy().name,
    }
    found: dict[str, Any] = {"onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1")}
    for name, ask in asked.items():
        with suppress(Exception):  # a part of TensorFlow that this version has not: the others are asked all the same
            found[name] = ask()
    with suppress(Exception):  # likewise
        found |= {f"optimizer.{name}": value for name, value in tf.config.optimizer.get_experimental_options().items()}
    return {k: str(v) for k, v in found.items()}


def described(devices: list[str]) -> dict[str, Any]:
    """Describe this process for its rank's manifest."""
    seed = context.global_seed()
    return environment.described(
        "tensorflow", tf.__version__, devices, rank_and_world(),
        seeds={} if seed is None else {"tensorflow": int(seed)}, switches=switches(),
        libraries=("numpy", "keras", "npu_device", "horovod", "tensorflow_addons"),
    )  # fmt: skip
