"""What `trueup monitor` takes of a Keras training in TensorFlow, in eager loops and inside ``tf.function``: no call is recorded.

The same numbers as of the other frameworks (`trueup.recording.engine.monitored_step`). Where a function is traced, they are put
into its graph: reductions that nothing else reads, those of every N-th step behind a condition, and one tap (`functions.tap`) at
the optimizer's step that hands a vector to Python. A counter in the graph says which step it is. Only what is traced inside a tape
is read, so what is evaluated, exported or saved holds nothing of ours. A function that was traced before the monitor began is not
seen, and neither is one that XLA compiles. A step of several replicas is not taken.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import auto_control_deps, ops

from trueup.foundation.words.wording import say
from trueup.recording.adapters.tensorflow.context import has_weights, layer_class, layers_of
from trueup.recording.adapters.tensorflow.functions import tap, unordered
from trueup.recording.adapters.tensorflow.monitored_layers import KerasLayers, TensorFlowKernels, read
from trueup.recording.adapters.tensorflow.session import described, rank_and_world, symbolic
from trueup.recording.engine.monitored_step import COUNTS, LOSS, SCALE, SKIPPED, Made, StepProbe
from trueup.recording.engine.monitoring import Block, Floats, Listener, Numbers, Wanted
from trueup.recording.engine.replacing import Around, Replacement, WhenLoaded
from trueup.recording.engine.session import running_of

MOMENTA = ("_momentums", "momentums", "_m")  # lists of Keras 3: of Adam and its kind, of SGD, of Adamax
VARIANCES = ("_velocities",)
XLA = (
    "{name} is compiled by XLA (jit_compile=True): nothing inside is monitored. model.compile(jit_compile=False) or "
    "tf.function(jit_compile=False) shows it"
)


def _graph() -> Any:
    """Return the graph that is being built; None where what runs is executed."""
    return None if tf.executing_eagerly() else ops.get_default_graph()


class TensorFlowProbe(StepProbe):
    """See `trueup.recording.engine.monitoring.Probe`; without ``models`` the outermost layers with weights that run inside a tape
    in the first step are read."""

    kernels = TensorFlowKernels()
    _layers: KerasLayers

    def __init__(self, listener: Listener, wanted: Wanted, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        super().__init__(listener, wanted, models, optimizers)
        self._waiting: list[tuple[Any, int, Made, bool]] = []  # vector, its length, what it becomes, whether of sampled steps
        self._gradients: dict[int, Any] = {}  # that an optimizer is given, by variable
        self._variables: list[Any] = []
        self._scaled: set[int] = set()
        self._words: Any = 0.0
        self._samples: Any = 0.0
        self._running: list[str] = []  # scopes of the layers that run
        self._stepping = self._scaling = False
        self._waits: Any = 0.0  # 1 where the gradients of this step only wait to be added to those of later ones
        self._compiled: list[Any] = []  # functions under way that XLA compiles, outermost first
        self._said: set[str] = set()
        self._flags: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._replaced: list[Any] = []
        self._depth = 0  # calls of functions under way
        self._complete = False
        self._thread = threading.get_ident()
        self._stands = 0, 0  # step, and steps between two that have everything
        self._made: tuple[Any, Any] | None = None  # variables that hold these

    def make_layers(self) -> KerasLayers:
        return KerasLayers(self)

    # ---------------------------------------------------------------- life
    def attach(self) -> None:
        function = polymorphic_function.Function
        self._replaced = [
            Around(tf.GradientTape, "gradient", self._differentiates), Around(function, "__call__", self._function),
            Around(auto_control_deps, "op_is_stateful", unordered), Around(tf, "clip_by_global_norm", self._clips),
            self._once_loaded("keras.src.layers.layer", lambda: [Around(layer_class(), "__call__", self._called)]),
            self._once_loaded("keras.src.optimizers.base_optimizer", self._steps),
            self._once_loaded("keras.src.optimizers.loss_scale_optimizer", self._scalers),
            self._once_loaded("keras.src.backend.tensorflow.nn", self._attentions),
        ]  # fmt: skip
        for one in list(self._replaced):
            one.install()
        for model in self._wanted_models:
            self._adopt(model)
        self.align()

    def _once_loaded(self, module: str, make: Callable[[], list[Replacement]]) -> WhenLoaded:
        def stand_in() -> None:
            for one in make():
                self._replaced.append(one)
                one.install()

        return WhenLoaded(module, stand_in)

    def _steps(self) -> list[Replacement]:
        return [Around(sys.modules["keras.src.optimizers.base_optimizer"].BaseOptimizer, "apply", self._applies)]

    def _scalers(self) -> list[Replacement]:
        kind = sys.modules["keras.src.optimizers.loss_scale_optimizer"].LossScaleOptimizer
        return [Around(kind, "apply", self._scaler_applies), Around(kind, "scale_loss", self._scales)]

    def _attentions(self) -> list[Replacement]:
        return [Around(sys.modules["keras.src.backend.tensorflow.nn"], "dot_product_attention", self._attends)]

    def detach(self) -> None:
        for one in reversed(self._replaced):
            one.remove()
        self._replaced = []

    def rank_and_world(self) -> tuple[int | None, int]:
        return rank_and_world()

    def describe(self) -> dict[str, Any]:
        return described([one.name for one in tf.config.list_logical_devices()])

    def align(self) -> None:
        """Have the variables that graphs read say what the listener does."""
        step = self._listener.step
        self._stand(step, 0 if self._listener.paused else self._wanted.apart(step))

    def _stand(self, *stands: int) -> None:
        for variable, was, now in zip(self._made or (), self._stands, stands, strict=False):
            if was != now:
                variable.assign(now)
        self._stands = stands[0], stands[1]

    def _told(self) -> tuple[Any, Any]:
        """Return the variables that a graph reads. The first function that runs makes them: a variable starts TensorFlow's devices,
        and what a script sets of them (``tf.config``) comes before that. TensorFlow traces what makes a variable a second time."""
        if self._made is None:
            with tf.init_scope():
                named = zip(self._stands, ("trueup_step", "trueup_every"), strict=True)
                step, every = (tf.Variable(now, dtype=tf.int64, trainable=False, name=name) for now, name in named)
            self._made = step, every
        return self._made

    # ---------------------------------------------------------------- numbers
    @property
    def sampled(self) -> bool:
        return True if _graph() is not None else super().sampled

    def _reads(self) -> bool:
        """Tell whether what runs now is read."""
        return not self._compiled and self._single() and (_graph() is not None or not self._listener.paused)

    def _single(self) -> bool:
        return bool(tf.distribute.get_strategy().num_replicas_in_sync == 1)

    def sample(self, compute: Callable[[], Numbers]) -> Numbers:
        with record.stop_recording():
            graph = _graph()
            if graph is None:
                return compute()
            counts: list[int] = []

            def taken() -> Any:
                numbers = compute()
                counts.append(len(numbers))
                return tf.stack([tf.reshape(tf.cast(one, tf.float32), []) for one in numbers])

            vector = tf.cond(self._flag(graph), taken, lambda: tf.zeros([0]))
            vector._trueup_count = counts[-1]
            return [vector]

    def _flag(self, graph: Any) -> Any:
        found = self._flags.get(graph)
        if found is None:
            counter, every = (one.read_value() for one in self._told())
            found = (every > 0) & tf.equal(tf.math.floormod(counter, tf.maximum(every, 1)), 0)
            self._flags[graph] = found
        return found

    def add(self, numbers: Numbers, made: Made, *, sampled: bool = True) -> None:
        if not len(numbers):
            return
        with record.stop_recording():
            counts = [getattr(one, "_trueup_count", 1) for one in numbers]
            flat = [tf.reshape(tf.cast(read(one), tf.float32), [-1]) for one in numbers]
            self._waiting.append((tf.concat(flat, 0), sum(counts), made, sampled and _graph() is not None))

    def send(self) -> list[Block] | None:
        waiting, blocks, graph = self._waiting, self._host, _graph()
        self._waiting, self._host = [], []
        if graph is None:
            for vector, _, made, _ in waiting:
                blocks += made(vector.numpy().astype(np.float64))
            self._ended()
            return blocks
        parts = [[one for one in waiting if one[3] is kind] for kind in (False, True)]
        flag = tf.cast(self._flag(graph), tf.float32)
        vectors = [tf.concat([one[0] for one in part], 0) if part else tf.zeros([0]) for part in parts]
        counted = tf.identity(self._told()[0].assign_add(1))
        tap(graph, [flag, *vectors, counted], partial(self._arrived, blocks, parts))
        return None

    def _arrived(self, blocks: Sequence[Block], parts: Sequence[Any], flag: Any, each: Any, some: Any, counted: Any) -> None:
        """Take what a graph computed in a step; on whatever thread executes."""
        try:
            self._stands = int(counted), self._stands[1]
            if not self._listener.paused:
                found = list(blocks)
                for part, got in zip(parts, (each, some), strict=True):
                    values, at = np.array(got, np.float64), 0
                    for _, count, made, sampled in part:
                        if flag or not sampled:
                            found += made(values[at : at + count])
                            at += count
                self._listener.arrived(found)
            self._listener.ended()
            self.align()
        except Exception as error:  # noqa: BLE001 - the training goes on
            self._listener.failed(error, "a step in a function")

    def _ended(self) -> None:
        self._stand(self._listener.step + 1, self._stands[1])

    def drain(self) -> None:
        """Nothing is under way between steps."""

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """No tape sees what is computed, and no capture of a step records it."""
        session = running_of("tensorflow").session
        state = None if session is None else session.threads.state
        before = state is not None and state.busy
        with record.stop_recording():
            if state is not None:
                state.busy = True
            try:
                yield
            finally:
                if state is not None:
                    state.busy = before

    # ---------------------------------------------------------------- functions and layers
    def _function(self, original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return original(function, *args, **kwargs)
        compiled = bool(function._jit_compile)
        if not self._depth and tf.executing_eagerly():
            self.guarded("a step's beginning", self._listener.begins, self._models[0] if self._models else None)
            if not compiled and self._single():
                self.guarded("a function's beginning", self._told)
        self._depth += 1
        if compiled:
            self._compiled.append(function)
        try:
            return original(function, *args, **kwargs)
        finally:
            self._depth -= 1
            if compiled:
                self._compiled.pop()

    def _called(self, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        taped = threading.get_ident() == self._thread and record.could_possibly_record() and not symbolic(args, kwargs)
        if not taped or not self._reads():
            if taped and self._listener.paused and not self._depth and not self._running and tf.executing_eagerly():
                self.guarded("a step's beginning", self._listener.begins, self._models[0] if self._models else None)
            return original(layer, *args, **kwargs)
        if not self._running:
            self.guarded("a model", self._given, layer, (*args, *kwargs.values()))
        self._running.append(self._layers.scopes.get(id(layer), ""))
        try:
            result = original(layer, *args, **kwargs)
        finally:
            self._running.pop()
        if self.sampled:
            self.guarded("a layer's output", self._layers.ran, layer, args, result)
        return result

    def _given(self, layer: Any, given: Sequence[Any]) -> None:
        if not any(layer is one for one in self._models):
            if self._complete or id(layer) in self._layers.scopes or not has_weights(layer):
                return
            self._adopt(layer)
        if _graph() is None:
            self._listener.begins(layer)
        tensors = [one for one in tf.nest.flatten(given) if isinstance(one, tf.Tensor) and one.shape.rank]
        words = next((one for one in tensors if one.dtype in (tf.int64, tf.int32)), None)
        self._words = self._words if words is None else tf.cast(tf.size(words), tf.float32)
        self._samples = tf.cast(tf.shape(tensors[0])[0], tf.float32) if tensors else self._samples

    def _adopt(self, model: Any) -> None:
        many = f"{len(self._models)}." if self._models else ""  # the second of two models: a discriminator
        self._models.append(model)
        for name, layer in layers_of(model):
            self._layers.add(f"{many}{name}", layer)

    def _attends(self, original: Any, query: Any, key: Any, *rest: Any, **kwargs: Any) -> Any:
        if self._running and self.sampled and self._reads():
            named = dict(zip(("value", "bias", "mask", "scale", "is_causal"), rest, strict=False)) | kwargs
            self.guarded("attention", self._layers.logits, self._running[-1], query, key, named)
        return original(query, key, *rest, **kwargs)

    # ---------------------------------------------------------------- the loss
    def _differentiates(self, original: Any, tape: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tape, target, *args, **kwargs)
        if threading.get_ident() == self._thread and self._reads() and not record.could_possibly_record():
            self.guarded("the loss", self._take_loss, target)
        return result

    def _take_loss(self, target: Any) -> None:
        one = tf.nest.flatten(target)[:1]
        if one and isinstance(one[0], tf.Tensor) and one[0].dtype.is_floating and one[0]._id not in self._scaled:
            self._lost(one[0])
        self._scaled = set()

    def _lost(self, loss: Any) -> None:
        if getattr(self._loss, "graph", None) is not getattr(loss, "graph", None):
            self._loss = None
        self.lost(tf.reduce_sum(tf.cast(loss, tf.float32)))

    def _scales(self, original: Any, scaler: Any, loss: Any) -> Any:
        result = original(scaler, loss)
        if isinstance(result, tf.Tensor) and self._reads():
            self.guarded("the loss", self._lost, loss)
            self._scaled.add(result._id)
        return result

    def put_loss(self) -> None:
        if self._loss is not None:
            self.add([self._loss], lambda got: [(LOSS, got)], sampled=False)

    def put_counts(self) -> None:
        self.add([self._counted[0], self._words, self._samples], lambda got: [(COUNTS, got)], sampled=False)
        self._words = self._samples = 0.0

    # ---------------------------------------------------------------- a step
    def parameters(self, optimizer: Any) -> list[Any]:  # noqa: ARG002
        return self._variables

    def gradient(self, parameter: Any) -> Any:
        return self._gradients.get(id(parameter))

    def moment(self, optimizer: Any, parameter: Any, *, second: bool = False) -> Any:
        held = next((found for name in (VARIANCES if second else MOMENTA) if (found := getattr(optimizer, name, None))), None)
        try:
            return None if held is None else held[optimizer._get_variable_index(parameter)]
        except (KeyError, IndexError, TypeError, AttributeError):
            return None

    def rates(self, optimizer: Any) -> list[Any]:
        return [read(optimizer.learning_rate)]

    def copied(self, tensors: Sequence[Any]) -> list[Any]:
        graph = _graph()
        if graph is None:
            return [tf.identity(read(one)) for one in tensors]
        # The branches must agree in rank, not in size: nothing is copied in a step that is not sampled.
        found: Sequence[Any] = tf.cond(
            self._flag(graph), lambda: [tf.identity(read(one)) for one in tensors],
            lambda: [tf.zeros([0] * len(one.shape), _dtype(one)) for one in tensors],
        )  # fmt: skip
        return list(found)

    def _clips(self, original: Any, t_list: Any, clip_norm: Any, *rest: Any, **kwargs: Any) -> Any:
        result = original(t_list, clip_norm, *rest, **kwargs)
        if threading.get_ident() == self._thread and self._reads() and not self._stepping:
            self._clipped.append((result[1], float(clip_norm) if isinstance(clip_norm, (int, float)) else None))
        return result

    def _applies(self, original: Any, optimizer: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        if self._stepping or threading.get_ident() != self._thread or not self.follows(optimizer):
            return original(optimizer, grads, *args, **kwargs)
        if not self._taken():
            return self._within(original, optimizer, grads, args, kwargs)
        grads = list(grads)
        self.guarded("an optimizer's step", self._begins, optimizer, optimizer, grads, args, kwargs)
        result = self._within(original, optimizer, grads, args, kwargs)
        self.guarded("an optimizer's step", self._stepped, optimizer, 0.0)
        return result

    def _taken(self) -> bool:
        """Tell whether a step is taken; say once why not."""
        if self._compiled:
            self._say(XLA.format(name=getattr(self._compiled[0], "_name", "a function")))
        elif not self._single():
            self._say("a step of several replicas (tf.distribute) is not monitored")
        return not self._compiled and self._single()

    def _say(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            say(words)

    def _within(self, original: Any, optimizer: Any, grads: Any, args: Any, kwargs: Any) -> Any:
        """Let an optimizer step; what it calls meanwhile is part of that."""
        self._stepping = True
        try:
            return original(optimizer, grads, *args, **kwargs)
        finally:
            self._stepping = False

    def _scaler_applies(self, original: Any, scaler: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        inner = scaler.inner_optimizer
        if self._stepping or threading.get_ident() != self._thread or not (self.follows(scaler) or self.follows(inner)):
            return original(scaler, grads, *args, **kwargs)
        if not self._taken():
            return self._within(original, scaler, grads, args, kwargs)
        grads = list(grads)
        skipped: list[Any] = []
        self.guarded("a scaled step", self._scaled_begins, scaler, grads, args, kwargs, skipped)
        result = self._within(original, scaler, grads, args, kwargs)
        self.guarded("a scaled step", self._stepped, inner, skipped[0] if skipped else 0.0)
        return result

    def _scaled_begins(self, scaler: Any, grads: Sequence[Any], args: Any, kwargs: Any, skipped: list[Any]) -> None:
        scale = read(scaler.dynamic_scale) if scaler.built else tf.constant(scaler.initial_scale, tf.float32)
        self.add([scale], lambda got: [(SCALE, got)], sampled=False)
        skipped.append(1.0 - tf.cast(scaler.check_finite([one for one in grads if one is not None]), tf.float32))
        unscaled = [None if one is None else one / tf.cast(scale, one.dtype) for one in grads]
        self._begins(scaler.inner_optimizer, scaler, unscaled, args, kwargs)

    def _begins(self, optimizer: Any, outer: Any, grads: Sequence[Any], args: Any, kwargs: Any) -> None:
        if getattr(self._loss, "graph", None) is not _graph():  # of a function that does not step
            self._loss = None
        variables = args[0] if args else kwargs.get("trainable_variables")
        held = list(variables if variables is not None else getattr(outer, "_trainable_variables", ()))
        self._variables = held
        self._gradients = {id(one): gradient for one, gradient in zip(held, grads, strict=False) if gradient is not None}
        if _graph() is None and self._listener.paused:
            return
        for model in self._models:
            for name, layer in layers_of(model):
                for one in getattr(layer, "_trainable_variables", ()):
                    self._names.setdefault(id(one), f"{name}.{one.name}".lstrip("."))
        for one in held:
            self._names.setdefault(id(one), str(getattr(one, "path", one.name)).replace("/", "."))
        if count := getattr(optimizer, "gradient_accumulation_steps", None):
            self._waits = tf.cast(tf.math.floormod(read(optimizer._iterations) + 1, count) != 0, tf.float32)
        stepped = self.stepped_by(optimizer)
        if stepped is None:
            return
        norms, largest = stepped.gradients, None
        clipped: Callable[[Floats], Floats] | None = None
        if (most := getattr(optimizer, "global_clipnorm", None)) and not getattr(optimizer, "clipnorm", None):
            largest, clipped = float(most), lambda got: got * min(1.0, most / max(float(np.linalg.norm(got)), 1e-30))
        elif each := getattr(optimizer, "clipnorm", None):
            clipped = lambda got: np.minimum(got, each)  # noqa: E731
        if most or clipped is not None or getattr(optimizer, "clipvalue", None):
            self._clipped.append((tf.norm(tf.stack(self.kernels.norms(norms))), largest))
        if (value := getattr(optimizer, "clipvalue", None)) and clipped is None:
            norms = [tf.clip_by_value(read(one), -value, value) for one in norms]
        stepped.plan.gradient_norms(self, norms, clipped)
        if self.sampled:
            stepped.plan.compare_with_momentum(self, optimizer, stepped)
            self._copies = self.copied(stepped.parameters)

    def skipped(self, skipped: Any) -> None:
        self.add([tf.cast(skipped, tf.float32)], lambda got: [(SKIPPED, got)], sampled=False)

    def _stepped(self, optimizer: Any, skipped: Any) -> None:
        graph = _graph()
        self._layers.keep(graph)
        if graph is None and self._listener.paused:
            self._copies = []
            self.end(optimizer)
            self._ended()
            return
        self.after(optimizer)
        self._waiting = [one for one in self._waiting if getattr(one[0], "graph", None) is graph]
        self.end(optimizer, skipped=tf.maximum(tf.cast(skipped, tf.float32), self._waits))
        self._gradients, self._variables, self._waits = {}, [], 0.0

    @property
    def idle(self) -> bool:
        return _graph() is None and self._listener.paused

    def finish(self) -> None:
        super().finish()
        self._complete = bool(self._models)


def _dtype(variable: Any) -> Any:
    return getattr(variable, "_value", variable).dtype.base_dtype


def steps_made(optimizer: Any) -> int | None:
    """Return how many steps an optimizer has made: Keras counts them."""
    iterations = getattr(optimizer, "iterations", None)
    return None if iterations is None else int(np.asarray(iterations))


def probe(listener: Listener, wanted: Wanted, models: Sequence[Any], optimizers: Sequence[Any]) -> TensorFlowProbe:
    """Return the probe of this framework."""
    return TensorFlowProbe(listener, wanted, models, optimizers)
