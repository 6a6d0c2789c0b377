"""A paddle.nn.Layer as `trueup.analysis.pairing` sees it, and its weights as arrays."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle

from trueup.foundation.frameworks.trees import PLAIN, Node, OptimizerFacts, Tree, classes_of, gathered, path, plain_attributes
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.paddle.tensors import layout_of, to_numpy
from trueup.recording.engine import replacing
from trueup.recording.engine.settings import by_scope, inputs_of


def tree(model: paddle.nn.Layer) -> Tree:
    """Return the Layers of a model with their tensors and settings."""
    return gathered("paddle", ((_node(scope, layer), _own(layer)) for scope, layer in _layers(model)))


def _node(scope: str, layer: paddle.nn.Layer) -> Node:
    own = _own(layer)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    norms = {name: float(np.linalg.norm(_array(tensor).astype(np.float64))) for name, tensor in own.items()}
    return Node(scope, classes_of(layer, paddle.nn.Layer) or ("Layer",), shapes, plain_attributes(layer), norms)


def settings(model: paddle.nn.Layer) -> dict[str, dict[str, Any]]:
    """Return by scope what each Layer is set to: class, mode, plain attributes, dtypes, frozen and tied parameters."""
    return by_scope(
        (
            scope,  # Paddle keeps the arguments of a Layer private
            {"class": type(layer).__name__, "training": layer.training, **inputs_of(getattr(type(layer), "forward", None))}
            | {name.lstrip("_"): value for name, value in plain_attributes(layer).items()},
            ((name, one, not one.stop_gradient) for name, one in layer._parameters.items() if one is not None),
        ) for scope, layer in _layers(model)
    )  # fmt: skip


def state(model: paddle.nn.Layer) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a model by full name; a recurrent network's twice, as Paddle has them."""
    return {path(scope, name): _array(tensor) for scope, layer in _layers(model) for name, tensor in _own(layer).items()}


def load(model: paddle.nn.Layer, found: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays into the tensors of a model, in place; raise `TrueupError` where an array has another shape than the
    tensor."""
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
    settings = {n: v for n, v in vars(optimizer).items() if isinstance(v, PLAIN)}
    settings |= {n: v.__name__ for n, v in vars(optimizer).items() if inspect.isfunction(v)}  # which parameters decay, for one
    settings["lr"] = float(optimizer.get_lr())
    settings["weight_decay"] = _decay(optimizer)
    groups = [group for group in optimizer._param_groups if isinstance(group, dict)]
    plain = [{n: v for n, v in group.items() if n != "params" and v is not None} for group in groups]
    clip, rate = optimizer._grad_clip, optimizer._learning_rate
    clipping = "" if clip is None else f"{type(clip).__name__} at {getattr(clip, 'clip_norm', getattr(clip, 'max', '?'))}"
    classes = classes_of(optimizer, paddle.optimizer.Optimizer)
    schedule = "" if isinstance(rate, (int, float)) else type(rate).__name__
    held = tuple(group["params"] for group in groups) if groups else (optimizer._parameter_list or (),)
    return OptimizerFacts("paddle", classes, settings, tuple(plain[1:]), clipping, schedule, held)


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
    return replacing.without_dropout(model.sublayers(include_self=True))


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
