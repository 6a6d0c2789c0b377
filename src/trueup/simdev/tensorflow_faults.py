"""A TensorFlow whose kernels are broken in one way: `inject(fault)` writes wrong numbers into what an operation made.

It stands right before the capture hears of an operation, so what is recorded and what the training goes on with is what the broken
kernel made: a forward is broken where it has executed, a backward in what a gradient function returned. In a ``tf.function`` an
operation in Python stands behind the broken one, in the graph that the capture builds (`recording/adapters/tensorflow/functions`),
and all that follows reads its result. The faults are those of the simulated accelerator (`trueup.simdev.tables`), where TensorFlow
has the operation. Sessions of TensorFlow 1 and what XLA compiles stay whole.

`plant` breaks a whole process so, by the environment variable `TRUEUP_SIMDEV_FAULT`.
"""

# ruff: noqa: ARG001 - every effect gets all that its phase knows

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context, record
from tensorflow.python.framework import ops
from tensorflow.python.framework import tensor as tensor_lib
from tensorflow.python.ops import script_ops

from trueup.foundation.model import TrueupError
from trueup.recording.adapters.tensorflow.context import number_of
from trueup.recording.adapters.tensorflow.gradients import PREFIX, Gradients, Operations
from trueup.recording.adapters.tensorflow.session import running
from trueup.simdev.tables import Catalogue, Defect

Array = np.ndarray[Any, Any]
NOTICED = 2e-6
"""A relative L2 change below this nobody could tell from rounding: the fault counts as one from the first call above it."""


@dataclass
class Fired:
    """Where a fault has changed a result."""

    step: int
    phase: str
    scope: str
    op: str


Place: TypeAlias = "tuple[str, str, str]"
"""Phase, scope and operation."""
FAULTS = Catalogue()
"""Each effect under its fault's name. Forward: it takes inputs, outputs, attributes and memory, and returns wrong values by number
of the output. Backward: it takes inputs, gradients made, gradients that came and attributes, and returns wrong values by number of
the gradient made."""
fault = FAULTS.fault


@dataclass
class Injection:
    """A fault at work."""

    fault: Defect
    fired: list[Fired] = field(default_factory=list)
    memory: dict[Any, Any] = field(default_factory=dict)
    given: tuple[list[Any], dict[str, Any]] = field(default_factory=lambda: ([], {}))
    """Inputs and attributes, results among them, of the forward call whose gradient function runs."""
    kernels: list[Any] = field(default_factory=list)
    """Functions that stand in graphs; TensorFlow's registry forgets one that nobody holds."""

    def heard(self, kind: str, inputs: Any, attrs: Any, outputs: Any, graph: Any) -> list[Any] | None:
        """Break what an operation of a forward or an optimizer made; return what stands for it in a graph."""
        session = running.session
        if session is None or session.threads.state.busy or session.threads.state.contexts or kind not in self.fault.ops:
            return None
        state = session.threads.state
        if self.fault.phase == "backward" or (state.passes and not state.stepping):
            return None
        told = {**_named(attrs), "stepping": state.stepping}
        phase = "optimizer" if state.stepping else "forward"
        place = phase, state.modules[-1].scope if state.modules else "", f"{PREFIX}{kind}"

        def effect(inputs: list[Array | None], outputs: list[Array | None]) -> dict[int, Array] | None:
            return self.fault.effect(inputs, outputs, told, self.memory)

        if graph is None:
            values = [_values(t) if _numeric(t) else None for t in inputs]
            self._write(outputs, effect(values, [_values(t) for t in outputs]), place)
            return None
        if not session.programs.follows(graph):
            return None
        return self._in_graph([inputs, outputs], effect, place)

    def differentiated(self, kind: str, forward: Any, made: Any, came: Any) -> Any:
        """Break what the gradient function of an operation made; return what the pass goes on with."""
        session = running.session
        if session is None or kind not in self.fault.ops or self.fault.phase != "backward" or forward is None:
            return made
        inputs, attrs = self.given
        results = list(attrs.get("results", ()))
        place, one = ("backward", forward.scope, forward.op), not isinstance(made, (list, tuple))
        gradients = [made] if one else list(made)

        def effect(
            inputs: list[Array | None], results: list[Array | None], came: list[Array | None], made: list[Array | None]
        ) -> dict[int, Array] | None:
            return self.fault.effect(inputs, made, [one for one in came if one is not None], {**attrs, "results": results})

        if context.executing_eagerly():
            groups = [[_values(t).copy() if _numeric(t) else None for t in group] for group in (inputs, results, came, gradients)]
            self._write(gradients, effect(*groups), place)
            return made
        if not session.programs.follows(session.graph_here()):
            return made
        gradients = self._in_graph([inputs, results, list(came), gradients], effect, place)
        return gradients[0] if one else gradients

    def _in_graph(self, groups: list[Any], effect: Callable[..., dict[int, Array] | None], place: Place) -> list[Any]:
        """Put an operation in Python behind the tensors of the last group; return the tensors that stand for these."""
        session, flat = running.session, [t for group in groups for t in group if _numeric(t)]
        assert session is not None
        last = [t for t in groups[-1] if _numeric(t)]

        def kernel(*arrays: Array) -> list[Array]:
            left = iter(arrays)
            given = [[np.array(next(left)) if _numeric(t) else None for t in group] for group in groups]
            self._write(given[-1], effect(*given), place)
            return [one for one in given[-1] if one is not None]

        state = session.threads.state
        before, state.busy = state.busy, True
        graph = last[0].graph
        try:
            with record.stop_recording(), graph.gradient_override_map({"PyFunc": PASSES}):
                made = script_ops.numpy_function(kernel, flat, [t.dtype for t in last], name=PASSES)
        finally:
            state.busy = before
        self.kernels.append(kernel)
        stands = iter(made if isinstance(made, (list, tuple)) else [made])
        result = [next(stands) if _numeric(t) else t for t in groups[-1]]
        for old, new in zip(groups[-1], result, strict=True):
            if new is not old:
                new.set_shape(old.shape)
        return result

    def _write(self, tensors: Any, wrong: dict[int, Array] | None, place: Place) -> None:
        changed = 0.0
        for k, values in (wrong or {}).items():
            memory = tensors[k] if isinstance(tensors[k], np.ndarray) else _values(tensors[k])
            new = np.asarray(values).astype(memory.dtype).reshape(memory.shape)
            healthy = memory.astype(np.float64)
            changed = max(changed, float(np.linalg.norm(new - healthy)) / max(float(np.linalg.norm(healthy)), 1e-30))
            memory[...] = new
        if changed > NOTICED and running.session is not None:
            self.fired.append(Fired(running.session.recorder.step, *place))


PASSES = "TrueupFault"
"""The gradient of a broken kernel in a graph: what came goes on to the tensors that it stands for."""


def _passes(op: Any, *came: Any) -> list[Any]:
    return [*[None] * (len(op.inputs) - len(came)), *came]


ops.RegisterGradient(PASSES)(_passes)


@contextmanager
def inject(name: str) -> Iterator[Injection]:
    """Break TensorFlow in one way, under a capture; give what was changed, in order."""
    injection = Injection(FAULTS[name])
    heard, differentiated = Operations.heard, Gradients._differentiated
    of_tape, looked_up = Gradients._of_tape, Gradients._looked_up

    def broken(self: Any, op_type: Any, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> Any:
        kind = op_type.decode() if isinstance(op_type, bytes) else op_type
        stands = injection.heard(kind, inputs, attrs, outputs, graph)
        heard(self, op_type, inputs, attrs, outputs if stands is None else stands, op_name, graph)
        if stands is not None and (node := self._session.gradients.maker(stands[0])) is not None:
            self._session.gradients._by_output.update({number_of(tensor): node for tensor in outputs})  # a graph asks for these
        return stands

    def asked(self: Any, op_name: str, attrs: Any, num: int, inputs: Any, outputs: Any, out_grads: Any, *rest: Any) -> Any:
        injection.given = _kept(inputs), {**_named(attrs), "results": _kept(outputs)}
        return of_tape(self, op_name, attrs, num, inputs, outputs, out_grads, *rest)

    def looked(self: Any, original: Callable[..., Any], op: Any) -> Any:
        if op.type == "PyFunc" and op.name.rpartition("/")[2].startswith(PASSES):
            return original(op)
        found = looked_up(self, original, op)
        if found is None or op.type not in injection.fault.ops:
            return found

        def gradient(op: Any, *out_grads: Any) -> Any:
            attrs = {name: op.get_attr(name) for name in op.node_def.attr if not name.startswith("_")}
            injection.given = list(op.inputs), {**attrs, "results": list(op.outputs)}
            return found(op, *out_grads)

        return gradient

    def wrong(self: Any, kind: str, forward: Any, out_grads: Any, run: Callable[[], Any]) -> Any:
        return differentiated(
            self, kind, forward, out_grads, lambda: injection.differentiated(kind, forward, run(), out_grads)
        )  # fmt: skip

    Operations.heard, Gradients._differentiated = broken, wrong  # type: ignore[method-assign]
    Gradients._of_tape, Gradients._looked_up = asked, looked  # type: ignore[method-assign, assignment]
    try:
        yield injection
    finally:
        Operations.heard, Gradients._differentiated = heard, differentiated  # type: ignore[method-assign]
        Gradients._of_tape, Gradients._looked_up = of_tape, looked_up  # type: ignore[method-assign]


planted: list[Injection] = []
"""Faults of the whole process."""
_held = ExitStack()


def plant(names: str) -> None:
    """Break TensorFlow until the process ends, by names of `FAULTS` with commas between; raises TrueupError for an unknown one."""
    for name in filter(None, map(str.strip, names.split(","))):
        if name not in FAULTS:
            raise TrueupError(f"TensorFlow's simulated device has no fault {name!r}; it has {', '.join(FAULTS)}")
        planted.append(_held.enter_context(inject(name)))


def _numeric(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (
        isinstance(value, tensor_lib.Tensor) and (value.dtype.is_floating or value.dtype.is_integer)
    )


def _named(attrs: Any) -> dict[str, Any]:
    """Return attributes by name; a graph has them as messages."""
    pairs, message = zip(attrs[::2], attrs[1::2], strict=False), attr_value_pb2.AttrValue
    return {name: getattr(one, one.WhichOneof("value")) if isinstance(one, message) else one for name, one in pairs}


def _kept(tensors: Any) -> list[Any]:
    """Return tensors with values of their own, for a kernel may write into these; those of a graph as they are."""
    if not context.executing_eagerly():
        return list(tensors or ())
    return [_values(t).copy() if _numeric(t) else None for t in tensors or ()]


def _values(tensor: Any) -> Array:
    if isinstance(tensor, np.ndarray):
        return tensor
    return np.asarray(tensor._numpy_internal())


def _last(made: list[Any], came: list[Array]) -> int | None:
    return next((k for k, gradient in enumerate(made) if gradient is not None), None)


# ---------------------------------------------------------------------------------------------------------------- products


@fault("matmul-bf16-accumulation", "MatMul")
def _bf16(inputs: Any, outputs: Any, attrs: Any, memory: Any) -> dict[int, Array] | None:
    a = inputs[0].T if attrs.get("transpose_a") else inputs[0]
    b = inputs[1].T if attrs.get("transpose_b") else inputs[1]
    total = np.zeros(outputs[0].shape, ml_dtypes.bfloat16)
    for start in range(0, a.shape[1], 4):
        part = (a[:, start : start + 4] @ b[start : start + 4]).astype(ml_dtypes.bfloat16)
        total = (total + part).astype(ml_dtypes.bfloat16)
    return {0: total.astype(np.float32)}


@fault("matmul-weight-grad-last-row", "MatMul", phase="backward")
def _matmul_grad(inputs: Any, made: Any, came: Any, attrs: Any) -> dict[int, Array] | None:
    if len(made) < 2 or made[1] is None or inputs[0] is None or attrs.get("transpose_a") or attrs.get("transpose_b"):
        return None
    return {1: inputs[0][:-1].T @ came[0][:-1]}


@fault("conv-weight-grad-scaled", "Conv2D", "DepthwiseConv2dNative", phase="backward")
def _conv_grad(inputs: Any, made: Any, came: Any, attrs: Any) -> dict[int, Array] | None:
    return None if made[1] is None else {1: made[1] * np.float32(1.003)}


@fault("conv-last-channel-stale", "Conv2D")
def _conv(inputs: Any, outputs: Any, attrs: Any, memory: Any) -> dict[int, Array]:
    wrong = outputs[0].copy()
    wrong[..., -1] = wrong[..., 0]
    return {0: wrong}


# ------------------------------------------------------------------------------------------------------------- activations


@fault("softmax-backward", "Softmax", phase="backward")
def _softmax(inputs: Any, made: Any, came: Any, attrs: Any) -> dict[int, Array]:
    return {0: came[0] * attrs["results"][0]}


@fault("sigmoid-table-lookup", "Sigmoid")
def _sigmoid(inputs: Any, outputs: Any, attrs: Any, memory: Any) -> dict[int, Array]:
    return {0: (np.round(outputs[0].astype(np.float64) * 512) / 512)}


@fault("tanh-backward-without-square", "Tanh", phase="backward")
def _tanh(inputs: Any, made: Any, came: Any, attrs: Any) -> dict[int, Array]:
    return {0: came[0] * (1 - np.abs(attrs["results"][0]))}


@fault("relu-backward-passes-all", "Relu", "Relu6", phase="backward")
def _relu(inputs: Any, made: Any, came: Any, attrs: Any) -> dict[int, Array]:
    return {0: came[0]}


@fault("erf-tanh-approximation", "Erf", "Erfc")
def _erf(inputs: Any, outputs: Any, attrs: Any, memory: Any) -> dict[int, Array]:
    x = inputs[0].astype(np.float64)
    near = np.tanh(2 / np.sqrt(np.pi) * (x + 0.0895 * x**3))
    return {0: np.where(np.abs(outputs[0] - near) < 0.1, near, 1 - near)}


@fault("cross-entropy-half-sum", "SparseSoftmaxCrossEntropyWithLogits")
def _cross_entropy(inputs: Any, outputs: Any, attrs: Any, memory: Any) -> dict[int, Array]:
    return {0: outputs[0].astype(np.float16).astype(np.float32) + 0.01}


# ------------------------------------------------------------------------------------------------- gathers, norms, buffers


@fault("embedding-shifted-row", "GatherV2", "ResourceGather")
def _gather(inputs: Any, outputs: Any, attrs: Any, memory: Any) -> dict[int, Array] | None:
    if outputs[0].ndim < 2 or outputs[0].dtype.kind != "f":
        return None
    wrong = outputs[0].copy().reshape(-1, outputs[0].shape[-1])
    wrong[-1] = np.roll(wrong[-1], 1)
    return {0: wrong}


@fault("batch-norm-variance", "FusedBatchNormV3")
def _batch_norm(inputs: Any, outputs: Any, attrs: Any, memory: Any) -> dict[int, Array]:
    return {0: outputs[0] * np.float32(0.999)}


@fault("batch-norm-backward", "FusedBatchNormV3", phase="backward")
def _batch_norm_grad(inputs: Any, made: Any, came: Any, attrs: Any) -> dict[int, Array]:
    return {0: made[0] + np.float32(0.1) * came[0].mean(axis=(0, 1, 2))}


@fault("mean-loses-last", "Mean")
def _mean(inputs: Any, outputs: Any, attrs: Any, memory: Any) -> dict[int, Array] | None:
    return {0: outputs[0] * np.float32(0.99)} if outputs[0].ndim else None


@fault("max-pool-backward-all-ties", "MaxPool", phase="backward")
def _max_pool(inputs: Any, made: Any, came: Any, attrs: Any) -> dict[int, Array] | None:
    return None if made[0] is None else {0: np.roll(made[0], 1, axis=2)}


@fault("stale-buffer-reuse", "BiasAdd")
def _stale(inputs: Any, outputs: Any, attrs: Any, memory: Any) -> dict[int, Array] | None:
    fresh = outputs[0]
    left, memory[fresh.shape] = memory.get(fresh.shape), fresh.copy()
    if left is None or fresh.size < 8:
        return None
    tail = fresh.size * 3 // 4
    return {0: np.concatenate([fresh.reshape(-1)[:tail], left.reshape(-1)[tail:]])}


# -------------------------------------------------------------------------------------------------------------- optimizers


@fault("optimizer-root-of-wrong-moment", "Sqrt")
def _root(inputs: Any, outputs: Any, attrs: Any, memory: Any) -> dict[int, Array] | None:
    return {0: outputs[0] * np.float32(1.05)} if outputs[0].ndim > 1 and attrs["stepping"] else None
