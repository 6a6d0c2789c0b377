"""Numbers of TensorFlow's tensors for a monitor, and what it takes of Keras layers: outputs, attention's logits, routers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from trueup.recording.engine.monitored_step import EDGES, GOLDEN, ITERATIONS
from trueup.recording.engine.monitoring import QUERIES, Layers

HALVES = (tf.float16, tf.bfloat16)


def read(value: Any) -> Any:
    """Return a tensor: of a variable its value, of a sparse gradient its rows, each once."""
    value = getattr(value, "_value", value)
    if isinstance(value, tf.IndexedSlices):
        return _rows(value)[0]
    return value.read_value() if isinstance(value, tf.Variable) else tf.convert_to_tensor(value)


def _rows(value: tf.IndexedSlices) -> tuple[Any, Any]:
    places, which = tf.unique(value.indices)
    return tf.math.unsorted_segment_sum(value.values, which, tf.size(places)), places


def _wide(value: Any) -> Any:
    return tf.cast(read(value), tf.float32)


class TensorFlowKernels:
    """See `trueup.recording.engine.monitored_step.Kernels`."""

    def size(self, tensor: Any) -> int:
        return math.prod(tensor.shape)

    def norms(self, tensors: Sequence[Any]) -> list[Any]:
        return [tf.norm(_wide(one)) for one in tensors]

    def differences(self, tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        apart = [tf.norm(tf.cast(read(one) - other, tf.float32)) for one, other in zip(tensors, others, strict=True)]
        return [*apart, *self.norms(tensors)]

    def alike(self, tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        products = []
        for one, other in zip(tensors, others, strict=True):
            if isinstance(one, tf.IndexedSlices):
                rows, places = _rows(one)
                products.append(tf.cast(rows, tf.float32) * tf.gather(_wide(other), places))
            else:
                products.append(_wide(one) * _wide(other))
        signs = [tf.reduce_sum(tf.sign(one)) for one in products]
        return [*(tf.reduce_sum(one) for one in products), *signs, *self.norms(tensors), *self.norms(others)]

    def above(self, momenta: Sequence[Any], variances: Sequence[Any]) -> list[Any]:
        signs = [tf.reduce_sum(tf.sign(_wide(v) - tf.square(_wide(m)))) for m, v in zip(momenta, variances, strict=True)]
        return [*self.norms(variances), *self.norms(momenta), *signs]

    def spread(self, tensor: Any, ends: tuple[float, float] | None) -> list[Any]:
        held = _wide(tensor)

        def share(where: Any) -> Any:
            return tf.reduce_sum(tf.cast(where, tf.float32))

        numbers = [tf.norm(held), tf.reduce_min(held), tf.reduce_max(held), share(tf.not_equal(held, 0))]
        if ends is not None:
            numbers.append(share((held < ends[0]) | (held > ends[1])))
        elif tensor.dtype in HALVES:
            numbers.append(share(tf.abs(held) >= float(tensor.dtype.max)))
        return numbers if tensor.shape.is_fully_defined() else [*numbers, tf.cast(tf.size(held), tf.float32)]

    def ends(self, tensors: Sequence[Any]) -> list[Any]:
        return [*(tf.reduce_min(_wide(one)) for one in tensors), *(tf.reduce_max(_wide(one)) for one in tensors)]

    def moved(self, tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        pairs = [(tf.abs(_wide(one) - _wide(other)), tf.abs(_wide(other))) for one, other in zip(tensors, others, strict=True)]
        return [tf.reduce_sum(tf.cast(change <= edge * size, tf.float32)) for edge in EDGES for change, size in pairs]

    def routes(self, logits: Any) -> list[Any]:
        held = tf.reshape(_wide(logits), [-1, logits.shape[-1]])
        each = tf.nn.softmax(held)
        share = tf.reduce_mean(each, 0)
        chosen = tf.reduce_mean(tf.one_hot(tf.argmax(held, -1), logits.shape[-1]), 0)
        entropy = -tf.reduce_sum(share * tf.math.log(tf.maximum(share, 1e-30)))
        return [tf.reduce_max(chosen), entropy, tf.reduce_max(tf.abs(held)), _entropy(each)]

    def moments(self, tensor: Any) -> list[Any]:
        held = _wide(tensor)
        mean = tf.reduce_mean(held)
        rest = tf.square(held - mean)
        bad = tf.reduce_sum(tf.cast(~tf.math.is_finite(held), tf.float32))
        return [mean, tf.reduce_mean(tf.square(rest)) / tf.square(tf.reduce_mean(rest)), bad]

    def spectrum(self, weight: Any) -> list[Any]:
        vector = tf.cos(tf.range(tf.shape(weight)[1], dtype=tf.float32) * GOLDEN)
        for _ in range(ITERATIONS):
            vector = tf.linalg.matvec(weight, tf.linalg.matvec(weight, vector / tf.norm(vector)), transpose_a=True)
        return [tf.sqrt(tf.norm(vector)), tf.norm(weight)]

    def similarity(self, rows: Any) -> list[Any]:
        count = float(rows.shape[0])
        held = tf.math.l2_normalize(rows, axis=1)
        return [(tf.reduce_sum(tf.square(tf.reduce_sum(held, 0))) - count) / max(1.0, count * (count - 1))]

    def matrix(self, weight: Any) -> Any:
        """Of a Dense, which holds (inputs, outputs), and of a convolution the transposed."""
        held = getattr(weight, "_value", weight)
        if len(held.shape) < 2 or not math.prod(held.shape):
            return None
        return tf.transpose(tf.reshape(_wide(held), [-1, held.shape[-1]]))


class KerasLayers(Layers):
    """The layers that a probe reads."""

    def add(self, scope: str, layer: Any) -> None:
        """Read a layer."""
        if id(layer) not in self.scopes:
            self.scopes[id(layer)] = scope
            self._modules.append(layer)

    def ran(self, layer: Any, given: Sequence[Any], output: Any) -> None:
        """Take a layer's output."""
        scope = self.scopes.get(id(layer), "")
        found = output[0] if isinstance(output, (tuple, list)) and output else output
        if not scope or not isinstance(found, tf.Tensor) or not found.dtype.is_floating or found.shape.rank is None:
            return
        whole = found.shape.is_fully_defined()
        if whole and not found.shape.num_elements():
            return
        kind, activation = type(layer).__name__, getattr(getattr(layer, "activation", None), "__name__", "linear")
        experts = found.shape[-1] or 0 if kind == "Dense" and activation == "linear" else 0
        ends = activation if kind in ("Dense", "Activation") else kind
        size = float(found.shape.num_elements()) if whole else None
        self.took(scope, ends, found, size, half=found.dtype in HALVES, experts=experts)
        first = next((one for one in given if isinstance(one, tf.Tensor) and one.dtype.is_floating), None)
        if first is not None and self.wants("inputs"):
            self.given(scope, first, float(first.shape.num_elements()) if first.shape.is_fully_defined() else None)
        if kind == "Softmax" and found.shape.rank == 4 and given:
            self._weighed(scope.rpartition(".")[0] or scope, given[0], found)

    def _weighed(self, scope: str, logits: Any, weights: Any) -> None:
        def compute() -> Sequence[Any]:
            held, first = _wide(logits), _wide(weights)[0]
            first = first[:, :: max(1, (first.shape[-2] or 1) // QUERIES)]
            return [tf.reduce_max(held), _entropy(first), tf.reduce_mean(tf.reduce_max(first, -1))]

        self.attended(scope, compute)

    def logits(self, scope: str, query: Any, key: Any, options: dict[str, Any]) -> None:
        """Compute the logits of an attention again: of ``[batch, length, heads, width]``."""

        def compute() -> Sequence[Any]:
            q, k = (tf.transpose(_wide(one)[0], [1, 0, 2]) for one in (query, key))
            step = max(1, (query.shape[1] or 1) // QUERIES)
            rows = tf.range(tf.shape(q)[1])[::step]
            q = q[:, ::step]
            if k.shape[0] != q.shape[0]:  # grouped queries
                k = tf.repeat(k, q.shape[0] // k.shape[0], 0)
            scale = options.get("scale")
            found = tf.matmul(q, k, transpose_b=True) * (q.shape[-1] ** -0.5 if scale is None else scale)
            if options.get("is_causal"):
                found = tf.where(tf.range(tf.shape(k)[1]) <= rows[:, None], found, -math.inf)
            mask, bias = options.get("mask"), options.get("bias")
            if mask is not None:
                found = tf.where(tf.broadcast_to(mask, tf.shape(mask))[0][..., ::step, :], found, -math.inf)
            if bias is not None:
                found = found + _wide(bias)[0][..., ::step, :]
            weights = tf.nn.softmax(found)
            return [tf.reduce_max(found), _entropy(weights), tf.reduce_mean(tf.reduce_max(weights, -1))]

        self.attended(scope, compute)

    def keep(self, graph: Any) -> None:
        """Forget what was taken in other graphs than this one: nothing here can read it."""
        every: tuple[dict[Any, Any], ...] = (self._outputs, self._attention, self._routers, self._several)
        for held in every:
            for scope in [scope for scope, one in held.items() if not _of(one, graph)]:
                del held[scope]


def _of(held: Any, graph: Any) -> bool:
    numbers = held[0] if isinstance(held, tuple) else held
    return all(getattr(one, "graph", None) is graph if graph is not None else not hasattr(one, "op") for one in numbers)


def _entropy(weights: Any) -> Any:
    return -tf.reduce_mean(tf.reduce_sum(weights * tf.math.log(tf.maximum(weights, 1e-30)), -1))
