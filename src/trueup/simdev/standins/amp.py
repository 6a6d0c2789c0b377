"""``apex.amp``, on PyTorch's own: O0, O1 (autocast), O2 (float16 but for batch norm, float32 masters), O3; loss scale.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()                                        # left out where a gradient is not finite

The scale follows apex: 2^16 at first, halved at an overflow, doubled after 2,000 steps without one, at most 2^24. With
``combine_ddp``, of Ascend's apex, ranks begin with rank 0's weights and step with the mean of their gradients, without
DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

WINDOW, MOST = 2000, 2.0**24


class _Scaler:
    def __init__(self, scale: Any, least: float, most: float) -> None:
        self.dynamic = scale == "dynamic"
        self.loss_scale = min(2.0**16, most) if self.dynamic else float(scale)
        self.unskipped, self.least, self.most = 0, least, most

    def update(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        self.unskipped = 0 if overflow else self.unskipped + 1
        if overflow:
            self.loss_scale = max(self.loss_scale / 2, self.least)
        elif self.unskipped == WINDOW:
            self.loss_scale, self.unskipped = min(self.loss_scale * 2, self.most), 0


_scalers: list[_Scaler] = []
_skip: set[int] = set()
"""Optimizers whose next step is left out, by id."""


def initialize(
    models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1", keep_batchnorm_fp32: Any = None,
    master_weights: bool | None = None, loss_scale: Any = None, num_losses: int = 1, min_loss_scale: float | None = None,
    max_loss_scale: float = MOST, combine_ddp: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Return models and optimizers for mixed precision, in the form they were given; raises RuntimeError for an unknown level, or a
    model that DistributedDataParallel wraps already."""
    if opt_level not in ("O0", "O1", "O2", "O3"):
        raise RuntimeError(f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'.")
    one_by_one = models if isinstance(models, (list, tuple)) else [models]
    for model in one_by_one:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise RuntimeError(
                "Incoming model is an instance of torch.nn.parallel.DistributedDataParallel. "
                "Parallel wrappers should only be applied to the model(s) AFTER the model(s) have been returned from "
                "amp.initialize."
            )
    plain = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers] if optimizers is not None else []
    scale = loss_scale if loss_scale is not None else "dynamic" if opt_level in ("O1", "O2") else 1.0
    _scalers[:] = [_Scaler(scale if enabled else 1.0, min_loss_scale or 1.0, max_loss_scale) for _ in range(num_losses)]
    if enabled:
        for model in one_by_one:
            if combine_ddp:
                _alike(model)
            if opt_level == "O1":
                _autocast(model)
            elif opt_level != "O0":
                _halve(model, opt_level == "O2" and keep_batchnorm_fp32 in (None, True, "True"))
        masters = opt_level == "O2" if master_weights is None else master_weights
        for optimizer in plain:
            _prepare(optimizer, masters)
            optimizer._trueup_combined = combine_ddp
    return models if optimizers is None else (models, optimizers)


def _alike(model: Any) -> None:
    """Give a model rank 0's weights and buffers, as DistributedDataParallel does."""
    if torch.distributed.is_initialized():
        for one in (*model.parameters(), *model.buffers()):
            torch.distributed.broadcast(one.data, 0)


def _mean(grads: list[torch.Tensor]) -> None:
    """Give gradients the mean of all ranks."""
    if torch.distributed.is_initialized():
        for one in grads:
            torch.distributed.all_reduce(one)
            one /= torch.distributed.get_world_size()


def _autocast(model: Any) -> None:
    forward = model.forward

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.amp.autocast("npu", torch.float16):
            return _to(forward(*args, **kwargs), torch.float32)

    model.forward = cast


def _halve(model: Any, keep_norms: bool) -> None:
    for module in model.modules():
        if not (keep_norms and isinstance(module, _BatchNorm) and module.affine):
            for name, one in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if one.is_floating_point():
                    getattr(module, name).data = one.data.half()
        elif keep_norms:
            module.register_forward_pre_hook(lambda _, args: _to(args, torch.float32))
            module.register_forward_hook(lambda _, __, made: _to(made, torch.float16))
    forward = model.forward

    def cast(*args: Any, **kwargs: Any) -> Any:
        return _to(forward(*_to(args, torch.float16), **_to(kwargs, torch.float16)), torch.float32)

    model.forward = cast


def _to(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, values)


def _prepare(optimizer: Any, masters: bool) -> None:
    """Let a step be left out; with ``masters``, let the optimizer update float32 copies of float16 weights."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    if masters:
        for group in optimizer.param_groups:
            for at, weight in enumerate(group["params"]):
                if weight.dtype is torch.float16:
                    master = torch.nn.Parameter(weight.detach().float())
                    pairs.append((weight, master))
                    group["params"][at] = master
                    if weight in optimizer.state:
                        optimizer.state[master] = optimizer.state.pop(weight)
    step, zero = optimizer.step, optimizer.zero_grad
    optimizer._trueup_masters = pairs

    def stepped(*args: Any, **kwargs: Any) -> Any:
        if id(optimizer) in _skip:
            _skip.discard(id(optimizer))
            return None
        made = step(*args, **kwargs)
        with torch.no_grad():
            for weight, master in pairs:
                weight.copy_(master)
        return made

    def zeroed(*args: Any, **kwargs: Any) -> None:
        zero(*args, **kwargs)
        for weight, _ in pairs:
            weight.grad = None

    optimizer.step, optimizer.zero_grad = stepped, zeroed


@contextmanager
def scale_loss(
    loss: torch.Tensor, optimizers: Any, loss_id: int = 0, model: Any = None, delay_unscale: bool = False, **_: Any  # noqa: ARG001
) -> Iterator[torch.Tensor]:
    """Give the scaled loss; after the block, divide the gradients by the scale and look for those that are not finite. Raises
    RuntimeError without `initialize`."""
    if not _scalers:
        raise RuntimeError("Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.")
    scaler = _scalers[loss_id]
    yield loss.float() * scaler.loss_scale
    if delay_unscale:
        return
    overflow = False
    several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in several:
        for weight, master in getattr(optimizer, "_trueup_masters", ()):
            if weight.grad is not None:
                master.grad, weight.grad = weight.grad.float(), None
        grads = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if getattr(optimizer, "_trueup_combined", False):
            _mean(grads)
        if grads and (scaler.dynamic or scaler.loss_scale != 1.0):
            found, inverse = (torch.full((), value, device=grads[0].device) for value in (0.0, 1 / scaler.loss_scale))
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
            overflow |= scaler.dynamic and bool(found.item())
    scaler.update(overflow)
    if overflow:
        _skip.update(id(optimizer) for optimizer in several)
        print(f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale}")


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Give the weights that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: Any = None) -> dict[str, Any]:  # noqa: ARG001
    """Return the scales, as apex writes them into a checkpoint."""
    return {f"loss_scaler{at}": {"loss_scale": one.loss_scale, "unskipped": one.unskipped} for at, one in enumerate(_scalers)}


def load_state_dict(state: dict[str, Any]) -> None:
    """Take scales from a checkpoint; raises RuntimeError where it holds another number of them."""
    if len(state) != len(_scalers):
        raise RuntimeError(f"Loading state_dict containing {len(state)} loss_scalers while initialize made {len(_scalers)}")
    for at, one in enumerate(_scalers):
        held = state[f"loss_scaler{at}"]
        one.loss_scale, one.unskipped = float(held["loss_scale"]), int(held["unskipped"])
