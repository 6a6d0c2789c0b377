"""Policies at work: rules of a `policy.toml` applied to the functions and modules of a process (`trueup.apply_policy`).

A function mode below all others executes functions, so that a capture records what the user's code gave them and got; modules
are met inside ``nn.Module.__call__``. What activation checkpointing runs again is met too, in the scope of its first run.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import say
from trueup.recording.adapters.torch import ruled
from trueup.recording.adapters.torch.context import WRAPPER_CLASSES, Scopes
from trueup.recording.adapters.torch.functions import Names, line_of
from trueup.recording.adapters.torch.modes import put_on, take_off, without
from trueup.recording.adapters.torch.replacing import applying, reentrant
from trueup.recording.engine import policies
from trueup.recording.engine.replacing import Around, Replacement
from trueup.recording.engine.ruled import Framework
from trueup.recording.engine.session import running_of
from trueup.recording.policy_file import Policy

EAGER = "torch.compile was used: its Python code runs while a policy is applied, for no rule reaches into compiled code"


class _Mode(TorchFunctionMode):
    """Hands functions to what a policy does with them. ``lowest``: it stays below every other mode (`modes.put_on`)."""

    def __init__(self, apply: Callable[[Callable[..., Any], Any, Any], Any], *, lowest: bool) -> None:
        super().__init__()
        self._apply, self.lowest = apply, lowest

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._apply(func, args, kwargs or {})


class AppliedPolicy(policies.AppliedPolicy):
    """A policy at work in this process; see `engine.policies`."""

    name, wrappers = "torch", WRAPPER_CLASSES
    framework: Framework = ruled

    def __init__(self, policy: Policy, scopes: Scopes) -> None:
        super().__init__(policy, scopes, ruled.Backward())
        self._mode = _Mode(self.function, lowest=True)  # executes functions under the rules
        self._values = _Mode(self.with_values, lowest=False)  # gives them what rules set, above a capture, which records it
        self._under_way: dict[int, AbstractContextManager[None]] = {}
        self._steps_of: Counter[int] = Counter()
        self._names = Names()
        self._scalers: dict[int, Any] = {}  # kept, so that no later one has the id of one that is gone
        self._eager: Any = None
        self.eager = False  # whether compiled code was met, whose Python code ran instead
        self._hooks: list[Any] = []
        self._replacements = entrances(self)

    # ---------------------------------------------------------------- life
    def install(self) -> None:
        with _captures_aside():
            for replacement in self._replacements:
                replacement.install()
        put_on(self._mode)
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._steps(optimizer, begins=True)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._steps(optimizer, begins=False)),
        ]
        _global_optimizer_pre_hooks.move_to_end(self._hooks[0].id, last=False)  # a capture reads what is set here
        if self.given.are_for("api"):
            self._values.__enter__()
        if "torch._dynamo" in sys.modules:
            self.run_eagerly()

    def leave(self) -> None:
        if threading.get_ident() == self._thread:
            take_off(self._values)
            take_off(self._mode)
        with _captures_aside():
            for replacement in self._replacements:
                replacement.remove()
        for hook in self._hooks:
            hook.remove()
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None

    def run_eagerly(self) -> None:
        """Run the Python code of what torch.compile compiled: no rule reaches into compiled code."""
        if self._eager is not None:
            return
        from torch._dynamo import eval_frame

        self._eager = torch.compiler.set_stance("force_eager")
        self._replacements.append(Around(eval_frame, "_callback_from_stance", self._meets_compiled))
        self._replacements[-1].install()

    def _meets_compiled(self, original: Any, callback: Any) -> Any:
        """Say, once, that compiled code does not run (`adapters.torch.compiling` says how compiled functions ask)."""
        if self.on and callback not in (None, False) and not self.eager:
            self.eager = True
            say(f"note: {EAGER}")
        return original(callback)

    # ---------------------------------------------------------------- what PyTorch calls
    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._names.of(func)
        if name is None or not self.works():
            return self.plainly(func, args, kwargs)
        return self.call_named(name, func, args, kwargs)

    def plainly(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return line_of(func, kwargs)(func, *args, **kwargs)

    def with_values(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function with the arguments that rules set of it."""
        name = self._names.of(func)
        if name is not None and self.works():
            args, kwargs = self.given.to_function(name, self.scope, func, args, kwargs)
        return self.plainly(func, args, kwargs)

    def apply(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a user-defined function of autograd's, under the first rule that is for it."""
        return self.call_named(name, function, args, kwargs) if self.works() else function(*args, **kwargs)

    def alone(self) -> AbstractContextManager[None]:
        return without(self._mode)

    def called(self, module: torch.nn.Module) -> torch.nn.Module:
        return module._orig_mod if type(module).__name__ == "OptimizedModule" else module

    def run_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass with the function mode on; say which call has no deterministic backward."""
        try:
            with self.function_mode_on():
                return original(*args, **kwargs)
        except RuntimeError as error:
            call = self._backward.under_way
            if not call or "deterministic" not in str(error):
                raise
            raise TrueupError(
                f"The policy cannot be kept.\n  where:    backward of {call}\n  expected: a deterministic algorithm\n"
                f"  got:      {error}\n"
                "  next:     leave out deterministic for this call, or run it with device = \"cpu\""
            ) from error
        finally:
            self._backward.leave()

    @contextmanager
    def function_mode_on(self) -> Iterator[None]:
        """Switch the function mode on in a block: PyTorch switches it off while it handles ``Tensor.backward``."""
        on = self._mode in _get_current_function_mode_stack()
        if not on:
            put_on(self._mode)
        try:
            yield
        finally:
            if not on:
                take_off(self._mode)

    # ---------------------------------------------------------------- inside
    def works(self) -> bool:
        """Tell whether what executes is computed for the user: no trace, nothing of Trueup's own, no backward of autograd's."""
        if not self.on or torch._C._get_tracing_state() is not None or torch.compiler._is_compiling_flag or policies.busy("torch"):
            return False
        return bool(torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled())

    def _steps(self, optimizer: torch.optim.Optimizer, *, begins: bool) -> None:
        self._threads.state.stepping = int(begins)
        if not self.given.are_for("optimizer"):
            return
        if (block := self._under_way.pop(id(optimizer), None)) is not None:
            block.__exit__(None, None, None)
        if begins:
            session = running_of("torch").session
            step = self._steps_of[id(optimizer)] if session is None else session.recorder.step
            self._steps_of[id(optimizer)] += 1
            block = self.given.to_optimizer(optimizer.param_groups, type(optimizer).__name__, step)
            block.__enter__()
            self._under_way[id(optimizer)] = block


    def scales(self, scaler: Any) -> None:
        """Set the values of a scaler that is about to scale for the first time."""
        if not self.on or id(scaler) in self._scalers or not self.given.are_for("amp"):
            return
        self._scalers[id(scaler)] = scaler
        held = {name: getattr(scaler, f"_{name}", NotImplemented) for name in SCALER}
        for name, value in self.given.to_amp(held, "GradScaler").items():
            setattr(scaler, f"_{name}", value)
            if name == "init_scale" and scaler._scale is not None:  # a checkpoint has set it
                scaler._scale.fill_(value)

    def enters(self, autocast: Any) -> None:
        """Set the dtype of a block of autocast that is on."""
        if self.on and autocast._enabled and self.given.are_for("amp"):
            dtype = str(autocast.fast_dtype).removeprefix("torch.")
            for value in self.given.to_amp({"dtype": dtype}, "autocast").values():
                if value not in ("bfloat16", "float16"):
                    raise TrueupError(
                        "The policy cannot be kept.\n  where:    autocast, set.dtype\n  expected: bfloat16 or float16\n"
                        f"  got:      {value}\n  next:     correct it; docs/policy.md"
                    )
                autocast.fast_dtype = getattr(torch, value)


SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")


def apply_policy(model: torch.nn.Module | Iterable[torch.nn.Module] | None, policy: str | Policy) -> AppliedPolicy:
    """Apply a policy in this process; see `trueup.apply_policy`."""
    session = running_of("torch").session
    if session is not None and session.options.compile == "through":
        where = policy.path if isinstance(policy, Policy) else policy
        raise TrueupError(
            f"{where} cannot be applied in a capture with compile=through: no rule reaches into compiled code; use compile=off"
        )
    return policies.apply(AppliedPolicy, policy, Scopes, "torch", model, torch.nn.Module)


def _captures_aside() -> AbstractContextManager[Any]:
    """Remove a capture's replacements in a block, so that they wrap what the block replaces."""
    session = running_of("torch").session
    return nullcontext() if session is None else session.compiling.out_of_sight()


# ---------------------------------------------------------------- entrances
def entrances(policy: AppliedPolicy) -> list[Replacement]:
    """Return the replacements through which a policy meets what is no overridable function."""

    def modules(original: Any, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return policy.module(original, module, args, kwargs)

    def run_backward(original: Any, *args: Any, **kwargs: Any) -> Any:
        return policy.run_backward(original, *args, **kwargs) if policy.on else original(*args, **kwargs)

    def followed(function: Any) -> Any:
        return policy.recomputed(function) if policy.on else function

    def checkpointed(original: Any, function: Any, *rest: Any, **kwargs: Any) -> Any:
        return original(followed(function), *rest, **kwargs)

    def compiles(original: Any, *args: Any, **kwargs: Any) -> Any:
        if policy.on:
            policy.run_eagerly()
        return original(*args, **kwargs)

    def scales(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        policy.scales(scaler)
        return original(scaler, *args, **kwargs)

    def enters(original: Any, autocast: Any) -> Any:
        policy.enters(autocast)
        return original(autocast)

    return [
        Around(torch.amp.GradScaler, "scale", scales),
        Around(torch.amp.autocast_mode.autocast, "__enter__", enters),
        Around(torch.nn.Module, "_call_impl", modules),
        *applying(policy.apply),
        Around(torch.autograd, "_engine_run_backward", run_backward),
        Around(checkpoint, "_checkpoint_without_reentrant_generator", checkpointed),
        reentrant(followed),
        Around(torch, "compile", compiles),
    ]
