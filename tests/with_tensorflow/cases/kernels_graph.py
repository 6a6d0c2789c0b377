"""A graph of TensorFlow 1 whose operations are kernels in Python, as a vendor adds its own, healthy or broken by `faulty.FAULTS`.

A classifier of text: embedding, a gated layer, attention over the positions, a mean, cross entropy, Adam. Each kernel has a scope
of its own and computes with NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import models
from trueup.simdev import tensorflow_faults as faulty

Array = np.ndarray[Any, Any]
STEPS = 2


@dataclass
class Kernels:
    """The kernels of a device, with a fault or without."""

    fault: faulty.Fault | None = None
    fired: list[faulty.Fired] = field(default_factory=list)
    memory: dict[Any, Any] = field(default_factory=dict)
    step: int = 0

    def __call__(
        self, scope: str, kind: str, inputs: Sequence[Any], forward: Callable[..., Array], backward: Callable[..., list[Array]],
        indices: Any = None,
    ) -> Any:  # fmt: skip
        """Put a kernel into the graph.

        Args:
            scope: of its own.
            kind: what it computes, by TensorFlow's name.
            inputs: what it is differentiated by.
            forward: takes the arrays (and the indices), returns the result.
            backward: takes the gradient of the result, the result and the arrays, returns their gradients.
            indices: integers that it reads besides.
        """
        more = [] if indices is None else [indices]

        def forwards(*arrays: Array) -> Array:
            made = np.asarray(forward(*arrays), np.float32)
            return self._broken(scope, kind, "forward", arrays, [made], ({}, self.memory))[0]

        def backwards(gradient: Array, result: Array, *arrays: Array) -> list[Array]:
            made = [np.asarray(one, np.float32) for one in backward(gradient, result, *arrays)]
            return self._broken(scope, kind, "backward", arrays, made, ([gradient], {"results": [result]}))

        @tf.custom_gradient
        def kernel(*tensors: Any) -> Any:
            made = tf.numpy_function(forwards, [*tensors, *more], tf.float32, name=kind)

            def gradient(came: Any) -> Any:
                found = tf.numpy_function(backwards, [came, made, *tensors, *more], [tf.float32] * len(tensors), name=kind)
                return [tf.reshape(one, tf.shape(x)) for one, x in zip(found, tensors, strict=True)]

            return made, gradient

        with tf.variable_scope(scope):
            return kernel(*inputs)

    def _broken(
        self, scope: str, kind: str, phase: str, arrays: Sequence[Array], made: list[Array], more: tuple[Any, Any]
    ) -> list[Array]:
        if self.fault is None or kind not in self.fault.ops or phase != self.fault.phase:
            return made
        wrong = self.fault.effect(list(arrays), made, *more)
        found = [np.asarray((wrong or {}).get(k, one), np.float32).reshape(one.shape) for k, one in enumerate(made)]
        apart = max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in zip(found, made, strict=True))
        if apart > faulty.NOTICED:
            self.fired.append(faulty.Fired(self.step, phase, scope, "tf.raw_ops.PyFunc"))
        return found


def softmax(x: Array) -> Array:
    """Along the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def build(kernel: Kernels) -> tuple[tf.Graph, Any, Any, Any]:
    """Make the graph; return it, its placeholder, the loss and the training operation."""
    graph = tf.Graph()
    with graph.as_default():
        tf.set_random_seed(5)
        ids, labels = tf.placeholder(tf.int64, [4, 6], name="ids"), tf.constant([0, 2, 1, 2])
        shapes = {"embedding": [128, 8], "weight": [8, 8], "bias": [8], "gate": [8, 8], "query": [8, 1], "head": [8, 3]}
        with tf.variable_scope("weights"):
            own = {name: tf.get_variable(name, shape, tf.float32) for name, shape in shapes.items()}

        def scattered(g: Array, y: Array, table: Array, rows: Array) -> list[Array]:
            made = np.zeros_like(table)
            np.add.at(made, rows, g)
            return [made]

        def product(g: Array, y: Array, a: Array, b: Array) -> list[Array]:
            return [g @ b.T, a.T @ g]

        words = kernel("embed", "GatherV2", [own["embedding"]], lambda table, rows: table[rows], scattered, ids)
        flat = tf.reshape(words, [24, 8])
        hidden = kernel("dense", "MatMul", [flat, own["weight"]], np.matmul, product)
        hidden = kernel("add", "BiasAdd", [hidden, own["bias"]], np.add, lambda g, y, x, b: [g, g.sum(0)])
        hidden = kernel("tanh", "Tanh", [hidden], np.tanh, lambda g, y, x: [g * (1 - y * y)])
        with tf.control_dependencies([hidden]):  # else either of two products of one tensor is the first, run by run
            gates = kernel("gating", "MatMul", [flat, own["gate"]], np.matmul, product)
        gates = kernel("sigmoid", "Sigmoid", [gates], lambda x: 1 / (1 + np.exp(-x)), lambda g, y, x: [g * y * (1 - y)])
        hidden = kernel("relu", "Relu", [hidden * gates], lambda x: np.maximum(x, 0), lambda g, y, x: [g * (x > 0)])
        scores = tf.reshape(kernel("query", "MatMul", [hidden, own["query"]], np.matmul, product), [4, 6])
        weights = kernel("softmax", "Softmax", [scores], softmax, lambda g, y, x: [y * (g - (g * y).sum(-1, keepdims=True))])
        pooled = tf.reshape(hidden, [4, 6, 8]) * tf.reshape(weights, [4, 6, 1])
        pooled = kernel("pool", "Mean", [pooled], lambda x: x.mean(1), lambda g, y, x: [np.repeat(g[:, None] / 6, 6, axis=1)])
        logits = kernel("head", "MatMul", [pooled, own["head"]], np.matmul, product)
        losses = kernel(
            "loss", "SparseSoftmaxCrossEntropyWithLogits", [logits],
            lambda x, y: -np.log(softmax(x)[np.arange(len(y)), y]), lambda g, y, x, k: [g[:, None] * (softmax(x) - np.eye(3)[k])],
            labels,
        )  # fmt: skip
        loss = tf.reduce_mean(losses, name="mean_loss")
        train = tf.train.AdamOptimizer(0.01).minimize(loss, global_step=tf.train.get_or_create_global_step())
    return graph, ids, loss, train


def run(fault: str = "") -> list[faulty.Fired]:
    """Train; return what a fault changed, in order."""
    kernel = Kernels(faulty.FAULTS[fault] if fault else None)
    graph, ids, loss, train = build(kernel)
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with graph.as_default(), tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        for kernel.step in range(STEPS):
            session.run([loss, train], {ids: models.text(4, 6)})
    return kernel.fired
