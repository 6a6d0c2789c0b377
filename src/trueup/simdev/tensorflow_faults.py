"""A TensorFlow whose kernels are broken in one way: `inject(fault)` writes wrong numbers into what an operation made.

It stands right before the capture hears of an operation, so what is recorded and what the training goes on with is what the broken
kernel made: a forward is broken where it has executed, a backward in what a gradient function returned. The faults are those of the
simulated accelerator (`trueup.simdev.tables`), where TensorFlow has the operation. Eager execution only.

`plant` breaks a whole process so, by the environment variable `TRUEUP_SIMDEV_FAULT`.
"""

# ruff: noqa: ARG001 - every effect gets all that its phase knows

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from tensorflow.python.eager import context
from tensorflow.python.framework import tensor as tensor_lib

from trueup.foundation.model import TrueupError
from trueup.recording.adapters.tensorflow.gradients import Gradients
from trueup.recording.adapters.tensorflow.operations import PREFIX, Operations
from trueup.recording.adapters.tensorflow.session import running

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


Effect = Callable[..., dict[int, Array] | None]
"""Forward: takes inputs, outputs, attributes and memory, returns wrong values by number of the output. Backward: takes inputs,
gradients made, gradients that came and attributes, returns wrong values by number of the gradient made."""


@dataclass
class Fault:
    """A row of the catalogue."""

    ops: tuple[str, ...]
    phase: str
    effect: Effect


FAULTS: dict[str, Fault] = {}


def fault(name: str, *ops: str, phase: str = "forward") -> Callable[[Effect], Effect]:
    """Register a fault of some operations."""

    def register(effect: Effect) -> Effect:
        FAULTS[name] = Fault(ops, phase, effect)
        return effect

    return register


@dataclass
class Injection:
    """A fault at work."""

    fault: Fault
    fired: list[Fired] = field(default_factory=list)
    memory: dict[Any, Any] = field(default_factory=dict)
    given: dict[int, tuple[list[Array | None], dict[str, Any]]] = field(default_factory=dict)
    """Inputs and attributes of forward calls, by the address of the call: what a broken backward computes with."""

    def heard(self, kind: str, inputs: Any, attrs: Any, outputs: Any) -> None:
        """Break what an operation of a forward or an optimizer made."""
        session = running.session
        if session is None or session.threads.state.busy or session.threads.state.contexts or kind not in self.fault.ops:
            return
        state = session.threads.state
        told = dict(zip(attrs[::2], attrs[1::2], strict=False))
        if self.fault.phase == "backward" or (state.passes and not state.stepping):
            return
        values = [_values(t) if _numeric(t) else None for t in inputs]
        wrong = self.fault.effect(values, [_values(t) for t in outputs], told, self.memory)
        phase = "optimizer" if state.stepping else "forward"
        scope = state.modules[-1].scope if state.modules else ""
        self._write(outputs, wrong, Fired(session.recorder.step, phase, scope, f"{PREFIX}{kind}"))

    def differentiated(
        self, kind: str, forward: Any, inputs: list[Array | None], attrs: dict[str, Any], made: Any, came: Any
    ) -> None:
        """Break what the gradient function of an operation made."""
        session = running.session
        if session is None or kind not in self.fault.ops or self.fault.phase != "backward" or forward is None:
            return
        made = list(made) if isinstance(made, (list, tuple)) else [made]
        healthy = [_values(t).copy() if _numeric(t) else None for t in made]
        wrong = self.fault.effect(inputs, healthy, [_values(t) for t in came if _numeric(t)], attrs)
        self._write(made, wrong, Fired(session.recorder.step, "backward", forward.scope, forward.op))

    def _write(self, tensors: Any, wrong: dict[int, Array] | None, where: Fired) -> None:
        changed = 0.0
        for k, values in (wrong or {}).items():
            memory = _values(tensors[k])
            new = np.asarray(values).astype(memory.dtype).reshape(memory.shape)
            healthy = memory.astype(np.float64)
            changed = max(changed, float(np.linalg.norm(new - healthy)) / max(float(np.linalg.norm(healthy)), 1e-30))
            memory[...] = new
        if changed > NOTICED:
            self.fired.append(where)


@contextmanager
def inject(name: str) -> Iterator[Injection]:
    """Break TensorFlow in one way, under a capture; give what was changed, in order."""
    injection = Injection(FAULTS[name])
    heard, differentiated, of_tape = Operations.heard, Gradients._differentiated, Gradients._of_tape

    def broken(self: Any, op_type: Any, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> None:
        if graph is None:
            kind = op_type.decode() if isinstance(op_type, bytes) else op_type
            injection.heard(kind, inputs, attrs, outputs)
        heard(self, op_type, inputs, attrs, outputs, op_name, graph)

    def asked(self: Any, op_name: str, attrs: Any, num: int, inputs: Any, outputs: Any, out_grads: Any, *rest: Any) -> Any:
        if not context.executing_eagerly():  # a graph is built: there are no values to break
            return of_tape(self, op_name, attrs, num, inputs, outputs, out_grads, *rest)
        known = [_values(t).copy() if _numeric(t) else None for t in inputs or ()]
        results = [_values(t).copy() if _numeric(t) else None for t in outputs or ()]
        injection.given[0] = known, {**dict(zip(attrs[::2], attrs[1::2], strict=False)), "results": results}
        return of_tape(self, op_name, attrs, num, inputs, outputs, out_grads, *rest)

    def wrong(self: Any, kind: str, forward: Any, out_grads: Any, run: Callable[[], Any]) -> Any:
        if not context.executing_eagerly():
            return differentiated(self, kind, forward, out_grads, run)
        inputs, attrs = injection.given.get(0, ([], {}))

        def ran() -> Any:
            result = run()
            injection.differentiated(kind, forward, inputs, attrs, result, out_grads)
            return result

        return differentiated(self, kind, forward, out_grads, ran)

    Operations.heard, Gradients._differentiated, Gradients._of_tape = broken, wrong, asked  # type: ignore[method-assign, assignment]
    try:
        yield injection
    finally:
        Operations.heard, Gradients._differentiated, Gradients._of_tape = heard, differentiated, of_tape  # type: ignore[method-assign]


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
    return (isinstance(value, tensor_lib.Tensor) and value.dtype.is_floating) or (
        isinstance(value, tensor_lib.Tensor) and value.dtype.is_integer
    )


def _values(tensor: Any) -> Array:
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
    stepping = running.session is not None and running.session.threads.state.stepping
    return {0: outputs[0] * np.float32(1.05)} if outputs[0].ndim > 1 and stepping else None
