"""A paddle.nn.Layer as `trueup.analysis.pairing` sees it, and its weights as arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle

from trueup.foundation.frameworks.trees import Node, OptimizerFacts, Tree, path
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.paddle.host import to_numpy
from trueup.recording.adapters.paddle.tensors import layout_of
from trueup.recording.recorder.replacing import attributes_set


def tree(model: paddle.nn.Layer) -> Tree:
    """Return the Layers of a model with their tensors and settings."""
    nodes: dict[str, Node] = {}
    ties: dict[str, str] = {}
    seen: dict[int, str] = {}
    for scope, layer in model.named_sublayers(include_self=True):
        own = _own(layer)
        for name, tensor in own.items():
            first = seen.setdefault(id(tensor), path(scope, name))
            if first != path(scope, name):
                ties[path(scope, name)] = first
        classes = tuple(kind.__name__ for kind in type(layer).__mro__ if kind not in (object, paddle.nn.Layer))
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        norms = {name: float(np.linalg.norm(_array(tensor).astype(np.float64))) for name, tensor in own.items()}
        nodes[scope] = Node(scope, classes or ("Layer",), shapes, _settings(layer), norms)
    return Tree("paddle", nodes, ties)


def state(model: paddle.nn.Layer) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a model by full name; a recurrent network's twice, as Paddle has them."""
    return {path(scope, name): _array(tensor) for scope, layer in _layers(model) for name, tensor in _own(layer).items()}


def load(model: paddle.nn.Layer, found: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays into the tensors of a model, in place.

    Raises:
        TrueupError: an array has another shape than the tensor.
    """
    tensors = {path(scope, name): tensor for scope, layer in _layers(model) for name, tensor in _own(layer).items()}
    for name, array in found.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != array.shape:
            raise TrueupError(f"{name}: expected shape {tuple(tensor.shape)}, got {array.shape}")
        tensor.set_value(_plain(array).astype(_plain(_array(tensor)).dtype))


def _layers(model: paddle.nn.Layer) -> Any:
    return model.named_sublayers(include_self=True)


def _own(layer: paddle.nn.Layer) -> dict[str, paddle.Tensor]:
    kept = {n: t for n, t in layer._buffers.items() if n not in layer._non_persistable_buffer_names_set}
    found = {**layer._parameters, **kept}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, paddle.Tensor) and tensor._is_initialized()}


def _settings(layer: paddle.nn.Layer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in vars(layer).items():
        plain = value if isinstance(value, (tuple, list)) else [value]
        if all(isinstance(one, (bool, int, float, str, type(None))) for one in plain):
            found[name] = value
        elif callable(value) and hasattr(value, "__name__"):
            found[name] = value.__name__
    return found


def _array(tensor: paddle.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    layout = layout_of(tensor)
    if layout is None:
        raise TrueupError(f"a tensor of shape {list(tensor.shape)} and dtype {tensor.dtype} has no bytes of its own")
    return to_numpy(tensor, layout)


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Paddle takes bfloat16 as the integers of its bits."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def optimizer_facts(optimizer: paddle.optimizer.Optimizer) -> OptimizerFacts:
    """Return what an optimizer is."""
    settings = {n: v for n, v in vars(optimizer).items() if isinstance(v, (bool, int, float, str, type(None)))}
    settings["lr"] = float(optimizer.get_lr())
    settings["weight_decay"] = _decay(optimizer)
    groups = [group for group in optimizer._param_groups if isinstance(group, dict)]
    plain = [{n: v for n, v in group.items() if n != "params" and v is not None} for group in groups]
    clip, rate = optimizer._grad_clip, optimizer._learning_rate
    clipping = "" if clip is None else f"{type(clip).__name__} at {getattr(clip, 'clip_norm', getattr(clip, 'max', '?'))}"
    classes = tuple(kind.__name__ for kind in type(optimizer).__mro__ if kind not in (object, paddle.optimizer.Optimizer))
    schedule = "" if isinstance(rate, (int, float)) else type(rate).__name__
    return OptimizerFacts("paddle", classes, settings, tuple(plain[1:]), clipping, schedule)


def _decay(optimizer: paddle.optimizer.Optimizer) -> float:
    """Return the weight decay, which Paddle 3.3 keeps in one of three places."""
    held = getattr(optimizer, "regularization", None)
    for value in (
        getattr(held, "_coeff", getattr(held, "_regularization_coeff", None)), getattr(optimizer, "_regularization_coeff", None),
        getattr(optimizer, "_weight_decay", None),
    ):  # fmt: skip
        if isinstance(value, (int, float)) and value:
            return float(value)
    return 0.0


def without_dropout(model: paddle.nn.Layer) -> contextlib.AbstractContextManager[int]:
    """Turn dropout off for a while; gives how many Layers had any."""
    found: list[tuple[Any, str, Any]] = []
    for layer in model.sublayers(include_self=True):
        if type(layer).__name__ in ("Dropout", "Dropout2D", "Dropout3D", "AlphaDropout", "FeatureAlphaDropout"):
            found += [(layer, "p", 0.0)] if layer.p else []
        elif isinstance(getattr(layer, "dropout", None), float) and layer.dropout:
            found.append((layer, "dropout", 0.0))
    return attributes_set(found)


def tensor(array: Any) -> paddle.Tensor:
    """Return an array as a tensor."""
    return paddle.to_tensor(np.asarray(array))


def is_floating(value: Any) -> bool:
    """Tell whether a value is a tensor of floating point."""
    return isinstance(value, paddle.Tensor) and value.is_floating_point()


def mean_square(value: paddle.Tensor) -> paddle.Tensor:
    """Return the mean of the squares of a tensor's elements."""
    return (value * value).mean()


def step(model: paddle.nn.Layer, loss: Callable[[], Any], optimizer: Any | None) -> None:
    """Run a forward and a backward, and an optimizer's step where one is given; forget the gradients."""
    loss().backward()
    if optimizer is not None:
        optimizer.step()
    model.clear_gradients()


def no_gradients() -> Any:
    """Return a block in which nothing is differentiated."""
    return paddle.no_grad()
