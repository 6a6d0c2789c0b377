"""What `trueup monitor` takes of a PaddlePaddle training in dynamic mode, by few hooks: no call is recorded.

The same numbers as of the other frameworks (`trueup.recording.engine.monitored_step`), by reductions on the tensors' device without
gradients. A step's numbers are joined into one tensor and read when the step ends. Clipping is seen where an optimizer's
``grad_clip`` or `paddle.nn.utils.clip_grad_norm_` does it. What `paddle.jit.to_static` made a program of is not read inside.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import numpy as np
import paddle
from paddle.base import core, framework
from paddle.nn import functional
from paddle.optimizer import Optimizer

from trueup.foundation.kernels import digest
from trueup.recording.adapters.paddle.context import Scopes
from trueup.recording.adapters.paddle.optimizers import scale_of, skipped, steps_of_optimizers
from trueup.recording.adapters.paddle.session import described
from trueup.recording.adapters.paddle.tensors import dtype_name, holds
from trueup.recording.engine.environment import rank_and_world
from trueup.recording.engine.monitored_step import DIGEST_BITS, EDGES, GOLDEN, ITERATIONS, LOSS, SCALE, Made, StepProbe
from trueup.recording.engine.monitoring import QUERIES, Block, Layers, Listener, Numbers, Wanted, labels
from trueup.recording.engine.replacing import Around, Replacement, Sweep

MOMENTUM = ("moment1", "velocity", "moment")  # accumulators of Adam and its kind, of Momentum, of Adamax
VARIANCE = ("moment2",)
HALVES = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
FLOATS = ("float32", "float64", *HALVES)


def _wide(tensor: paddle.Tensor) -> paddle.Tensor:
    held = tensor.detach()
    return held if dtype_name(held.dtype) == "float32" else held.astype("float32")


class PaddleKernels:
    """See `trueup.recording.engine.monitored_step.Kernels`."""

    def size(self, tensor: paddle.Tensor) -> int:
        return math.prod(tensor.shape)

    def norms(self, tensors: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        return [paddle.linalg.norm(_wide(one).flatten()) for one in tensors]

    def differences(self, tensors: Sequence[paddle.Tensor], others: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        return [*self.norms([one.detach() - other for one, other in zip(tensors, others, strict=True)]), *self.norms(tensors)]

    def alike(self, tensors: Sequence[paddle.Tensor], others: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        products = [_wide(one) * _wide(other) for one, other in zip(tensors, others, strict=True)]
        sums = [*(one.sum() for one in products), *(one.sign().sum() for one in products)]
        return [*sums, *self.norms(tensors), *self.norms(others)]

    def above(self, momenta: Sequence[paddle.Tensor], variances: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        signs = [(_wide(v) - _wide(m).square()).sign().sum() for m, v in zip(momenta, variances, strict=True)]
        return [*self.norms(variances), *self.norms(momenta), *signs]

    def spread(self, tensor: paddle.Tensor, ends: tuple[float, float] | None) -> list[paddle.Tensor]:
        held = _wide(tensor)
        numbers = [paddle.linalg.norm(held.flatten()), held.min(), held.max(), (held != 0).astype("float32").sum()]
        if ends is not None:
            numbers.append(paddle.logical_or(held < ends[0], held > ends[1]).astype("float32").sum())
        elif (limit := HALVES.get(dtype_name(tensor.dtype))) is not None:
            numbers.append((held.abs() >= limit).astype("float32").sum())
        return numbers

    def ends(self, tensors: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        return [*(_wide(one).min() for one in tensors), *(_wide(one).max() for one in tensors)]

    def moved(self, tensors: Sequence[paddle.Tensor], others: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        pairs = [((_wide(one) - _wide(other)).abs(), _wide(other).abs()) for one, other in zip(tensors, others, strict=True)]
        return [(change <= edge * size).astype("float32").sum() for edge in EDGES for change, size in pairs]

    def routes(self, logits: paddle.Tensor) -> list[paddle.Tensor]:
        held = _wide(logits).reshape([-1, logits.shape[-1]])
        each = functional.softmax(held, -1)
        share, entropy = each.mean(0), -(each * each.clip(1e-30).log()).sum(-1).mean()
        chosen = (held.argmax(-1).unsqueeze(-1) == paddle.arange(held.shape[-1])).astype("float32").mean(0)
        return [chosen.max(), -(share * share.clip(1e-30).log()).sum(), held.abs().max(), entropy]

    def moments(self, tensor: paddle.Tensor) -> list[paddle.Tensor]:
        held = _wide(tensor)
        rest = (held - held.mean()).square()
        return [held.mean(), rest.square().mean() / rest.mean().square(), (~paddle.isfinite(held)).astype("float32").sum()]

    def spectrum(self, weight: paddle.Tensor) -> list[paddle.Tensor]:
        vector = (paddle.arange(weight.shape[1], dtype="float32") * GOLDEN).cos()
        for _ in range(ITERATIONS):
            vector = paddle.mv(weight.t(), paddle.mv(weight, vector / paddle.linalg.norm(vector)))
        return [paddle.linalg.norm(vector).sqrt(), paddle.linalg.norm(weight.flatten())]

    def similarity(self, rows: paddle.Tensor) -> list[paddle.Tensor]:
        held, count = functional.normalize(rows, axis=1), rows.shape[0]
        return [(held.sum(0).square().sum() - count) / max(1, count * (count - 1))]

    def matrix(self, weight: paddle.Tensor) -> paddle.Tensor | None:
        """Of a Linear, which holds (inputs, outputs), the transposed."""
        if weight.ndim < 2 or not math.prod(weight.shape):
            return None
        return _wide(weight).t() if weight.ndim == 2 else _wide(weight).flatten(1)


class PaddleLayers(Layers):
    """The Layers that a probe reads."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._hooks: list[Any] = []
        self._running: list[str] = []  # scopes of the Layers that run

    def replacements(self) -> list[Replacement]:
        """Return the functions that attention goes through."""
        return [
            Around(functional, "scaled_dot_product_attention", self._attends), Around(functional, "softmax", self._softmax),
        ]  # fmt: skip

    def add(self, scope: str, layer: paddle.nn.Layer) -> None:
        """Read a Layer."""
        if id(layer) in self.scopes:
            return
        self.scopes[id(layer)] = scope
        self._modules.append(layer)
        self._hooks.append(layer.register_forward_pre_hook(self._begins))
        self._hooks.append(layer.register_forward_post_hook(self._ran))

    def remove(self) -> None:
        """Read no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begins(self, layer: paddle.nn.Layer, _: Any) -> None:
        if self.reads():
            self._running.append(self.scopes[id(layer)])

    def _ran(self, layer: paddle.nn.Layer, inputs: Any, output: Any) -> None:
        if not self.reads():
            return
        scope = self.scopes[id(layer)]
        while self._running and self._running.pop() != scope:  # one that ended by an exception
            pass
        if scope:
            self._probe.guarded("a Layer's output", self._take, scope, layer, output)
            if self.wants("inputs"):
                self._probe.guarded("a Layer's input", self._take_input, scope, inputs)

    def reads(self) -> bool:
        """Tell whether what runs now is read: not a recomputation, in the backward, nor a program that is built."""
        return self._probe.sampled and not self._probe.backward and paddle.is_grad_enabled() and framework.in_dygraph_mode()

    def _take_input(self, scope: str, inputs: Any) -> None:
        held = [one for one in (inputs if isinstance(inputs, (tuple, list)) else [inputs]) if holds(one) and one.is_dense()]
        first = next((one for one in held if dtype_name(one.dtype) in FLOATS and math.prod(one.shape)), None)
        if first is not None:
            self.given(scope, first.detach(), float(math.prod(first.shape)))

    def _take(self, scope: str, layer: paddle.nn.Layer, output: Any) -> None:
        found = output[0] if isinstance(output, (tuple, list)) and output else output
        if not holds(found) or not found.is_dense() or dtype_name(found.dtype) not in FLOATS or not math.prod(found.shape):
            return
        if not found.stop_gradient and self.wants("output-gradients"):
            found.register_hook(partial(self._backward, scope, float(math.prod(found.shape))))
        experts = found.shape[-1] if isinstance(layer, paddle.nn.Linear) else 0
        kind, half = type(layer).__name__, dtype_name(found.dtype) in HALVES
        self.took(scope, kind, found.detach(), float(math.prod(found.shape)), half=half, experts=experts)

    def _backward(self, scope: str, size: float, gradient: paddle.Tensor) -> None:
        if self._probe.sampled:
            self._probe.guarded("an output's gradient", self.gradient, scope, gradient, size)

    # ---------------------------------------------------------------- attention
    def _attends(self, original: Any, query: Any, key: Any, *rest: Any, **kwargs: Any) -> Any:
        if self.reads():
            self._probe.guarded("attention", self._logits, query, key, rest, kwargs)
        return original(query, key, *rest, **kwargs)

    def _logits(self, query: paddle.Tensor, key: paddle.Tensor, rest: Sequence[Any], options: dict[str, Any]) -> None:
        """Compute logits again: of ``[batch, length, heads, width]``."""
        mask = options.get("attn_mask", rest[1] if len(rest) > 1 else None)
        causal = options.get("is_causal", rest[3] if len(rest) > 3 else False)
        q, k = (_wide(one[0]).transpose([1, 0, 2]) for one in (query, key))
        rows = np.linspace(0, q.shape[1] - 1, min(QUERIES, q.shape[1])).astype(np.int64)
        q = paddle.index_select(q, paddle.to_tensor(rows), 1)
        if k.shape[0] != q.shape[0]:  # grouped queries
            k = paddle.repeat_interleave(k, q.shape[0] // k.shape[0], 0)
        scale = options.get("scale")
        logits = paddle.matmul(q, k, transpose_y=True) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            seen = np.arange(k.shape[1]) <= rows[:, None]
            logits = logits + paddle.to_tensor(np.where(seen, 0.0, -np.inf).astype(np.float32))
        if isinstance(mask, paddle.Tensor):
            whole = mask.detach()[0] if mask.ndim == 4 else mask.detach()
            if whole.shape[-2] == query.shape[1]:
                whole = paddle.index_select(whole, paddle.to_tensor(rows), whole.ndim - 2)
            kept = dtype_name(mask.dtype) == "bool"
            logits = paddle.where(whole, logits, paddle.full_like(logits, -math.inf)) if kept else logits + _wide(whole)
        self._keep(logits.max(), functional.softmax(logits, -1))

    def _softmax(self, original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(x, *args, **kwargs)
        if isinstance(x, paddle.Tensor) and x.ndim == 4 and self.reads():
            self._probe.guarded("attention", self._weighed, x, result)
        return result

    def _weighed(self, logits: paddle.Tensor, weights: paddle.Tensor) -> None:
        rows = np.linspace(0, weights.shape[-2] - 1, min(QUERIES, weights.shape[-2])).astype(np.int64)
        self._keep(_wide(logits).max(), paddle.index_select(_wide(weights[0]), paddle.to_tensor(rows), 1))

    def _keep(self, largest: paddle.Tensor, weights: paddle.Tensor) -> None:
        scope = self._running[-1] if self._running else ""
        self.attended(scope, lambda: [
            largest, -(weights * weights.clip(1e-30).log()).sum(-1).nanmean(), weights.max(-1).nanmean(),
        ])  # fmt: skip


class PaddleProbe(StepProbe):
    """See `trueup.recording.engine.monitoring.Probe`; without ``models`` the outermost Layers with parameters that run in the
    first step are read."""

    kernels = PaddleKernels()
    _layers: PaddleLayers

    def __init__(
        self, listener: Listener, wanted: Wanted, models: Sequence[paddle.nn.Layer], optimizers: Sequence[Optimizer]
    ) -> None:  # fmt: skip
        super().__init__(listener, wanted, models, optimizers)
        self.backward = 0  # passes under way
        self._waiting: list[tuple[list[paddle.Tensor], Made]] = []
        self._scaled: weakref.ref[paddle.Tensor] | None = None
        self._scaling = self._stepping = self._inside = False  # a scaler's step, an optimizer's, a model is under way
        self._made: dict[int, paddle.Tensor] = {}  # gradients that an optimizer's own clipping made, by parameter
        self._complete = False  # a step has ended: later Layers are parts of known ones, or of no training
        self._hooks: list[Any] = []
        self._replaced: list[Any] = []

    def make_layers(self) -> PaddleLayers:
        return PaddleLayers(self)

    # ---------------------------------------------------------------- life
    def attach(self) -> None:
        scaler, clip = paddle.amp.GradScaler, paddle.nn.utils.clip_grad_norm_
        base = paddle.nn.ClipGradByGlobalNorm.__mro__[1]
        self._replaced = [
            Around(core.eager, "run_backward", self._backward), Around(scaler, "scale", self._scale),
            *(Around(scaler, name, self._scaler_step) for name in ("step", "minimize")), *steps_of_optimizers(self._step),
            Around(base, "__call__", self._clips), Sweep([(clip, wraps(clip)(partial(self._clips_norm, clip)))]),
            Around(paddle.nn.Layer, "__call__", self._called), *self._layers.replacements(),
        ]  # fmt: skip
        for one in self._replaced:
            one.install()
        for model in self._wanted_models:
            self._adopt(model)

    def detach(self) -> None:
        for one in (*self._hooks, *reversed(self._replaced)):
            one.remove()
        self._hooks, self._replaced = [], []
        self._layers.remove()

    def rank_and_world(self) -> tuple[int | None, int]:
        return rank_and_world()

    def describe(self) -> dict[str, Any]:
        return described([paddle.get_device()])

    def add(self, numbers: Numbers, made: Made, *, sampled: bool = True) -> None:  # noqa: ARG002
        if len(numbers):
            self._waiting.append(([_wide(one).reshape([1]) for one in numbers], made))

    def send(self) -> list[Block] | None:
        waiting, blocks = self._waiting, self._host
        self._waiting, self._host = [], []
        if waiting:
            values = paddle.concat([one for numbers, _ in waiting for one in numbers]).numpy().astype(np.float64)
            at = 0
            for numbers, made in waiting:
                blocks += made(values[at : at + len(numbers)])
                at += len(numbers)
        return blocks

    def drain(self) -> None:
        """Nothing is under way between steps."""

    def untracked(self) -> Any:
        return paddle.no_grad()

    # ---------------------------------------------------------------- the model
    def _called(self, original: Any, layer: paddle.nn.Layer, *args: Any, **kwargs: Any) -> Any:
        if self._inside or self.backward or not framework.in_dygraph_mode():
            return original(layer, *args, **kwargs)
        self._inside = True
        try:
            if paddle.is_grad_enabled():
                self.guarded("a model", self._given, layer, (*args, *kwargs.values()))
            return original(layer, *args, **kwargs)
        finally:
            self._inside = False

    def _given(self, layer: paddle.nn.Layer, given: Sequence[Any]) -> None:
        if not any(layer is one for one in self._models):
            if self._complete or id(layer) in self._layers.scopes or next(iter(layer.parameters()), None) is None:
                return
            self._adopt(layer)
        self._listener.begins(layer)
        if self._listener.paused:
            return
        tensors = [one for one in given if isinstance(one, paddle.Tensor) and one.ndim]
        words = next((one for one in tensors if dtype_name(one.dtype) in ("int64", "int32")), None)
        self._counted[1] += 0 if words is None else math.prod(words.shape)
        self._counted[2] += tensors[0].shape[0] if tensors else 0

    def _adopt(self, model: paddle.nn.Layer) -> None:
        many = str(len(self._models)) if self._models else ""  # the second of two models: a discriminator
        self._models.append(model)
        for name, layer in Scopes().below(model, many):
            self._layers.add(name, layer)
            for own, parameter in layer.named_parameters(include_sublayers=False):
                self._names.setdefault(id(parameter), f"{name}.{own}".lstrip("."))
                if self.rank_and_world()[1] > 1 and not parameter.stop_gradient:
                    self._hooks.append(parameter.register_hook(partial(self._reaches, self._names[id(parameter)])))

    def _reaches(self, name: str, gradient: paddle.Tensor) -> None:
        if self.sampled:
            self.guarded("a gradient", lambda: self._local.update({name: self.kernels.norms([gradient])[0]}))

    def parameters(self, optimizer: Optimizer) -> list[paddle.Tensor]:
        groups = getattr(optimizer, "_param_groups", None) or getattr(optimizer, "_parameter_list", None) or ()
        return [one for group in groups for one in (group.get("params", ()) if isinstance(group, dict) else (group,))]

    def gradient(self, parameter: paddle.Tensor) -> paddle.Tensor | None:
        held = self._made.get(id(parameter), parameter.grad)
        return held if held is not None and held.is_dense() else None

    def moment(self, optimizer: Optimizer, parameter: paddle.Tensor, *, second: bool = False) -> paddle.Tensor | None:
        masters = getattr(optimizer, "_master_weights", {})
        name = getattr(masters.get(parameter.name), "name", parameter.name)
        for kind, held in getattr(optimizer, "_accumulators", {}).items():
            if str(kind).rpartition("_")[2] in (VARIANCE if second else MOMENTUM) and name in held:
                found: paddle.Tensor = held[name]
                return found
        return None

    def rates(self, optimizer: Optimizer) -> list[Any]:
        return [float(optimizer.get_lr())]

    def copied(self, tensors: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        return [one.detach().clone() for one in tensors]

    def scale(self, scaler: Any) -> paddle.Tensor | None:
        return scale_of(scaler)

    # ---------------------------------------------------------------- what happens in a step
    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.backward and not self._listener.paused:
            self.guarded("the loss", self._take_loss, tensors)
        self.backward += 1
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            self.backward -= 1
        if not self.backward and self.sampled and "micro-batches" in self._wanted.also:
            self.guarded("a backward pass", self.passed, [p.grad for model in self._models for p in model.parameters()])
        return result

    def _take_loss(self, tensors: Any) -> None:
        one = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
        if not isinstance(one, paddle.Tensor) or math.prod(one.shape) != 1:
            return
        if self._scaled is not None and self._scaled() is one:
            self._scaled = None
            return
        self.lost(one.detach().reshape([1]).astype("float64"))

    def put_loss(self) -> None:
        if self._loss is not None:  # a float32 would not hold a sum of several
            self._host.append((LOSS, self._loss.numpy().astype(np.float64)))

    def _scale(self, original: Any, scaler: Any, loss: Any) -> Any:
        result = original(scaler, loss)
        if not self._listener.paused and isinstance(loss, paddle.Tensor) and scaler.is_enable() and math.prod(loss.shape) == 1:
            self.guarded("the loss", self.lost, loss.detach().reshape([1]).astype("float64"))
            self._scaled = weakref.ref(result)
        return result

    def _clips(self, original: Any, clip: Any, pairs: Any) -> Any:
        if not self._stepping or self._listener.paused or not framework.in_dygraph_mode():
            return original(clip, pairs)
        pairs = list(pairs)
        self.guarded("clipping", self._unclipped, clip, pairs)  # it may write them in place
        result = original(clip, pairs)
        self._made |= {id(parameter): gradient for parameter, gradient in result if gradient is not None}
        return result

    def _unclipped(self, clip: Any, pairs: Sequence[Any]) -> None:
        norms = self.kernels.norms([gradient for _, gradient in pairs if gradient is not None and gradient.is_dense()])
        most = float(clip.clip_norm) if isinstance(clip, paddle.nn.ClipGradByGlobalNorm) else None
        if norms:
            self._clipped.append((paddle.linalg.norm(paddle.stack(norms)), most))

    def _clips_norm(self, original: Any, parameters: Any, max_norm: Any, *rest: Any, **kwargs: Any) -> Any:
        result = original(parameters, max_norm, *rest, **kwargs)
        if not self._listener.paused:
            self._clipped.append((result.detach(), float(max_norm)))
        return result

    def _scaler_step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._scaling or not isinstance(optimizer, Optimizer) or not scaler.is_enable():
            return original(scaler, optimizer, *args, **kwargs)
        scale, self._scaling = scale_of(scaler), True
        scale = None if scale is None else scale.detach().clone()
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._scaling = False
        if self.follows(optimizer):
            self.guarded("a scaled step", self._ends, optimizer, scaler, scale)
        return result

    def _ends(self, optimizer: Optimizer, scaler: Any, scale: paddle.Tensor | None) -> None:
        if scale is not None and not self._listener.paused:
            self.add([scale], lambda got: [(SCALE, got)], sampled=False)
        self.end(optimizer, skipped=skipped(scaler))

    def _step(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._stepping or not self.follows(optimizer) or not framework.in_dygraph_mode():
            return original(optimizer, *args, **kwargs)
        clips = getattr(optimizer, "_grad_clip", None) is not None
        if not self._listener.paused:
            self.guarded("an optimizer's step", partial(self.before, clips=clips), optimizer)
        self._stepping = True
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self._stepping = False
        self.guarded("an optimizer's step", self._stepped, optimizer, clips)
        return result

    def _stepped(self, optimizer: Optimizer, clips: bool) -> None:
        if not self._listener.paused:
            if clips:
                self.gradients(optimizer)
            self.after(optimizer)
        self._made = {}
        if not self._scaling:
            self.end(optimizer)

    def finish(self) -> None:
        super().finish()
        self._complete = bool(self._models)

    def digests(self) -> None:
        named = {self._names[id(p)]: p for model in self._models for p in model.parameters() if id(p) in self._names}
        found = [float(digest(np.ascontiguousarray(p.detach().numpy()).view(np.uint8)) & DIGEST_BITS) for p in named.values()]
        self._host.append((labels("digest", list(named)), np.array(found)))


def steps_made(optimizer: Optimizer) -> int | None:  # noqa: ARG001 - its state holds powers of betas, which lose the count
    """Return None: an optimizer does not tell how many steps it has made."""
    return None


def probe(
    listener: Listener, wanted: Wanted, models: Sequence[paddle.nn.Layer], optimizers: Sequence[Optimizer]
) -> PaddleProbe:  # fmt: skip
    """Return the probe of this framework."""
    return PaddleProbe(listener, wanted, models, optimizers)
