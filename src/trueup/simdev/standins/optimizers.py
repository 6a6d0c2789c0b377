"""``NpuFused...`` of torch_npu and apex, and apex's ``Fused...``: PyTorch's optimizers where it has the formula, else the paper's.

All compute tensor by tensor with PyTorch's operators. Without a stand-in are apex's own FusedLAMB and FusedNovoGrad.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def _of(kind: Any, name: str) -> Any:
    return type(name, (kind,), {"__doc__": f"torch.optim.{kind.__name__} under the vendor's name.", "__module__": __name__})


NpuFusedSGD, NpuFusedAdam, NpuFusedAdamW, NpuFusedAdadelta, NpuFusedRMSprop = (
    _of(getattr(torch.optim, name), f"NpuFused{name}") for name in ("SGD", "Adam", "AdamW", "Adadelta", "RMSprop")
)
FusedSGD, FusedAdagrad = _of(torch.optim.SGD, "FusedSGD"), _of(torch.optim.Adagrad, "FusedAdagrad")


def FusedAdam(params: Any, *args: Any, adam_w_mode: bool = True, set_grad_none: bool = True, **options: Any) -> Any:  # noqa: ARG001
    """Return AdamW, or Adam without ``adam_w_mode``: apex's class is either."""
    options.pop("bias_correction", None)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    names = ("lr", "bias_correction", "betas", "eps")
    given = {name: value for name, value in zip(names, args, strict=False) if name != "bias_correction"}
    return kind(params, **{"weight_decay": 0.0, **given, **options})


class _Formula(torch.optim.Optimizer):
    """An optimizer whose `update` says what becomes of one tensor, given its gradient and what is kept of it."""

    kept: tuple[str, ...] = ()

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change a tensor in place; ``state["step"]`` counts from 1."""
        raise NotImplementedError

    def gradients(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tensors of a group that have a gradient, with the gradient that is used."""
        yield from ((p, p.grad) for p in group["params"] if p.grad is not None)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; returns what the closure returns."""
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p, grad in self.gradients(group):
                    state = self.state[p]
                    if not state:
                        state.update({"step": 0, **{name: torch.zeros_like(p) for name in self.kept}})
                    state["step"] += 1
                    self.update(p, grad, state, group)
        return loss


def _moments(grad: Tensor, state: dict[str, Any], beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """Return the running means of a gradient and of its square, with this gradient."""
    return (
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1),
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2),
    )


class NpuFusedLamb(_Formula):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2) as Ascend computes it: no bias correction, a weight's norm counts up to 10,
    and with ``use_global_grad_norm`` gradients of a norm over 1 are divided by it."""

    kept = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0,
        adam: bool = False, use_global_grad_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam, self.use_global_grad_norm = adam, use_global_grad_norm

    def gradients(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tensors and gradients, these divided by the norm of all."""
        every = [p.grad for one in self.param_groups for p in one["params"] if p.grad is not None]
        norm = math.sqrt(sum(grad.square().sum().item() for grad in every)) if self.use_global_grad_norm else 1.0
        for p, grad in super().gradients(group):
            yield p, grad / norm if norm > 1 else grad

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """``p -= lr * ratio * r`` with ``r = m / (sqrt(v) + eps) + decay * p`` and ``ratio = min(|p|, 10) / |r|``."""
        mean, square = _moments(grad, state, *group["betas"])
        change = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * p
        weight, size = p.norm().clamp(max=10).item(), change.norm().item()
        ratio = 1.0 if self.adam or weight == 0 or size == 0 else weight / size
        p.sub_(change, alpha=group["lr"] * ratio)


class NpuFusedAdamP(_Formula):
    """AdamP (Heo et al., arXiv 2006.08217, algorithm 2): Adam, without the part of a step that only makes a weight longer where its
    gradient is at a right angle to it, by channel or by layer; the decay of such a weight is ``wd_ratio`` times as large."""

    kept = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0,
        delta: float = 0.1, wd_ratio: float = 0.1, nesterov: bool = False,
    ) -> None:  # fmt: skip
        names = {"delta": delta, "wd_ratio": wd_ratio, "nesterov": nesterov}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **names})

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Decay, then ``p -= lr * projected``."""
        (beta1, beta2), step, eps = group["betas"], state["step"], group["eps"]
        mean, square = _moments(grad, state, beta1, beta2)
        ahead = beta1 * mean + (1 - beta1) * grad if group["nesterov"] else mean
        change = ahead / (square.sqrt() / math.sqrt(1 - beta2**step) + eps)
        ratio = 1.0
        for rows in (p.size(0), 1) if p.dim() > 1 else ():
            weight, slope, moved = (one.reshape(rows, -1) for one in (p, grad, change))
            length = weight.norm(dim=1, keepdim=True) + eps
            cosine = (weight * slope).sum(1, keepdim=True).abs() / length / (slope.norm(dim=1, keepdim=True) + eps)
            if cosine.max().item() < group["delta"] / math.sqrt(weight.size(1)):
                along = weight / length
                change, ratio = (moved - along * (along * moved).sum(1, keepdim=True)).view_as(p), group["wd_ratio"]
                break
        if group["weight_decay"] > 0:
            p.mul_(1 - group["lr"] * group["weight_decay"] * ratio)
        p.sub_(change, alpha=group["lr"] / (1 - beta1**step))


WARMUP: dict[str, Callable[[float, float], float]] = {
    "warmup_cosine": lambda x, warmup: x / warmup if x < warmup else 0.5 * (1 + math.cos(math.pi * x)),
    "warmup_constant": lambda x, warmup: x / warmup if x < warmup else 1.0,
    "warmup_linear": lambda x, warmup: x / warmup if x < warmup else max((x - 1) / (warmup - 1), 0.0),
    "warmup_poly": lambda x, warmup: x / warmup if x < warmup else (1 - x) ** 0.5,
}
"""By which factor a learning rate changes, at the share ``x`` of all steps: BERT's schedules."""


class NpuFusedBertAdam(_Formula):
    """Adam as BERT was trained with it (Devlin et al., arXiv 1810.04805, appendix A.2): no bias correction, decay beside the
    moments, gradients of a group clipped together to ``max_grad_norm``, and the schedule inside."""

    kept = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: Any, lr: float, warmup: float = -1, t_total: int = -1, schedule: str = "warmup_linear", b1: float = 0.9,
        b2: float = 0.999, e: float = 1e-6, weight_decay: float = 0.01, max_grad_norm: float = 1.0,
    ) -> None:  # fmt: skip
        if schedule not in WARMUP:
            raise ValueError(f"Invalid schedule parameter: {schedule}; expected one of {', '.join(WARMUP)}")
        names = {"t_total": t_total, "schedule": schedule, "warmup": warmup, "max_grad_norm": max_grad_norm}
        super().__init__(params, {"lr": lr, "b1": b1, "b2": b2, "e": e, "weight_decay": weight_decay, **names})

    def gradients(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tensors and gradients, these clipped."""
        found = list(super().gradients(group))
        norm = math.sqrt(sum(grad.float().square().sum().item() for _, grad in found))
        factor = group["max_grad_norm"] / (norm + 1e-6)
        for p, grad in found:
            yield p, grad * factor if 0 < factor < 1 else grad

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """``p -= lr * schedule * (m / (sqrt(v) + e) + decay * p)``."""
        mean, square = _moments(grad, state, group["b1"], group["b2"])
        change = mean / (square.sqrt() + group["e"]) + group["weight_decay"] * p
        whole, factor = group["t_total"], 1.0
        if whole != -1:
            factor = WARMUP[group["schedule"]]((state["step"] - 1) / whole, group["warmup"])
        p.sub_(change, alpha=group["lr"] * factor)


class NpuFusedRMSpropTF(_Formula):
    """RMSprop as TensorFlow has it: ``eps`` under the root, and the learning rate inside of the momentum."""

    kept = ("square_avg", "grad_avg", "momentum_buffer")

    def __init__(
        self, params: Any, lr: float = 1e-2, alpha: float = 0.9, eps: float = 1e-10, weight_decay: float = 0, momentum: float = 0.0,
        centered: bool = False, decoupled_decay: bool = False, lr_in_momentum: bool = True,
    ) -> None:  # fmt: skip
        names = {"centered": centered, "decoupled_decay": decoupled_decay, "lr_in_momentum": lr_in_momentum, "momentum": momentum}
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, **names})

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """``v += (1 - alpha) (g^2 - v)``; ``p -= momentum * buffer + lr * g / sqrt(v + eps)``."""
        if group["decoupled_decay"]:
            p.mul_(1 - group["weight_decay"])
        else:
            grad = grad + group["weight_decay"] * p
        square = state["square_avg"].lerp_(grad.square(), 1 - group["alpha"])
        if group["centered"]:
            square = square - state["grad_avg"].lerp_(grad, 1 - group["alpha"]).square()
        change, lr = grad / (square + group["eps"]).sqrt(), group["lr"]
        if group["momentum"] > 0:
            inside = lr if group["lr_in_momentum"] else 1.0
            change, lr = state["momentum_buffer"].mul_(group["momentum"]).add_(change, alpha=inside), lr / inside
        p.sub_(change, alpha=lr)


class _Missing:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__}: PyTorch has no such optimizer, so neither has the simulated device")


NpuFusedLAMB = NpuFusedLamb
FusedLAMB, FusedNovoGrad = (type(name, (_Missing,), {}) for name in ("FusedLAMB", "FusedNovoGrad"))
