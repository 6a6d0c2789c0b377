"""What a monitor takes of the layers of a model, in steps that have everything: outputs, attention's logits, routers.

A forward hook a module returns at once in all other steps. Attention is read where it passes Python: `scaled_dot_product_attention`
from its inputs, for some queries of the first sample, and `softmax` of four dimensions. What a fused kernel of another library
makes is not readable. A router is a Linear called ``router``, ``gate`` or ``wg`` with 2 to 1,024 outputs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from trueup.recording.engine.replacing import Around, Replacement

QUERIES = 64  # of the first sample, evenly spaced, whose logits are computed again
ROUTERS = ("router", "gate", "wg")
MOST_EXPERTS = 1024
BOUNDED = {"Sigmoid": (0.01, 0.99), "Tanh": (-0.99, 0.99), "Hardsigmoid": (0.01, 0.99), "Hardtanh": (-0.99, 0.99)}
"""Activations with two flat ends, and beyond what they count as saturated (after PyTorch's initial checks of `dead` units)."""
HALVES = (torch.float16, torch.bfloat16)
CALLERS = 12  # frames in which the module that calls attention is looked for


class Taking(Protocol):
    """What the probe is to its layers."""

    @property
    def sampled(self) -> bool:
        """Whether the present step has everything."""

    def add(self, numbers: Sequence[torch.Tensor], made: Callable[[Any], Any]) -> None:
        """Add numbers of the present step, and what makes blocks of them on the host."""

    def guarded(self, what: str, call: Callable[..., Any], *given: Any) -> None:
        """Call something of ours, which the training must not feel."""


class Layers:
    """The modules that a probe reads."""

    def __init__(self, probe: Taking) -> None:
        self._probe = probe
        self.scopes: dict[int, str] = {}
        self._modules: list[torch.nn.Module] = []  # held, so that no other object gets their identities
        self._hooks: list[Any] = []
        self._outputs: dict[str, tuple[list[torch.Tensor], float, bool]] = {}
        self._attention: dict[str, list[torch.Tensor]] = {}
        self._routers: dict[str, tuple[list[torch.Tensor], int]] = {}
        self._labels: dict[tuple[str, ...], tuple[str, ...]] = {}

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

    def remove(self) -> None:
        """Read no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # ---------------------------------------------------------------- outputs
    def _ran(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._probe.sampled or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1:  # a checkpoint is computed again in the backward
            self._probe.guarded("a module's output", self._take, self.scopes.get(id(module), ""), module, output)

    def _take(self, scope: str, module: torch.nn.Module, output: Any) -> None:
        found = output[0] if isinstance(output, (tuple, list)) and output else output
        found = found.to_local() if hasattr(found, "to_local") else found
        if not isinstance(found, torch.Tensor) or not found.is_floating_point() or not found.numel() or found.is_meta:
            return
        held = found.detach()
        # On a CPU the norm of infinity takes 20 times as long as both ends.
        numbers = [torch.linalg.vector_norm(held, dtype=torch.float32), *torch.aminmax(held), torch.count_nonzero(held)]
        ends = BOUNDED.get(type(module).__name__)
        limit = torch.finfo(held.dtype).max
        if ends is not None:
            numbers.append(((held < ends[0]) | (held > ends[1])).sum())
        elif held.dtype in HALVES:
            numbers.append((held.abs() >= limit).sum())
        self._outputs[scope] = numbers, float(held.numel()), len(numbers) > 4
        name = scope.rpartition(".")[2]
        experts = held.shape[-1]
        if name in ROUTERS and isinstance(module, torch.nn.Linear) and 2 <= experts <= MOST_EXPERTS:
            self._routers[scope] = self._routes(held.reshape(-1, experts)), experts

    def _routes(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Return the share of the expert that is chosen most, the entropy of the mean choice, and the largest logit."""
        share = logits.float().softmax(-1).mean(0)
        chosen = (logits.argmax(-1)[:, None] == torch.arange(logits.shape[-1], device=logits.device)).float().mean(0)
        return [chosen.amax(), -(share * share.clamp_min(1e-30).log()).sum(), logits.abs().amax()]

    # ---------------------------------------------------------------- attention
    def _attends(self, original: Any, query: Any, key: Any, *rest: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and self._reads():
            self._probe.guarded("attention", self._logits, query, key, *rest, *([] if not kwargs else [kwargs]))
        return original(query, key, *rest, **kwargs)

    def _reads(self) -> bool:
        return self._probe.sampled and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    def _logits(self, query: torch.Tensor, key: torch.Tensor, *rest: Any) -> None:
        options = dict(rest[-1]) if rest and isinstance(rest[-1], dict) else {}
        given = [one for one in rest if not isinstance(one, dict)]  # value, attn_mask, dropout_p, is_causal
        mask = options.get("attn_mask", given[1] if len(given) > 1 else None)
        causal = options.get("is_causal", given[3] if len(given) > 3 else False)
        q, k = query.detach(), key.detach()
        rows = torch.linspace(0, q.shape[-2] - 1, min(QUERIES, q.shape[-2]), device=q.device).long()
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
        if not torch.compiler.is_compiling() and isinstance(input, torch.Tensor) and input.dim() == 4 and self._reads():
            self._probe.guarded("attention", self._weighed, input, result)
        return result

    def _weighed(self, logits: torch.Tensor, weights: torch.Tensor) -> None:
        rows = torch.linspace(0, weights.shape[-2] - 1, min(QUERIES, weights.shape[-2]), device=weights.device).long()
        self._keep(logits.detach().amax().float(), weights.detach()[0][..., rows, :].float())

    def _keep(self, largest: torch.Tensor, weights: torch.Tensor) -> None:
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1).nanmean()
        self._attention[self._scope()] = [largest, entropy]

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
        return f"attention{len(self._attention)}"

    # ---------------------------------------------------------------- the end of a step
    def finish(self) -> None:
        """Hand over what was taken in the step; each closure below has labels of its own."""
        outputs, attention, routers = self._outputs, self._attention, self._routers
        self._outputs, self._attention, self._routers = {}, {}, {}
        order = {scope: place for place, scope in enumerate(self.scopes.values())}
        if outputs:
            scopes = sorted(outputs, key=order.__getitem__)
            names = [f"{kind}/{s}" for s in scopes for kind in _kinds(outputs[s][2])]
            sizes = [outputs[scope][1] for scope in scopes]
            labels = self._same(names)

            def made(got: np.ndarray[Any, Any]) -> Any:
                values, at = [], 0
                for size, scope in zip(sizes, scopes, strict=True):
                    norm, low, high, others, *flat = got[at : at + 4 + outputs[scope][2]]
                    most = max(abs(low), abs(high)) if low == low else low  # a NaN is both ends
                    values += [norm / math.sqrt(size), most, 1 - others / size, *(one / size for one in flat)]
                    at += 4 + outputs[scope][2]
                return [(labels, np.array(values))]

            self._probe.add([one for scope in scopes for one in outputs[scope][0]], made)
        if attention:
            read = self._same([f"{kind}/{s}" for s in attention for kind in ("attention_largest_logit", "attention_entropy")])
            self._probe.add([one for held in attention.values() for one in held], lambda got: [(read, got)])
        if routers:
            kinds = ("router_load", "router_entropy", "router_largest_logit")
            named = self._same([f"{kind}/{s}" for s in routers for kind in kinds])
            counts = np.array([factor for _, experts in routers.values() for factor in (experts, 1 / math.log(experts), 1)])
            self._probe.add([one for held, _ in routers.values() for one in held], lambda got: [(named, got * counts)])

    def _same(self, names: list[str]) -> tuple[str, ...]:
        key = tuple(names)
        if len(self._labels) > 256:
            self._labels.clear()
        return self._labels.setdefault(key, key)


def _kinds(saturates: bool) -> tuple[str, ...]:
    return ("activation_rms", "activation_max", "activation_zeros", *(["activation_saturated"] if saturates else []))
