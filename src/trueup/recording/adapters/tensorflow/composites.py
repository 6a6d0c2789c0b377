"""Keras layers whose weights lie in layers below them, and in other shapes than the neutral ones: told as one layer.

A recurrent layer keeps its weights in a cell: a kernel ``[inputs, gates * units]`` for inputs and one for what it remembers, and
one bias. Neutral (PyTorch) are ``weight_ih_l0 [gates * units, inputs]``, ``weight_hh_l0`` and two biases that are added; of an LSTM
Keras has their sum, so it becomes ``bias_ih_l0`` beside zeros. A GRU's gates are update, reset, new; neutral is reset first; with
``reset_after`` (the default) it has both biases, without it computes something else, which no row of the tables has.

An attention's projections have kernels ``[embed, heads, width]``, and ``[heads, width, embed]`` for what comes out; neutral are
matrices of Linear layers, ``[heads * width, embed]``. (Sources of Keras 3.15: layers/rnn/{lstm,gru}.py, layers/attention/
multi_head_attention.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

Array = np.ndarray[Any, Any]

ORDERS = {"LSTM": (0, 1, 2, 3), "GRU": (1, 0, 2), "SimpleRNN": (0,)}
"""Which of Keras's gates the neutral ones are; the same order leads back."""

PROJECTIONS = {"q_proj": "_query_dense", "k_proj": "_key_dense", "v_proj": "_value_dense"}


@dataclass(frozen=True)
class Composite:
    """A layer that is told as a whole.

    Args:
        classes: what it goes by.
        read: returns its tensors by neutral names.
        write: takes them; all that ``read`` gives, or those that there are.
        settings: its plain attributes.
        parts: layers below it that are told of their own.
    """

    classes: tuple[str, ...]
    read: Callable[[], dict[str, Array]]
    write: Callable[[Mapping[str, Array]], None]
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[tuple[Any, Composite], ...] = ()


def composite(layer: Any) -> Composite | None:
    """Return a layer as a whole; None: it is told as it is."""
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
    """Tell whether a layer is a recurrent one that computes what the neutral one does; else its cell is told as it is."""
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
            told = {n.removesuffix(ending): a for n, a in found.items() if n.endswith(ending)}
            if told:
                _write_cell(layer.cell, kind, told)

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


def _array(variable: Any) -> Array:
    return np.asarray(variable.numpy())
