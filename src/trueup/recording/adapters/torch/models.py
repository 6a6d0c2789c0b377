"""A torch.nn.Module as `trueup.analysis.pairing` sees it, and its weights as arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from trueup.foundation.frameworks.trees import Node, OptimizerFacts, Tree, classes_of, gathered, path
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch.buffers import to_numpy
from trueup.recording.adapters.torch.context import paths
from trueup.recording.engine import replacing
from trueup.recording.engine.settings import by_scope, inputs_of

PLAIN = (bool, int, float, str, tuple, list, type(None))


def tree(model: torch.nn.Module) -> Tree:
    """Return the modules of a model with their tensors and settings."""
    return gathered("torch", ((_node(scope, module), _own(module)) for scope, module in model.named_modules()))


def _node(scope: str, module: torch.nn.Module) -> Node:
    own = _own(module)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    norms = {name: _norm(tensor) for name, tensor in own.items()}
    return Node(scope, classes_of(module, torch.nn.Module) or ("Module",), shapes, _settings(module), norms)


def settings(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Return by scope what each module is set to: class, mode, plain attributes, dtypes, frozen and tied parameters."""
    return by_scope(
        (
            scope,
            {
                "class": type(module).__name__, "training": module.training,
                **inputs_of(getattr(type(module), "forward", None)), **_settings(module),
            },
            ((name, one, one.requires_grad) for name, one in module._parameters.items() if one is not None),
        ) for scope, module in paths(model)
    )  # fmt: skip


def autocast(model: torch.nn.Module) -> str:
    """Return to which dtypes autocast casts now on the devices of a model; empty where it is off."""
    kinds = {one.device.type for one in model.parameters()} - {"meta"}
    dtypes = {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    return ", ".join(sorted(str(one).removeprefix("torch.") for one in dtypes))


def state(model: torch.nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a model by full name; read only, and of the model's memory where that is on the host."""
    return {path(scope, name): _array(tensor) for scope, module in model.named_modules() for name, tensor in _own(module).items()}


def load(model: torch.nn.Module, found: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays into the tensors of a model, in place; raise `TrueupError` where an array has another shape than the
    tensor."""
    tensors = {path(scope, name): tensor for scope, module in model.named_modules() for name, tensor in _own(module).items()}
    for name, array in found.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != array.shape:
            raise TrueupError(f"{name}: expected shape {tuple(tensor.shape)}, got {array.shape}")
        with torch.no_grad():
            tensor.copy_(_tensor(array))


def _own(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    kept = {n: t for n, t in module._buffers.items() if n not in module._non_persistent_buffers_set}
    return {name: tensor for name, tensor in {**module._parameters, **kept}.items() if tensor is not None}


def _settings(module: torch.nn.Module) -> dict[str, Any]:
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, PLAIN):
            found[name] = value
        elif callable(value) and hasattr(value, "__name__"):
            found[name] = value.__name__
    return found


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return to_numpy(tensor.detach().cpu())


def _norm(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point() or tensor.is_meta:
        return float("nan")
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64 if tensor.device.type == "cpu" else torch.float32))


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat16", "float8")):
        array = array.astype(np.float32)
    return torch.from_numpy(np.array(array))


def optimizer_facts(optimizer: torch.optim.Optimizer, *, waits: bool = True) -> OptimizerFacts:
    """Return what an optimizer is, ``betas`` as two settings; ``waits`` False leaves out numbers that a device holds, for which
    one would wait."""
    groups = [_spread(group, waits=waits) for group in optimizer.param_groups]
    more = tuple({n: v for n, v in group.items() if v != groups[0].get(n)} for group in groups[1:])
    classes = classes_of(optimizer, torch.optim.Optimizer)
    held = tuple(group["params"] for group in optimizer.param_groups)
    return OptimizerFacts("torch", classes, groups[0] if groups else {}, more, held=held)


def _spread(group: dict[str, Any], *, waits: bool) -> dict[str, Any]:
    found = {name: value for name, value in group.items() if name not in ("params", "betas", "initial_lr")}
    found["parameters"] = len(group["params"])
    found |= {f"beta{n}": value for n, value in enumerate(group.get("betas", ()), 1)}
    return {name: _number(value) for name, value in found.items() if waits or not _on_device(value)}


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def without_dropout(model: torch.nn.Module) -> contextlib.AbstractContextManager[int]:
    """Turn dropout off for a while; gives how many modules had any."""
    return replacing.without_dropout(model.modules())


def tensor(array: Any) -> torch.Tensor:
    """Return an array as a tensor."""
    return _tensor(np.asarray(array))


def is_floating(value: Any) -> bool:
    """Tell whether a value is a tensor of floating point."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def mean_square(value: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squares of a tensor's elements."""
    return (value * value).mean()


def step(model: torch.nn.Module, loss: Callable[[], Any], optimizer: Any | None) -> None:
    """Run a forward and a backward, and an optimizer's step where one is given; forget the gradients."""
    loss().backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)


def no_gradients() -> Any:
    """Return a block in which nothing is differentiated."""
    return torch.no_grad()
