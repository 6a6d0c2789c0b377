"""A Keras model as `trueup.analysis.pairing` sees it, its weights as arrays, and a training step of it.

Some layers keep their weights in layers below them, in shapes that are not the neutral ones. Such a layer is one `Composite`.

A recurrent layer keeps its weights in a cell: a kernel ``[inputs, gates * units]`` for inputs and one for what it remembers, and
one bias. Neutral (PyTorch) are ``weight_ih_l0 [gates * units, inputs]``, ``weight_hh_l0`` and two biases that are added; of an LSTM
Keras has their sum, so it becomes ``bias_ih_l0`` beside zeros. A GRU's gates are update, reset, new; neutral is reset first; with
``reset_after`` (the default) it has both biases, without it computes something else, which no row of the tables has.

An attention's projections have kernels ``[embed, heads, width]``, and ``[heads, width, embed]`` for what comes out; neutral are
matrices of Linear layers, ``[heads * width, embed]``. (Sources of Keras 3.15: layers/rnn/{lstm,gru}.py, layers/attention/
multi_head_attention.py.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trueup.foundation.frameworks.trees import PLAIN, Node, OptimizerFacts, Tree, classes_of, gathered, path, plain_attributes
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.tensorflow.context import layers_of
from trueup.recording.engine.replacing import attributes_set
from trueup.recording.engine.settings import by_scope, constructor, inputs_of

Array = np.ndarray[Any, Any]


def tree(model: keras.layers.Layer) -> Tree:
    """Return the layers of a model with their tensors and settings; raise `TrueupError` where a layer has no weights yet."""
    return gathered("tensorflow", ((_node(scope, layer, whole), _own(layer)) for scope, layer, whole in _layers(model)))


def _node(scope: str, layer: Any, whole: Composite | None) -> Node:
    if not layer.built:
        raise TrueupError(f"{scope or type(layer).__name__} is not built, so it has no weights: call the model on a batch first")
    held = _held(layer, whole)
    shapes = {name: tuple(array.shape) for name, array in held.items()}
    norms = {name: float(np.linalg.norm(array.astype(np.float64))) for name, array in held.items()}
    if whole is not None:
        return Node(scope, whole.classes, shapes, whole.settings, norms)
    return Node(scope, classes_of(layer, keras.layers.Layer, keras.Model) or ("Layer",), shapes, _settings(layer), norms)


def _held(layer: Any, whole: Composite | None) -> dict[str, Array]:
    """Return the tensors of a layer by name; of one that is a whole by their neutral names."""
    return whole.read() if whole is not None else {name: _array(variable) for name, variable in _own(layer).items()}


def settings(model: keras.layers.Layer) -> dict[str, dict[str, Any]]:
    """Return by scope what each layer is set to: class, plain attributes, dtypes, frozen and tied weights."""
    return by_scope(
        (
            scope,
            {"class": type(layer).__name__, "trainable": bool(layer.trainable), **inputs_of(getattr(type(layer), "call", None))}
            | {**_private(layer), **_settings(layer)},
            ((name, variable, True) for name, variable in _own(layer).items()),
        ) for scope, layer in layers_of(model)
    )  # fmt: skip


def _private(layer: Any) -> dict[str, Any]:
    """Return the arguments that a layer keeps as private attributes, by name."""
    kind: type = type(layer)
    return {name: vars(layer)[f"_{name}"] for name in constructor(kind) if f"_{name}" in vars(layer)}


def state(model: keras.layers.Layer) -> dict[str, Array]:
    """Return the tensors of a model by full name."""
    found: dict[str, Array] = {}
    for scope, layer, whole in _layers(model):
        found |= {path(scope, name): array for name, array in _held(layer, whole).items()}
    return found


def load(model: keras.layers.Layer, found: Mapping[str, Array]) -> None:
    """Write arrays into the tensors of a model, in place; raise `TrueupError` where an array has another shape than the
    tensor."""
    for scope, layer, whole in _layers(model):
        if whole is not None:
            given = {name: found[path(scope, name)] for name in whole.read() if path(scope, name) in found}
            if given:
                whole.write(given)
            continue
        for name, variable in _own(layer).items():
            array = found.get(path(scope, name))
            if array is None:
                continue
            if tuple(variable.shape) != array.shape:
                raise TrueupError(f"{path(scope, name)}: expected shape {tuple(variable.shape)}, got {array.shape}")
            variable.assign(array)


def _layers(model: keras.layers.Layer) -> list[tuple[str, Any, Composite | None]]:
    """Return the layers by their scopes, without those inside a layer that is one whole."""
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


def _settings(layer: Any) -> dict[str, Any]:
    """Return the plain attributes; of a convolution what a ``ZeroPadding`` before it adds is its own padding."""
    held = vars(layer)
    found = {name: value for name, value in plain_attributes(layer).items() if not name.startswith("_") or callable(held[name])}
    if found.get("padding") == "valid":
        found["padding"] = padded_before(layer)
    return found


def padded_before(layer: Any) -> Any:
    """Return the padding on each side by a ``ZeroPadding`` layer before a layer of a functional model; 0 without one."""
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
    excluded = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    if excluded is not None:  # Keras joins names of a set, in an order of each process's own
        settings["exclude_from_weight_decay"] = "|".join(sorted(excluded.pattern.split("|")))
    elif listed := getattr(optimizer, "_exclude_from_weight_decay", None):
        settings["exclude_from_weight_decay"] = f"{len(listed)} variables"
    clips = {"clipnorm": "of each gradient", "clipvalue": "of each element", "global_clipnorm": "of all gradients"}
    clipping = [f"{name} {said} at {value}" for name, said in clips.items() if (value := getattr(optimizer, name, None))]
    rate = optimizer._learning_rate
    scheduled = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    classes = classes_of(optimizer, keras.optimizers.Optimizer)
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


# ----------------------------------------------------------------------------------------------- layers that are one with others
ORDERS = {"LSTM": (0, 1, 2, 3), "GRU": (1, 0, 2), "SimpleRNN": (0,)}
"""Which of Keras's gates the neutral ones are; the same order leads back."""

PROJECTIONS = {"q_proj": "_query_dense", "k_proj": "_key_dense", "v_proj": "_value_dense"}


@dataclass(frozen=True)
class Composite:
    """A layer that is one with the layers below it: ``classes`` it goes by, ``read`` returns its tensors by neutral names,
    ``write`` takes all of them or those that there are, ``settings`` are its plain attributes, ``parts`` layers below it that
    remain their own."""

    classes: tuple[str, ...]
    read: Callable[[], dict[str, Array]]
    write: Callable[[Mapping[str, Array]], None]
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[tuple[Any, Composite], ...] = ()


def composite(layer: Any) -> Composite | None:
    """Return a layer as a whole; None where it stands for itself."""
    if _is_known(layer):
        return _recurrent(type_of(layer), {"": layer}, {"units": layer.units, **_ways(bidirectional=False)})
    if isinstance(layer, keras.layers.Bidirectional) and layer.merge_mode == "concat":
        inner = layer.forward_layer
        if _is_known(inner):
            both = {"": inner, "_reverse": layer.backward_layer}
            return _recurrent(type_of(inner), both, {"units": inner.units, **_ways(bidirectional=True)})
    if isinstance(layer, keras.layers.MultiHeadAttention) and layer.built:
        return _attention(layer)
    return None


def type_of(layer: Any) -> str:
    """Return the name that a recurrent layer goes by."""
    return next(one for one in ORDERS if isinstance(layer, getattr(keras.layers, one)))


def _is_known(layer: Any) -> bool:
    """Tell whether a layer is a recurrent one that computes the same as the neutral one; else its cell stands for itself."""
    recurrent = isinstance(layer, (keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN))
    return recurrent and getattr(layer.cell, "reset_after", True) is not False


def _ways(*, bidirectional: bool) -> dict[str, Any]:
    return {"num_layers": 1, "bidirectional": bidirectional, "batch_first": True}


# ------------------------------------------------------------------------------------------------------------- recurrent layers
def _recurrent(kind: str, directions: Mapping[str, Any], settings: Mapping[str, Any]) -> Composite:
    def read() -> dict[str, Array]:
        return {f"{n}_l0{suffix}": a for suffix, layer in directions.items() for n, a in _cell(layer.cell, kind).items()}

    def write(found: Mapping[str, Array]) -> None:
        for suffix, layer in directions.items():
            ending = f"_l0{suffix}"
            given = {n.removesuffix(ending): a for n, a in found.items() if n.endswith(ending)}
            if given:
                _write_cell(layer.cell, kind, given)

    return Composite((kind,), read, write, settings)


def _gates(array: Array, kind: str) -> Array:
    """Return an array with its gates, along the last axis, in the other's order."""
    order = ORDERS.get(kind)
    if order is None or order == tuple(range(len(order))):
        return array
    return np.concatenate([np.split(array, len(order), axis=-1)[n] for n in order], axis=-1)


def _cell(cell: Any, kind: str) -> dict[str, Array]:
    found = {"weight_ih": _gates(_array(cell.kernel), kind).T, "weight_hh": _gates(_array(cell.recurrent_kernel), kind).T}
    if cell.use_bias:
        bias = _array(cell.bias)
        both = bias if bias.ndim == 2 else np.stack([bias, np.zeros_like(bias)])
        found |= {"bias_ih": _gates(both[0], kind), "bias_hh": _gates(both[1], kind)}
    return found


def _write_cell(cell: Any, kind: str, found: Mapping[str, Array]) -> None:
    for name, variable in (("weight_ih", cell.kernel), ("weight_hh", cell.recurrent_kernel)):
        if name in found:
            variable.assign(_gates(found[name].T, kind))
    if "bias_ih" in found and "bias_hh" in found and cell.use_bias:
        both = [_gates(found[name], kind) for name in ("bias_ih", "bias_hh")]
        cell.bias.assign(np.stack(both) if len(cell.bias.shape) == 2 else both[0] + both[1])


# -------------------------------------------------------------------------------------------------------------------- attention
def _attention(layer: Any) -> Composite:
    inner = {name: getattr(layer, attribute) for name, attribute in PROJECTIONS.items()}

    def read() -> dict[str, Array]:
        found: dict[str, Array] = {}
        for name, dense in inner.items():
            kernel = _array(dense.kernel)
            found[f"{name}.weight"] = kernel.reshape(kernel.shape[0], -1).T
            if dense.bias is not None:
                found[f"{name}.bias"] = _array(dense.bias).reshape(-1)
        return found

    def write(found: Mapping[str, Array]) -> None:
        for name, dense in inner.items():
            if f"{name}.weight" in found:
                dense.kernel.assign(found[f"{name}.weight"].T.reshape(dense.kernel.shape))
            if f"{name}.bias" in found and dense.bias is not None:
                dense.bias.assign(found[f"{name}.bias"].reshape(dense.bias.shape))

    settings = {"num_heads": layer.num_heads, "dropout": layer.dropout}
    out = layer._output_dense
    return Composite(("MultiHeadAttention",), read, write, settings, ((out, _outwards(out)),))


def _outwards(dense: Any) -> Composite:
    """Return the projection of what an attention gives as a Dense."""

    def read() -> dict[str, Array]:
        kernel = _array(dense.kernel)
        found = {"kernel": kernel.reshape(-1, kernel.shape[-1])}
        return found if dense.bias is None else found | {"bias": _array(dense.bias)}

    def write(found: Mapping[str, Array]) -> None:
        for name, array in found.items():
            variable = getattr(dense, name)
            variable.assign(array.reshape(variable.shape))

    return Composite(("Dense", "EinsumDense"), read, write)
