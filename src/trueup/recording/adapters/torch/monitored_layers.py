"""What a monitor takes of the layers of a model, in steps that have everything: outputs, attention's logits, routers.

A forward hook a module returns at once in all other steps. Attention is read where it passes Python: `scaled_dot_product_attention`
from its inputs, for some queries of the first sample, and `softmax` of four dimensions. What a fused kernel of another library
makes is not readable. A router is a Linear called ``router``, ``gate`` or ``wg`` with 2 to 1,024 outputs.

Of collectives that Python calls it takes how many, of how many elements, and the norm of what goes in. What DDP and FSDP send
themselves passes no Python: gradients before DDP are `local_gradient_norm`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch.nn import functional

from trueup.recording.engine.monitoring import FRAMEWORKS, PLANS, QUERIES, Layers, callers
from trueup.recording.engine.replacing import Around, Replacement, Sweep

HALVES = (torch.float16, torch.bfloat16)
CALLERS = 12  # frames in which the module that calls attention is looked for
DEPTH = 64  # frames in which a checkpoint is looked for


class TorchLayers(Layers):
    """The modules that a probe reads."""

    def __init__(self, probe: Any) -> None:
        super().__init__(probe)
        self._hooks: list[Any] = []
        self._rows: dict[tuple[int, torch.device], torch.Tensor] = {}  # of attention that are read, by how many there are
        self.trains = True  # the model's present or last forward makes gradients

    def replacements(self) -> list[Replacement]:
        """Return the functions that attention goes through."""
        return [
            Around(functional, "scaled_dot_product_attention", self._attends), Around(functional, "softmax", self._softmax),
        ]  # fmt: skip

    def add(self, scope: str, module: torch.nn.Module) -> None:
        """Read a module."""
        if id(module) in self.scopes:
            return
        self.scopes[id(module)] = scope
        self._modules.append(module)
        if scope and getattr(module, "_compiled_call_impl", None) is None:
            self._hooks.append(module.register_forward_hook(self._ran))

    def known(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield scopes and modules."""
        yield from zip(self.scopes.values(), self._modules, strict=True)

    def remove(self) -> None:
        """Read no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ---------------------------------------------------------------- outputs
    def _ran(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.awake:  # in this order: what is compiled must not depend on the step
            return
        if self._reads():
            scope = self.scopes.get(id(module), "")
            self._probe.guarded("a module's output", self._take, scope, module, output)
            if self.wants("inputs"):
                self._probe.guarded("a module's input", self._take_input, scope, args)

    def _take_input(self, scope: str, args: Any) -> None:
        floats = (one for one in args if isinstance(one, torch.Tensor) and one.is_floating_point() and not one.is_meta)
        held = next(floats, None)
        if held is not None and held.numel():
            held = held.detach()
            held = held.to_local() if hasattr(held, "to_local") else held
            self.given(scope, held, float(held.numel()))

    def _take(self, scope: str, module: torch.nn.Module, output: Any) -> None:
        found = output[0] if isinstance(output, (tuple, list)) and output else output
        found = found.to_local() if hasattr(found, "to_local") else found
        if not isinstance(found, torch.Tensor) or not found.is_floating_point() or not found.numel() or found.is_meta:
            return
        if found.requires_grad and self.wants("output-gradients"):
            size = float(found.numel())
            found.register_hook(lambda gradient: self._probe.guarded("an output's gradient", self._backward, scope, gradient, size))
        held = found.detach()
        experts = held.shape[-1] if isinstance(module, torch.nn.Linear) else 0
        self.took(
            scope, type(module).__name__, held, float(held.numel()), half=held.dtype in HALVES, experts=experts
        )  # fmt: skip

    def _backward(self, scope: str, gradient: Any, size: float) -> None:
        if self._probe.sampled and isinstance(gradient, torch.Tensor):
            self.gradient(scope, gradient, size)

    @property
    def takes(self) -> bool:
        """Whether the present step has everything."""
        return bool(self._probe.sampled)

    def guarded(self, what: str, call: Any, *given: Any) -> None:
        """See `StepProbe.guarded`."""
        self._probe.guarded(what, call, *given)

    # ---------------------------------------------------------------- attention
    def _attends(self, original: Any, query: Any, key: Any, *rest: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and self.awake and self._reads():
            self._probe.guarded("attention", self._logits, query, key, *rest, *([] if not kwargs else [kwargs]))
        return original(query, key, *rest, **kwargs)

    def _reads(self) -> bool:
        if not self._probe.sampled or torch._C._current_graph_task_id() != -1:  # a checkpoint is computed again in the backward
            return False
        return torch.is_grad_enabled() or (self.trains and _checkpointed())

    def _logits(self, query: torch.Tensor, key: torch.Tensor, *rest: Any) -> None:
        options = dict(rest[-1]) if rest and isinstance(rest[-1], dict) else {}
        given = [one for one in rest if not isinstance(one, dict)]  # value, attn_mask, dropout_p, is_causal
        mask = options.get("attn_mask", given[1] if len(given) > 1 else None)
        causal = options.get("is_causal", given[3] if len(given) > 3 else False)
        q, k = query.detach(), key.detach()
        rows = self._queries(q.shape[-2], q.device)
        q, k = q[(0,) * (q.dim() - 3)][..., rows, :].float(), k[(0,) * (k.dim() - 3)].float()  # heads of the first sample
        if k.shape[0] != q.shape[0]:  # grouped queries
            k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
        scale = options.get("scale")
        logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            seen = torch.arange(k.shape[-2], device=q.device) <= rows[:, None]
            logits = logits.masked_fill(~seen, -math.inf)
        if isinstance(mask, torch.Tensor):
            whole = mask.detach().expand(*mask.shape[:-2], query.shape[-2], k.shape[-2])
            whole = whole[(0,) * max(0, whole.dim() - 3)][..., rows, :]
            logits = logits.masked_fill(~whole, -math.inf) if whole.dtype == torch.bool else logits + whole.float()
        self._keep(logits.amax(), logits.softmax(-1))

    def _softmax(self, original: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(input, *args, **kwargs)
        awake = not torch.compiler.is_compiling() and self.awake
        if awake and isinstance(input, torch.Tensor) and input.dim() == 4 and self._reads():
            self._probe.guarded("attention", self._weighed, input, result)
        return result

    def _weighed(self, logits: torch.Tensor, weights: torch.Tensor) -> None:
        rows = self._queries(weights.shape[-2], weights.device)
        self._keep(logits.detach().amax().float(), weights.detach()[0].index_select(-2, rows).float())

    def _queries(self, count: int, device: torch.device) -> torch.Tensor:
        """Return the places of the queries that are read, evenly spaced."""
        found = self._rows.get((count, device))
        if found is None:
            found = torch.linspace(0, count - 1, min(QUERIES, count), device=device).long()
            if type(found) is torch.Tensor and len(self._rows) < PLANS:
                self._rows[count, device] = found
        return found

    def _keep(self, largest: torch.Tensor, weights: torch.Tensor) -> None:
        def compute() -> Sequence[Any]:
            rows = torch.stack([weights.clamp_min(1e-30).log_().mul_(weights).sum(-1).neg_(), weights.amax(-1)])
            found = [largest, *rows.flatten(1).nanmean(1).unbind()]
            return torch.stack(found).tolist() if largest.is_cpu else found

        self.attended(self._scope(), compute)

    def _scope(self) -> str:
        """Return the module whose code calls, by its frame: the nearest one that is known."""
        frame: Any = sys._getframe(4)
        for _ in range(CALLERS):
            if frame is None:
                break
            own = frame.f_locals.get("self")
            if isinstance(own, torch.nn.Module) and id(own) in self.scopes:
                return self.scopes[id(own)]
            frame = frame.f_back
        return ""


def _checkpointed() -> bool:
    """Tell whether a reentrant checkpoint runs now, which computes without gradients first: PyTorch's, DeepSpeed's, Megatron's."""
    frame: Any = sys._getframe(2)
    for _ in range(DEPTH):
        if frame is None:
            break
        if frame.f_code.co_name == "forward" and "run_function" in frame.f_code.co_varnames[: frame.f_code.co_argcount]:
            return True
        frame = frame.f_back
    return False


SENT = {
    "all_reduce": 0, "broadcast": 0, "reduce": 0, "send": 0, "isend": 0, "all_gather": 1, "all_gather_into_tensor": 1,
    "gather": 0, "scatter": 1, "reduce_scatter": 1, "reduce_scatter_tensor": 1, "all_to_all": 1, "all_to_all_single": 1,
}  # fmt: skip
"""Place of what goes in among the arguments."""
NAMES = ("input", "input_tensor", "input_list", "scatter_list", "input_tensor_list", "tensor")
"""Keywords of what goes in."""


def collectives(layers: TorchLayers) -> list[Sweep]:
    """Return what stands in for the collectives while a monitor runs."""
    if not torch.distributed.is_available():
        return []
    held = [(name, place, getattr(torch.distributed, name, None)) for name, place in SENT.items()]
    pairs = [(call, wraps(call)(partial(_sends, layers, name, place, call))) for name, place, call in held if call is not None]
    return [Sweep(pairs)]


def _sends(layers: TorchLayers, name: str, place: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() and layers.takes:
        layers.guarded("a collective", _take, layers, name, place, args, kwargs)
    return original(*args, **kwargs)


def _take(layers: TorchLayers, name: str, place: int, args: Any, kwargs: Any) -> None:
    given = args[place] if len(args) > place else next((kwargs[key] for key in NAMES if kwargs.get(key) is not None), None)
    tensors = [one for one in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(one, torch.Tensor)]
    floats = [one for one in tensors if one.is_floating_point()]
    if floats:
        layers.carried(name, floats)
        if layers.wants("modules") and f"collective {name}" not in layers.seen:
            layers.seen[f"collective {name}"] = {"class": name, "called by": callers(FRAMEWORKS)}
