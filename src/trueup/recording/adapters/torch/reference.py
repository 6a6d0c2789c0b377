"""What an operator should have computed: the same call, on copies of its inputs, in a wider dtype on a trusted device.

    >>> reference = Reference(torch.device("cpu"), torch.float64)
    >>> call = reference.prepare(operator, (x, y), {})       # aten::add_: before it runs, for x is about to be written
    >>> reference.run(call, {"output.0": x})
    {'output.0': tensor([...], dtype=torch.float64)}

Nothing of the training's is touched: inputs are copied to the reference device and widened there, so that the device under
suspicion does no arithmetic for its own judgement. An operator that only some devices have, or whose result is made for its own
backward alone, has a formula here; what cannot be computed again raises `NoReference` with the reason.

References of operators that no ordinary device has, or whose CPU kernel is not for float64: their definitions, spelled out. Each
formula takes the arguments by name, widened, and the outputs there were, and returns what they should have been, by slot; a slot
that it leaves out is private to the operator's own backward (a workspace, a random state) and is not compared. None: this call is
random. Sources: the operators' documentation in torch/nn/functional.py and aten/src/ATen/native/native_functions.yaml (PyTorch
2.13); cells: aten/src/ATen/native/cuda/RNN.cu, whose workspaces the fused cells of other vendors copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from trueup.foundation.facts.operators import has, says
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.functions import Operator, _outputs
from trueup.recording.adapters.torch.tensors import is_plain

Arguments = dict[str, Any]
Outputs = dict[str, Tensor]
Formula = Callable[[Arguments, Outputs], "Outputs | None"]
"""``formula(arguments, actual) -> outputs``: tensors in the reference's dtype, keys like ``output.0``."""

aten: Any = torch.ops.aten


# ------------------------------------------------------------------------------------------------------------- attention
def _scores(a: Arguments, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return logits ``(..., L, S)``, keys and values repeated for grouped queries, and the scale."""
    query, key, value = a["query"], a["key"], a["value"]
    asked = a.get("scale")
    scale: float = 1 / math.sqrt(query.size(-1)) if asked is None else float(asked)
    groups = query.size(-3) // key.size(-3) if query.dim() > 2 else 1
    if groups > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    logits: Tensor = query @ key.transpose(-1, -2) * scale
    if a["is_causal"]:
        rows, columns = logits.shape[-2:]
        above = torch.ones(rows, columns, dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(above, -math.inf)
    if bias is not None:
        logits = logits.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else logits + bias
    return logits, key, value, scale


def _bias(a: Arguments) -> Tensor | None:
    found = a.get("attn_mask", a.get("attn_bias"))
    return found if found is not None and found.numel() else None


def _attention(a: Arguments, _: Outputs) -> Outputs | None:
    if a["dropout_p"]:
        return None
    logits, _key, value, _scale = _scores(a, _bias(a))
    found = {"output.0": logits.softmax(-1) @ value}
    if a.get("compute_log_sumexp", True):  # padded, in some kernels: then the shapes tell
        found["output.1"] = logits.logsumexp(-1)
    return found


def _attention_backward(a: Arguments, _: Outputs) -> Outputs | None:
    if a["dropout_p"]:
        return None
    a.setdefault("grad_out", a.get("grad_out_"))
    bias = _bias(a)
    logits, key, value, scale = _scores(a, bias)
    weights, gradient = _weights(logits, a["logsumexp"]), a["grad_out"]
    of_weights = gradient @ value.transpose(-1, -2)
    of_logits = weights * (of_weights - (gradient * a["out"]).sum(-1, keepdim=True))
    found = {
        "output.0": of_logits @ key * scale,
        "output.1": _ungrouped(of_logits.transpose(-1, -2) @ a["query"] * scale, a["key"]),
        "output.2": _ungrouped(weights.transpose(-1, -2) @ gradient, a["value"]),
    }
    mask = a.get("grad_input_mask")
    if mask is None:
        return found
    if bias is not None and bias.dtype != torch.bool:
        found["output.3"] = of_logits.sum_to_size(bias.shape)
    return {slot: tensor for slot, tensor in found.items() if mask[int(slot[-1])]}


def _weights(logits: Tensor, logsumexp: Tensor) -> Tensor:
    """Return the softmax by the sums that the forward left: a backward is not to blame for what it was given."""
    rows = logits.size(-2)
    if logsumexp.shape[:-1] != logits.shape[:-2] or logsumexp.size(-1) < rows:
        return logits.softmax(-1)
    return (logits - logsumexp[..., :rows, None]).exp()


def _ungrouped(gradient: Tensor, like: Tensor) -> Tensor:
    if gradient.shape == like.shape:
        return gradient
    return gradient.unflatten(-3, (like.size(-3), -1)).sum(-3)


# ----------------------------------------------------------------------------------------------------------------- cells
def _lstm_cell(a: Arguments, _: Outputs) -> Outputs:
    gates = a["input_gates"] + a["hidden_gates"]
    for name in ("input_bias", "hidden_bias"):
        gates = gates if a[name] is None else gates + a[name]
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * a["cx"] + i * g
    return {"output.0": o * cy.tanh(), "output.1": cy}


def _lstm_cell_backward(a: Arguments, _: Outputs) -> Outputs:
    cx, cy, workspace = a["cx"], a["cy"], a["workspace"]
    i, f, g, o = workspace.view(cx.size(0), -1).chunk(4, 1)
    t = cy.tanh()
    of_hy = torch.zeros_like(cx) if a["grad_hy"] is None else a["grad_hy"]
    d = of_hy * o * (1 - t * t)
    d = d if a["grad_cy"] is None else d + a["grad_cy"]
    gates = torch.cat([d * g * i * (1 - i), d * cx * f * (1 - f), d * i * (1 - g * g), of_hy * t * o * (1 - o)], 1)
    found = {"output.0": gates, "output.1": d * f}
    return found | {"output.2": gates.sum(0)} if a["has_bias"] else found


def _gru_cell(a: Arguments, _: Outputs) -> Outputs:
    to_input, to_hidden = a["input_gates"], a["hidden_gates"]
    to_input = to_input if a["input_bias"] is None else to_input + a["input_bias"]
    to_hidden = to_hidden if a["hidden_bias"] is None else to_hidden + a["hidden_bias"]
    ir, iz, i_n = to_input.chunk(3, 1)
    hr, hz, hn = to_hidden.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i_n + hn * r).tanh()
    return {"output.0": (a["hx"] - n) * z + n}


def _gru_cell_backward(a: Arguments, _: Outputs) -> Outputs:
    gradient = a["grad_hy"]
    r, z, n, hx, hn = a["workspace"].view(gradient.size(0), -1).chunk(5, 1)
    of_z = gradient * (hx - n) * (1 - z) * z
    of_n = gradient * (1 - z) * (1 - n * n)
    of_r = of_n * hn * (1 - r) * r
    to_input, to_hidden = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
    found = {"output.0": to_input, "output.1": to_hidden, "output.2": gradient * z}
    return found | {"output.3": to_input.sum(0), "output.4": to_hidden.sum(0)} if a["has_bias"] else found


LSTM_MODE = 2
"""at::native::RNN mode of an LSTM (cudnn and oneDNN wrappers)."""


def _unrolled(a: Arguments, weights: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Run one direction of an LSTM layer; return time, input, previous h and c, gates i f g o, c and h of each step."""
    x = a["input"]
    to_gates, hidden_to_gates, *biases = weights
    bias: Any = sum(biases) if a["has_biases"] else 0
    cell = a["cx_"] if "cx_" in a else a["cx_tmp"]
    h, c = a["hx_"].reshape(-1, a["hidden_size"]), cell.reshape(-1, a["hidden_size"])
    steps = range(x.size(0) - 1, -1, -1) if a["reverse"] else range(x.size(0))
    run = []
    for t in steps:
        i, f, g, o = (x[t] @ to_gates.t() + h @ hidden_to_gates.t() + bias).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        previous, c_before = h, c
        c = f * c + i * g
        h = o * c.tanh()
        run.append((torch.tensor(t), x[t], previous, c_before, i, f, g, o, c, h))
    return run


def _layer(a: Arguments, _: Outputs) -> Outputs:
    """oneDNN's layer: ``mkldnn_rnn_layer``, input ``(T, N, I)``."""
    _only_plain_lstm(a)
    run = _unrolled(a, tuple(a[f"weight{k}"] for k in range(4)))
    ordered = sorted(run, key=lambda step: int(step[0]))
    return {"output.0": torch.stack([step[-1] for step in ordered]),
            "output.1": run[-1][-1].reshape(a["hx_"].shape), "output.2": run[-1][-2].reshape(a["cx_"].shape)}  # fmt: skip


def _layer_backward(a: Arguments, _: Outputs) -> Outputs:
    """oneDNN's layer, backwards through time; gradients of input, both weights, both biases, and both states."""
    _only_plain_lstm(a)
    to_gates, hidden_to_gates = a["weight1"], a["weight2"]
    run = _unrolled(a, tuple(a[f"weight{k}"] for k in range(1, 5)))
    nothing = torch.zeros_like(run[-1][-1])
    dh = nothing if a["grad_hy"] is None else a["grad_hy"].reshape(nothing.shape)
    dc = nothing if a["grad_cy"] is None else a["grad_cy"].reshape(nothing.shape)
    of_x, of_w, of_u = torch.zeros_like(a["input"]), torch.zeros_like(to_gates), torch.zeros_like(hidden_to_gates)
    of_bias = torch.zeros_like(to_gates[:, 0])
    for at, x, h_before, c_before, i, f, g, o, c, _ in reversed(run):
        dh = dh if a["grad_output"] is None else dh + a["grad_output"][int(at)]
        t = c.tanh()
        dc = dc + dh * o * (1 - t * t)
        gates = torch.cat([dc * g * i * (1 - i), dc * c_before * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)], 1)
        of_x[int(at)] = gates @ to_gates
        of_w, of_u, of_bias = of_w + gates.t() @ x, of_u + gates.t() @ h_before, of_bias + gates.sum(0)
        dh, dc = gates @ hidden_to_gates, dc * f
    return {"output.0": of_x, "output.1": of_w, "output.2": of_u, "output.3": of_bias, "output.4": of_bias,
            "output.5": dh.reshape(a["hx_"].shape), "output.6": dc.reshape(a["cx_tmp"].shape)}  # fmt: skip


def _only_plain_lstm(a: Arguments) -> None:
    if a["mode"] != LSTM_MODE or a["batch_first"] or a["batch_sizes"] or a["input"].dim() != 3:
        raise NotImplementedError("of fused recurrent layers only an LSTM's, time first, of equal lengths, has a reference")


# --------------------------------------------------------------------------------------------------------------- the rest
def _dropout(a: Arguments, actual: Outputs) -> Outputs | None:
    """Judge the arithmetic of a dropout by the mask that it drew."""
    if a["train"] is False or a["p"] == 0:
        return {"output.0": a["input"]}
    mask = actual.get("output.1")
    if mask is None or mask.shape != a["input"].shape or a["p"] == 1:
        return None
    return {"output.0": torch.where(mask.bool(), a["input"] / (1 - a["p"]), 0.0)}


def _convolution(a: Arguments, _: Outputs) -> Outputs:
    """cuDNN's and MIOpen's convolution, and the one that private devices fill."""
    given = a.get("input", a.get("self"))
    transposed = a.get("transposed", "output_padding" in a)
    return {"output.0": aten.convolution(given, a["weight"], a.get("bias"), a["stride"], a["padding"], a["dilation"], transposed,
                                         a.get("output_padding", [0]), a["groups"])}  # fmt: skip


def _convolution_backward(a: Arguments, _: Outputs) -> Outputs:
    found = aten.convolution_backward(
        a["grad_output"], a["input"], a["weight"], [a["weight"].size(1 if a["transposed"] else 0)], a["stride"], a["padding"],
        a["dilation"], a["transposed"], a["output_padding"], a["groups"], a["output_mask"],
    )  # fmt: skip
    return {f"output.{k}": tensor for k, tensor in enumerate(found) if tensor is not None}


def _batch_norm(a: Arguments, _: Outputs) -> Outputs:
    """cuDNN's and MIOpen's batch norm: training updates running statistics that the schema does not mark."""
    output, mean, inverse = aten.native_batch_norm(
        a["input"], a["weight"], a["bias"], a["running_mean"], a["running_var"], a["training"], a["exponential_average_factor"],
        a["epsilon"],
    )  # fmt: skip
    found = {"output.0": output}
    if a["training"]:
        found |= {"output.1": mean, "output.2": inverse}
        found |= {f"output.{name}": a[name] for name in ("running_mean", "running_var") if a[name] is not None}
    return found


def _batch_norm_backward(a: Arguments, _: Outputs) -> Outputs:
    found = aten.native_batch_norm_backward(
        a["grad_output"], a["input"], a["weight"], a["running_mean"], a["running_var"], a["save_mean"], a["save_var"], True,
        a["epsilon"], [True, True, True],
    )  # fmt: skip
    return {f"output.{k}": tensor for k, tensor in enumerate(found)}


_FUSED_ATTENTION = tuple(
    f"aten::_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu", "fused_attention_overrideable",
    )
)

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_FUSED_ATTENTION, _attention), **{f"{name}_backward": _attention_backward for name in _FUSED_ATTENTION},
    "aten::_thnn_fused_lstm_cell": _lstm_cell, "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _gru_cell, "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "aten::mkldnn_rnn_layer": _layer, "aten::mkldnn_rnn_layer_backward": _layer_backward, "aten::native_dropout": _dropout,
    "aten::cudnn_convolution": _convolution, "aten::cudnn_convolution_transpose": _convolution,
    "aten::miopen_convolution": _convolution, "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward_overrideable": _convolution_backward, "aten::cudnn_batch_norm": _batch_norm,
    "aten::miopen_batch_norm": _batch_norm, "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::miopen_batch_norm_backward": _batch_norm_backward,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]

RANDOM = "random: another draw is as good"
FOREIGN = "an operator of another library, for which no reference is known"
OPAQUE = "a higher-order operator: what it executes is not seen"
HANDED_OUT = "it hands out memory and computes nothing"
SUBCLASS = "a tensor that is not a plain array"

INSTEAD: dict[str, Any] = {"half_to_float": False, "pin_memory": None, "generator": None}
"""Arguments that mean nothing, or the wrong thing, to the reference."""


class NoReference(Exception):
    """A call cannot be computed again; the text says why, in a few words."""


@dataclass(slots=True)
class Prepared:
    """A call with copies of its inputs on the reference device."""

    operator: Operator
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtypes: tuple[torch.dtype, ...]  # of its floating tensors, in order, as the training had them

    def named(self) -> dict[str, Any]:
        """Return the arguments by name, defaults included."""
        arguments = self.func._schema.arguments
        bound = {argument.name: argument.default_value for argument in arguments}
        bound.update(zip(bound, self.args, strict=False))
        return bound | self.kwargs


class Reference:
    """Computes calls of dispatcher operators again, on ``device`` (nothing but copies runs elsewhere), in the real floating
    ``dtype``, complex numbers in the complex one of that width. ``formulas`` are of operators that Trueup does not know
    (``"npu::npu_rms_norm"``); see `Formula`."""

    def __init__(self, device: torch.device, dtype: torch.dtype, formulas: Mapping[str, Formula] | None = None) -> None:
        self.device, self.dtype = device, dtype
        self._complex = torch.complex128 if dtype == torch.float64 else torch.complex64
        self.formulas = {**FORMULAS, **(formulas or {})}

    def why_not(self, operator: Operator, func: Any) -> str | None:
        """Say why an operator has no reference, whatever its arguments; None where it may have one."""
        if operator.opaque:
            return OPAQUE
        if operator.name in self.formulas:
            return None
        if has(operator.name, "memory"):
            return HANDED_OUT
        if torch.Tag.nondeterministic_seeded in func.tags:
            return RANDOM
        return None if operator.name.startswith(("aten::", "prims::")) else FOREIGN

    def prepare(self, operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
        """Copy the inputs of a call that is about to run; raise `NoReference` where it cannot be computed again."""
        reason = self.why_not(operator, func)
        if reason is not None and not (reason == RANDOM and _draws_nothing(func, args, kwargs)):
            raise NoReference(reason)
        names = [argument.name for argument in func._schema.arguments]
        seen: list[torch.dtype] = []
        with alone():
            copied = tuple([self._argument(name, v, operator, seen) for name, v in zip(names, args, strict=False)])
            named = {name: self._argument(name, v, operator, seen) for name, v in kwargs.items()}
        if has(func._opname, "compares") and seen:
            copied, named = tuple([_rounded(v, seen[0]) for v in copied]), {k: _rounded(v, seen[0]) for k, v in named.items()}
        return Prepared(operator, func, copied, named, tuple(seen))

    def run(self, call: Prepared, actual: Tensors, change: Change | None = None) -> Tensors:
        """Compute a call and return the outputs that can be compared, by slot; the inputs stay as they are, ``change`` makes
        others of the floating ones first. A formula may need ``actual``, the outputs there were, widened (the mask of a dropout).
        Raises NoReference where the reference refuses."""
        args, kwargs = call.args, call.kwargs
        with alone():
            if change is not None:
                args, kwargs = _mapped(args, change), {k: _mapped(v, change) for k, v in kwargs.items()}
            elif call.operator.written:  # what it only reads need not be copied
                places, names = ({place[k] for place in call.operator.written} for k in (0, 1))
                args = tuple([_mapped(v, torch.clone) if k in places else v for k, v in enumerate(args)])
                kwargs = {k: _mapped(v, torch.clone) if k in names else v for k, v in kwargs.items()}
            try:
                return self._computed(Prepared(call.operator, call.func, args, kwargs, call.dtypes), actual)
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
                raise NoReference(f"the reference refused: {first_line(error, 100)}") from None

    def _computed(self, call: Prepared, actual: Tensors) -> Tensors:
        formula = self.formulas.get(call.operator.name)
        if formula is not None:
            found = formula(call.named(), actual)
            if found is None:
                raise NoReference(RANDOM)
            return found
        result = call.func(*call.args, **call.kwargs)
        outputs, _ = _outputs(call.operator, call.args, call.kwargs, result)
        unchecked = says(call.operator.name, "unchecked") or ()
        return {slot: tensor for slot, tensor in outputs if slot not in unchecked}

    def _argument(self, name: str, value: Any, operator: Operator, seen: list[torch.dtype]) -> Any:
        return INSTEAD[name] if name in INSTEAD else self._moved(value, bool(operator.written), seen)

    def _moved(self, value: Any, copy: bool, seen: list[torch.dtype]) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype.is_floating_point or value.dtype.is_complex:
                seen.append(value.dtype)
            return self.tensor(value, copy=copy)
        if type(value) in (list, tuple):
            return type(value)([self._moved(item, copy, seen) for item in value])
        if isinstance(value, torch.device):
            return self.device
        return self.widened(value) if isinstance(value, torch.dtype) else value

    def tensor(self, tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """Copy a tensor to the reference device and widen it there (without ``copy`` perhaps itself); raise `NoReference` for
        what is not a plain array."""
        if not is_plain(tensor) or tensor.device.type == "meta":
            raise NoReference(SUBCLASS)
        moved = tensor if tensor.device == self.device else tensor.to(self.device)
        wide = moved.to(self.widened(moved.dtype))  # on the reference device, not on the one that is judged
        return wide.clone() if copy and wide is tensor else wide

    def widened(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the reference holds one."""
        if dtype.is_complex:
            return self._complex
        return self.dtype if dtype.is_floating_point and dtype.itemsize <= self.dtype.itemsize else dtype


def _draws_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call of an operator that may draw random numbers drops nothing: an LSTM or an attention without dropout."""
    arguments = func._schema.arguments
    usual = {one.name: one.default_value for one in arguments if one.has_default_value()}  # attention's dropout_p is 0.0
    named = usual | dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
    shares = [named[name] for name in ("p", "dropout", "dropout_p") if name in named]
    return named.get("train") is False or (bool(shares) and not any(shares))


def alone() -> AbstractContextManager[Any]:
    """Return a context without the user's modes and without gradients: our arithmetic is nobody's call."""
    return _Alone() if torch._C._len_torch_dispatch_stack() else torch.no_grad()


class _Alone:
    def __enter__(self) -> None:
        self._modes, self._gradients = _disable_current_modes(), torch.no_grad()
        self._modes.__enter__()
        self._gradients.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._gradients.__exit__(*error)
        self._modes.__exit__(*error)


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, float) or not dtype.is_floating_point or dtype.itemsize < 2:  # float8 is compared as something wider
        return value
    return torch.tensor(value, dtype=dtype).item()


def _mapped(value: Any, change: Change) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)([_mapped(item, change) for item in value]) if type(value) in (list, tuple) else value
