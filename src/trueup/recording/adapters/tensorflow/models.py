"""A Keras model as `trueup.analysis.pairing` sees it, its weights as arrays, and a training step of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trueup.foundation.frameworks.trees import Node, OptimizerFacts, Tree, path
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.tensorflow.composites import Composite, composite
from trueup.recording.adapters.tensorflow.scopes import layers_of
from trueup.recording.recorder.replacing import attributes_set

Array = np.ndarray[Any, Any]

PLAIN = (bool, int, float, str, type(None))


def tree(model: keras.layers.Layer) -> Tree:
    """Return the layers of a model with their tensors and settings.

    Raises:
        TrueupError: the model, or a layer of it, has no weights yet.
    """
    nodes: dict[str, Node] = {}
    ties: dict[str, str] = {}
    seen: dict[int, str] = {}
    for scope, layer, whole in _layers(model):
        if not layer.built:
            name = scope or type(layer).__name__
            raise TrueupError(f"{name} is not built, so it has no weights: call the model on a batch first")
        own = _own(layer)
        for name, variable in own.items():
            first = seen.setdefault(id(variable), path(scope, name))
            if first != path(scope, name):
                ties[path(scope, name)] = first
        held = whole.read() if whole is not None else {name: _array(variable) for name, variable in own.items()}
        shapes = {name: tuple(array.shape) for name, array in held.items()}
        norms = {name: float(np.linalg.norm(array.astype(np.float64))) for name, array in held.items()}
        classes = whole.classes if whole is not None else _classes(layer)
        settings = whole.settings if whole is not None else _settings(layer)
        nodes[scope] = Node(scope, classes, shapes, settings, norms)
    return Tree("tensorflow", nodes, ties)


def state(model: keras.layers.Layer) -> dict[str, Array]:
    """Return the tensors of a model by full name."""
    found: dict[str, Array] = {}
    for scope, layer, whole in _layers(model):
        held = whole.read() if whole is not None else {name: _array(variable) for name, variable in _own(layer).items()}
        found |= {path(scope, name): array for name, array in held.items()}
    return found


def load(model: keras.layers.Layer, found: Mapping[str, Array]) -> None:
    """Write arrays into the tensors of a model, in place.

    Raises:
        TrueupError: an array has another shape than the tensor.
    """
    for scope, layer, whole in _layers(model):
        if whole is not None:
            told = {name: found[path(scope, name)] for name in whole.read() if path(scope, name) in found}
            if told:
                whole.write(told)
            continue
        for name, variable in _own(layer).items():
            array = found.get(path(scope, name))
            if array is None:
                continue
            if tuple(variable.shape) != array.shape:
                raise TrueupError(f"{path(scope, name)}: expected shape {tuple(variable.shape)}, got {array.shape}")
            variable.assign(array)


def _layers(model: keras.layers.Layer) -> list[tuple[str, Any, Composite | None]]:
    """Return the layers by their scopes, without those inside what is told as a whole."""
    found: list[tuple[str, Any, Composite | None]] = []
    inside: list[str] = []
    parts: dict[int, Composite] = {}
    for scope, layer in layers_of(model):
        if any(not one or scope.startswith(f"{one}.") for one in inside) and id(layer) not in parts:
            continue
        whole = parts.get(id(layer)) or composite(layer)
        if whole is not None and id(layer) not in parts:
            inside.append(scope)
            parts |= {id(part): one for part, one in whole.parts}
        found.append((scope, layer, whole))
    return found


def _own(layer: Any) -> dict[str, Any]:
    held = [*getattr(layer, "_trainable_variables", ()), *getattr(layer, "_non_trainable_variables", ())]
    return {one.name: one for one in held if not str(one.name).startswith("seed_generator")}


def _array(variable: Any) -> Array:
    return np.asarray(variable.numpy())


def _classes(layer: Any) -> tuple[str, ...]:
    known = (object, keras.layers.Layer, keras.Model)
    return tuple(kind.__name__ for kind in type(layer).__mro__ if kind not in known) or ("Layer",)


def _settings(layer: Any) -> dict[str, Any]:
    """Return the plain attributes; of a convolution what a ``ZeroPadding`` before it adds is its own padding."""
    found: dict[str, Any] = {}
    for name, value in vars(layer).items():
        plain = value if isinstance(value, (tuple, list)) else [value]
        if not name.startswith("_") and all(isinstance(one, PLAIN) for one in plain):
            found[name] = value
        elif callable(value) and hasattr(value, "__name__"):
            found[name] = value.__name__
    if found.get("padding") == "valid":
        found["padding"] = padded_before(layer)
    return found


def padded_before(layer: Any) -> Any:
    """Return what a ``ZeroPadding`` layer before a layer of a functional model adds on each side; 0 where there is none."""
    nodes = getattr(layer, "_inbound_nodes", ())
    inputs = [tensor for node in nodes[:1] for tensor in node.input_tensors]
    before: Any = getattr(getattr(inputs[0], "_keras_history", None), "operation", None) if len(inputs) == 1 else None
    if type(before).__name__ not in ("ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D"):
        return 0
    padding = before.padding if isinstance(before.padding[0], (tuple, list)) else (before.padding,)
    even = [pair[0] for pair in padding if pair[0] == pair[1]]
    return even if len(even) == len(padding) else [list(pair) for pair in padding]


def optimizer_facts(optimizer: keras.optimizers.Optimizer) -> OptimizerFacts:
    """Return what an optimizer is."""
    settings = {n: v for n, v in vars(optimizer).items() if isinstance(v, PLAIN) and not n.startswith("_")}
    settings["lr"] = float(str(np.float32(optimizer.learning_rate)))  # 0.001, which float32 has not exactly
    settings["weight_decay"] = settings.get("weight_decay") or 0.0
    clips = {"clipnorm": "of each gradient", "clipvalue": "of each element", "global_clipnorm": "of all gradients"}
    clipping = [f"{name} {said} at {value}" for name, said in clips.items() if (value := getattr(optimizer, name, None))]
    rate = optimizer._learning_rate
    scheduled = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    classes = tuple(kind.__name__ for kind in type(optimizer).__mro__ if kind not in (object, keras.optimizers.Optimizer))
    return OptimizerFacts("tensorflow", classes, settings, (), ", ".join(clipping), type(rate).__name__ if scheduled else "")


def without_dropout(model: keras.layers.Layer) -> contextlib.AbstractContextManager[int]:
    """Turn dropout off for a while; gives how many layers had any."""
    found: list[tuple[Any, str, Any]] = []
    for _, layer in layers_of(model):
        if isinstance(getattr(layer, "rate", None), float) and "Dropout" in type(layer).__name__ and layer.rate:
            found.append((layer, "rate", 0.0))
        for name in ("dropout", "recurrent_dropout", "_dropout"):
            if isinstance(vars(layer).get(name), float) and vars(layer)[name]:
                found.append((layer, name, 0.0))
    return attributes_set(found)


def tensor(array: Any) -> Any:
    """Return an array as a tensor."""
    return tf.constant(np.asarray(array))


def is_floating(value: Any) -> bool:
    """Tell whether a value is a tensor of floating point."""
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def mean_square(value: Any) -> Any:
    """Return the mean of the squares of a tensor's elements."""
    return tf.reduce_mean(value * value)


def step(model: keras.layers.Layer, loss: Callable[[], Any], optimizer: Any | None) -> None:
    """Run a forward and a backward, and an optimizer's step where one is given."""
    with tf.GradientTape() as tape:
        value = loss()
    variables = model.trainable_variables
    gradients = tape.gradient(value, variables)
    if optimizer is not None:
        optimizer.apply_gradients([(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None])


def no_gradients() -> Any:
    """Return a block in which nothing is differentiated: without a tape nothing is."""
    return contextlib.nullcontext()
