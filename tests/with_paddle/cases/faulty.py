"""A Paddle whose kernels are broken in one way: `inject(fault)` replaces operators before a capture stands in front of them.

The faults are those of the simulated accelerator (`trueup.simdev.tables`), where Paddle has the operator. A forward is broken by
writing the wrong numbers into the memory of its result, as a broken kernel would, so that what the backward saved is wrong, too; a
backward by writing into what a GradNode made, in a post-hook that was put there before the capture's. A recurrent layer's node
takes no post-hook: there the gradients of its weights are changed where they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import paddle
from paddle import _C_ops
from scipy.special import erf

from trueup.recording.adapters.paddle.session import running
from trueup.recording.engine.replacing import Sweep
from trueup.simdev.tables import Catalogue, Defect

Array = np.ndarray[Any, Any]
NOTICED = 2e-6
"""A relative L2 change below this nobody could tell from rounding: the fault counts as one from the first call above it."""


@dataclass
class Fired:
    """Where a fault has changed a result: the forward call in whose forward or backward it did."""

    step: int
    phase: str
    seq: int


@dataclass
class Call:
    """One execution of a faulted operator."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    before: list[Array]
    """Values of the tensor arguments before it ran."""
    outputs: list[paddle.Tensor]
    original: Callable[..., Any]
    memory: dict[Any, Any]

    def __getitem__(self, k: int) -> Array:
        return self.before[k]


FAULTS = Catalogue()
"""Each effect under its fault's name, with operators of ``paddle._C_ops``. Forward: it takes the call, and returns wrong values by
number of the output (tensors in order). Backward: it takes the call, the gradients made and those that came, and returns wrong
values by number of the gradient made."""
fault = FAULTS.fault


@dataclass
class Injection:
    """A fault at work."""

    fault: Defect
    fired: list[Fired] = field(default_factory=list)
    memory: dict[Any, Any] = field(default_factory=dict)
    replayed: int = -1
    """Where no capture runs: the call that is executed again."""
    spares_cpu: bool = False
    """Whether calls on the CPU stay whole: only another device is broken."""
    _returned: list[paddle.Tensor] = field(default_factory=list)

    def broken(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in the place of an operator."""

        def run(*args: Any, **kwargs: Any) -> Any:
            given = _tensors((*args, *kwargs.values()))
            before = [_values(t).copy() for t in given]
            result = original(*args, **kwargs)
            call = Call(args, kwargs, before, _tensors(result), original, self.memory)
            place = self._place()
            if place is None or any(t.dtype == paddle.float64 for t in given):  # float64 is whole: it tells the truth
                return result
            if self.spares_cpu and all(t.place.is_cpu_place() for t in call.outputs):
                return result
            if self.fault.phase == "backward":
                self._break_backward(call, place, given)
            elif (wrong := self.fault.effect(call)) is not None:
                self._write(call.outputs, wrong, Fired(place[0], "forward", place[1]))
            return result

        return run

    def _place(self) -> tuple[int, int] | None:
        session = running.session
        if session is None:
            return 0, self.replayed
        state = session.threads.state
        if state.busy or not state.contexts:  # our own work, or the forward of a recomputation that nobody records
            return None
        return session.recorder.step, state.contexts[-1].call.seq

    def _break_backward(self, call: Call, place: tuple[int, int], given: list[paddle.Tensor]) -> None:
        node = next((t.grad_fn for t in call.outputs if not t.stop_gradient), None)
        if node is None:
            return
        where = Fired(place[0], "backward", place[1])
        if node.name() == "RnnGradNode":
            for k, tensor in enumerate(given):
                if not tensor.stop_gradient and tensor.is_leaf:
                    tensor._register_grad_hook(self._on_leaf(call, k, where))
            return

        def hook(made: tuple[Any, ...], came: tuple[Any, ...]) -> tuple[Any, ...]:
            gradients = [t if isinstance(t, paddle.Tensor) and t._is_initialized() else None for t in made]
            healthy = [None if t is None else _values(t) for t in gradients]
            wrong = self.fault.effect(call, healthy, [_values(t) for t in came if _tensors(t)])
            if wrong is not None:
                self._write(gradients, wrong, where)
            while self._returned:  # Paddle 3.3 never frees what a post-hook gave back
                self._returned.pop()._clear()
            self._returned += [t for t in made if isinstance(t, paddle.Tensor)]
            return made

        node._register_post_hook(hook)

    def _on_leaf(self, call: Call, k: int, where: Fired) -> Callable[[Any], None]:
        def hook(gradient: Any) -> None:
            wrong = self.fault.effect(call, k, _values(gradient))
            if wrong is not None:
                self._write([gradient], wrong, where)

        return hook

    def _write(self, tensors: list[Any], wrong: dict[int, Array], where: Fired) -> None:
        changed = 0.0
        for k, values in wrong.items():
            if tensors[k] is None:
                continue
            memory = _values(tensors[k])
            new = np.asarray(values).astype(memory.dtype).reshape(memory.shape)
            healthy = memory.astype(np.float64)
            changed = max(changed, float(np.linalg.norm(new - healthy) / max(np.linalg.norm(healthy), 1e-30)))
            memory[...] = new
        if changed > NOTICED:
            self.fired.append(where)


@contextmanager
def inject(name: str) -> Iterator[Injection]:
    """Break Paddle in one way; give what was changed, in order."""
    injection = Injection(FAULTS[name])
    with ExitStack() as stack:
        pairs = [(getattr(_C_ops, op), injection.broken(getattr(_C_ops, op))) for op in injection.fault.ops]
        sweep = Sweep(pairs)
        sweep.install()
        stack.callback(sweep.remove)
        yield injection


class _Window:
    """The memory of a tensor, to be written."""

    def __init__(self, tensor: paddle.Tensor) -> None:
        name = str(tensor.dtype).rpartition(".")[2]
        size = tensor.element_size()
        self._tensor = tensor
        kind = np.dtype("u2") if name == "bfloat16" else np.dtype(name)
        self.__array_interface__ = {
            "version": 3, "typestr": kind.str, "shape": tuple(tensor.shape), "data": (tensor.data_ptr(), False),
            "strides": tuple(s * size for s in tensor.strides),
        }  # fmt: skip


def _values(tensor: paddle.Tensor) -> Array:
    return np.asarray(_Window(tensor))


def _tensors(value: Any) -> list[paddle.Tensor]:
    if isinstance(value, paddle.Tensor):
        return [value] if value._is_initialized() else []
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


# ---------------------------------------------------------------------------------------------------------------- products


@fault("addmm-bf16-accumulation", "linear", "matmul")
def _bf16_accumulation(call: Call) -> dict[int, Array] | None:
    a, b = call[0], call[1]
    if call.keywords.get("transpose_y") or (len(call.arguments) > 3 and any(call.arguments[2:4])):
        return None
    k = a.shape[-1]
    if k % 64 or b.shape[-2] != k:
        return None
    total = np.zeros((*a.shape[:-1], b.shape[-1]), ml_dtypes.bfloat16)
    for start in range(0, k, 16):
        total = (total + (a[..., start : start + 16] @ b[..., start : start + 16, :]).astype(ml_dtypes.bfloat16)).astype(
            ml_dtypes.bfloat16
        )
    return {0: total.astype(np.float32) + (call[2] if len(call.before) > 2 else 0)}


@fault("conv-padding-replicates-edge", "conv2d")
def _conv_padding(call: Call) -> dict[int, Array] | None:
    strides, paddings, *rest = call.arguments[2:]
    if not any(paddings):
        return None
    sides = [(0, 0), (0, 0), *[(p, p) for p in paddings[-2:]]]
    padded = paddle.to_tensor(np.pad(call[0], sides, mode="edge"))
    with paddle.no_grad():
        return {0: _values(call.original(padded, call.arguments[1].detach(), strides, [0, 0], *rest)).copy()}


@fault("conv-weight-grad-last-tile", "conv2d", phase="backward")
def _conv_weight_grad(call: Call, made: list[Array | None], came: list[Array]) -> dict[int, Array] | None:
    if made[1] is None or len(call[0]) < 2:
        return None
    x, w = paddle.to_tensor(call[0][:-1]), paddle.to_tensor(call[1])
    with paddle.enable_grad():
        w.stop_gradient = False
        out = call.original(x, w, *call.arguments[2:])
        paddle.autograd.backward([out], [paddle.to_tensor(came[0][:-1])])
    return {1: w.grad.numpy()}


# ------------------------------------------------------------------------------------------------------------- activations


@fault("gelu-tanh-for-erf", "gelu")
def _gelu(call: Call) -> dict[int, Array]:
    x = call[0].astype(np.float64)
    return {0: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))}


@fault("gelu-backward", "gelu", phase="backward")
def _gelu_backward(call: Call, made: list[Array], came: list[Array]) -> dict[int, Array]:
    return {0: came[0] * 0.5 * (1 + erf(call[0] / np.sqrt(2)))}


@fault("tanh-table-lookup", "tanh")
def _tanh_table(call: Call) -> dict[int, Array]:
    scaled = call[0].astype(np.float64) * 16
    left = np.floor(scaled)
    low, high = np.tanh(left / 16), np.tanh((left + 1) / 16)
    return {0: low + (high - low) * (scaled - left)}


@fault("hardswish-backward-slope", "hardswish", phase="backward")
def _hardswish_backward(call: Call, made: list[Array], came: list[Array]) -> dict[int, Array]:
    return {0: came[0] * np.clip(call[0] / 6 + 0.5, 0, 1)}  # without the derivative of the gate


@fault("softmax-backward", "softmax", phase="backward")
def _softmax_backward(call: Call, made: list[Array], came: list[Array]) -> dict[int, Array]:
    return {0: came[0] * _values(call.outputs[0])}


@fault("log-softmax-half-sum", "cross_entropy_with_softmax")
def _half_sum(call: Call) -> dict[int, Array]:
    x, labels = call[0].astype(np.float64), call[1].reshape(-1)
    shifted = x - x.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1, keepdims=True).astype(np.float16).astype(np.float64)
    logs = shifted - np.log(total)
    return {1: -logs[np.arange(len(labels)), labels][:, None]}


@fault("log-softmax-backward", "cross_entropy_with_softmax", phase="backward")
def _cross_entropy_backward(call: Call, made: list[Array], came: list[Array]) -> dict[int, Array]:
    probabilities = _values(call.outputs[0])
    return {0: made[0] - 0.5 * probabilities * came[-1].reshape(-1, 1)}


@fault("dropout-no-rescale", "dropout")
def _dropout(call: Call) -> dict[int, Array] | None:
    probability, test = call.arguments[2], call.arguments[3]
    return None if test or not probability else {0: _values(call.outputs[0]) * (1 - probability)}


# ------------------------------------------------------------------------------------------------------- gathers and moves


@fault("embedding-backward-duplicates", "embedding", phase="backward")
def _embedding(call: Call, made: list[Array | None], came: list[Array]) -> dict[int, Array] | None:
    k = next((k for k, gradient in enumerate(made) if gradient is not None), None)
    if k is None:
        return None
    wrong = np.zeros_like(made[k])
    wrong[call[0].reshape(-1)] = came[0].reshape(-1, came[0].shape[-1])
    return {k: wrong}


@fault("transposed-view-copy", "reshape")
def _transposed_copy(call: Call) -> dict[int, Array] | None:
    x = call.arguments[0]
    if x.is_contiguous() or call.outputs[0].data_ptr() == x.data_ptr():
        return None
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    return {0: call[0].transpose(order).reshape(call.outputs[0].shape)}


@fault("stale-buffer-reuse", "add", "linear")
def _stale(call: Call) -> dict[int, Array] | None:
    fresh = _values(call.outputs[0])
    if fresh.size < 16 or fresh.dtype != np.float32:
        return None
    left, call.memory[fresh.shape] = call.memory.get(fresh.shape), fresh.copy()
    if left is None:
        return None
    tail = fresh.size * 3 // 4
    return {0: np.concatenate([fresh.reshape(-1)[:tail], left.reshape(-1)[tail:]])}


@fault("max-pool-ties", "pool2d", "max_pool2d_with_index", phase="backward")
def _max_pool(call: Call, made: list[Array], came: list[Array]) -> dict[int, Array] | None:
    kernel, strides, padding = call.arguments[1:4]
    if not any(isinstance(a, str) and a == "max" for a in call.arguments):
        return None
    kernel, strides, padding = ([int(v) for v in values] for values in (kernel, strides, padding))
    x, gradient = call[0], came[0]
    ph, pw = padding[0], padding[-1]
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph + kernel[0]), (pw, pw + kernel[1])), constant_values=-np.inf)
    wrong = np.zeros(padded.shape, np.float64)
    n, c = np.indices(x.shape[:2])
    for row in range(gradient.shape[2]):
        for column in range(gradient.shape[3]):
            top, side = row * strides[0], column * strides[1]
            window = padded[:, :, top : top + kernel[0], side : side + kernel[1]].reshape(*x.shape[:2], -1)
            last = window.shape[2] - 1 - window[:, :, ::-1].argmax(2)
            np.add.at(wrong, (n, c, top + last // kernel[1], side + last % kernel[1]), gradient[:, :, row, column])
    return {0: wrong[:, :, ph : ph + x.shape[2], pw : pw + x.shape[3]]}


# ------------------------------------------------------------------------------------------------------------------- norms


@fault("layer-norm-epsilon", "layer_norm")
def _layer_norm(call: Call) -> dict[int, Array]:
    x = call[0].astype(np.float64)
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
    return {0: y * call[1] + call[2]}


@fault("layer-norm-backward", "layer_norm", phase="backward")
def _layer_norm_backward(call: Call, made: list[Array], came: list[Array]) -> dict[int, Array]:
    x, gradient = call[0].astype(np.float64), came[0] * call[1]
    rstd = 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return {0: rstd * (gradient - gradient.mean(-1, keepdims=True))}


@fault("batch-norm-running-variance-biased", "batch_norm")
def _running_variance(call: Call) -> dict[int, Array] | None:
    if call.arguments[5]:
        return None
    n = call[0].size // call[0].shape[1]
    kept = call[2] * call.arguments[6]
    return {2: kept + (_values(call.outputs[2]) - kept) * ((n - 1) / n)}


@fault("batch-norm-backward", "batch_norm", phase="backward")
def _batch_norm_backward(call: Call, made: list[Array | None], came: list[Array]) -> dict[int, Array] | None:
    if made[0] is None or call.arguments[5]:
        return None
    x, gradient = call[0].astype(np.float64), came[0]
    axes = (0, *range(2, x.ndim))
    scale = (call[3] / np.sqrt(x.var(axes) + call.arguments[7])).reshape(1, -1, *[1] * (x.ndim - 2))
    return {0: scale * (gradient - gradient.mean(axes, keepdims=True))}


# --------------------------------------------------------------------------------------------------------------- recurrent


@fault("lstm-backward-cell-gate", "rnn", phase="backward")
def _lstm_cell_gate(call: Call, k: int, gradient: Array) -> dict[int, Array] | None:
    wrong = gradient.copy()
    quarter = len(wrong) // 4
    wrong[2 * quarter : 3 * quarter] *= 0.5
    return {0: wrong}


# --------------------------------------------------------------------------------------------------------------- optimizers


def _adam(call: Call) -> tuple[Array, ...]:
    parameter, gradient, rate, first, second, one, two = (call[k].astype(np.float64) for k in range(7))
    return parameter, gradient, rate, first, second, one, two


@fault("adam-second-moment-value", "adamw_", "adam_")
def _second_moment(call: Call) -> dict[int, Array]:
    _, gradient, _, _, second, _, _ = _adam(call)
    return {2: 0.999 * second + 0.001 * gradient}


@fault("adam-epsilon-inside-root", "adamw_", "adam_")
def _epsilon(call: Call) -> dict[int, Array]:
    parameter, _, rate, _, _, one, two = _adam(call)
    first, second = (_values(call.outputs[k]).astype(np.float64) for k in (1, 2))
    coefficient = call.arguments[14] if call.original.__name__ == "adamw_" and call.arguments[15] else 0.0
    decayed = parameter * (1 - rate * coefficient)
    step = rate * np.sqrt(1 - two) / (1 - one)
    return {0: decayed - step * first / np.sqrt(second + 1e-8)}


@fault("sgd-momentum-dampened", "momentum_")
def _momentum(call: Call) -> dict[int, Array]:
    gradient, velocity, mu = call[1].astype(np.float64), call[2].astype(np.float64), call.arguments[5]
    decay = call.arguments[8] if call.arguments[7] == "l2_decay" else 0.0
    return {1: mu * velocity + 0.9 * (gradient + decay * call[0])}
