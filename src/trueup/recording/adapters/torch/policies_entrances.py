"""Entrances of PyTorch that a policy stands in: module calls, autograd functions, backward passes, checkpointing, torch.compile."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.policies import AppliedPolicy


def entrances(policy: AppliedPolicy) -> list[Replacement]:
    """Return the replacements through which a policy meets what is no overridable function."""
    from torch.utils import checkpoint

    return [
        Replacement(torch.nn.Module, "_call_impl", functools.partial(_modules, policy)),
        Replacement(torch.autograd.Function, "apply", functools.partial(_applies, policy)),
        Replacement(torch.autograd, "_engine_run_backward", functools.partial(_runs_backward, policy)),
        Replacement(checkpoint, "_checkpoint_without_reentrant_generator", functools.partial(_checkpoints, policy)),
        Replacement(checkpoint.CheckpointFunction, "forward", functools.partial(_checkpoints_reentrant, policy)),
        Replacement(torch, "compile", functools.partial(_compiles, policy)),
    ]


def _modules(policy: AppliedPolicy, original: Any) -> Any:
    @functools.wraps(original)
    def _call_impl(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return policy.module(original, module, args, kwargs)

    return _call_impl


def _applies(policy: AppliedPolicy, original: Any) -> Any:
    plain = original.__func__

    def apply(cls: type, /, *args: Any, **kwargs: Any) -> Any:
        if not policy.works():
            return plain(cls, *args, **kwargs)
        return policy.call_named(f"{cls.__module__}.{cls.__qualname__}.apply", functools.partial(plain, cls), args, kwargs)

    return classmethod(apply)


def _runs_backward(policy: AppliedPolicy, original: Any) -> Any:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        return policy.run_backward(original, *args, **kwargs) if policy.on else original(*args, **kwargs)

    return run_backward


def _checkpoints(policy: AppliedPolicy, original: Any) -> Any:
    def generator(fn: Any, *rest: Any, **kwargs: Any) -> Any:
        return original(policy.checkpointed(fn) if policy.on else fn, *rest, **kwargs)

    return generator


def _checkpoints_reentrant(policy: AppliedPolicy, original: Any) -> Any:
    plain = original.__func__

    def forward(ctx: Any, run_function: Any, *rest: Any) -> Any:
        return plain(ctx, policy.checkpointed(run_function) if policy.on else run_function, *rest)

    return staticmethod(forward)


def _compiles(policy: AppliedPolicy, original: Any) -> Any:
    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if policy.on:
            policy.run_eagerly()
        return original(*args, **kwargs)

    return compile


def meets_compiled(policy: AppliedPolicy, original: Any) -> Any:
    """Hear of compiled functions that are called (`trueup.recording.adapters.torch.compiling` says how they ask)."""

    def _callback_from_stance(callback: Any) -> Any:
        if policy.on and callback not in (None, False):
            policy.meets_compiled()
        return original(callback)

    return _callback_from_stance
