"""Where a policy stands in Paddle: operators that a rule may be for, Layers, optimizers, backward passes, recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import paddle
from paddle.base import core
from paddle.optimizer import Optimizer

from trueup.recording.adapters.paddle.entrances import METHODS, OPERATORS, named_as, operators
from trueup.recording.adapters.paddle.optimizers import kinds
from trueup.recording.adapters.paddle.passes import LOSS
from trueup.recording.adapters.paddle.replacing import Sweep
from trueup.recording.adapters.paddle.replays import around
from trueup.recording.recorder.filters import Patterns
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.policies import AppliedPolicy

Function = Callable[..., Any]


class PolicyEntrances:
    """Everything through which a policy meets calls; operators that no rule names are left alone."""

    def __init__(self, policy: AppliedPolicy) -> None:
        self._policy = policy
        rules = [rule for rule in policy.policy.rules if rule.level == "api"]
        every = any(rule.op is None for rule in rules)
        self._patterns = None if every else Patterns([rule.op for rule in rules if rule.op is not None])
        self._wants = bool(rules)
        self._sweep = Sweep(())
        self._others: list[Replacement] = []
        self._static = True

    def install(self) -> None:
        """Stand in the way."""
        policy = self._policy
        self._sweep = Sweep(operators(self._stand_in))
        self._sweep.install()
        self._others = [
            *self._methods(),
            Replacement(paddle.nn.Layer, "__call__", functools.partial(_layers, policy)),
            *(Replacement(core.eager, name, functools.partial(_passes, policy)) for name in (LOSS, "run_partial_grad")),
            *(
                Replacement(kind, name, functools.partial(_steps, policy))
                for kind in kinds(Optimizer) for name in ("step", "minimize") if name in vars(kind)
            ),
            *around(lambda function: policy.recomputed(function) if policy.on else function),
        ]  # fmt: skip
        for replacement in self._others:
            replacement.install()
        self._static = _to_static(False)

    def remove(self) -> None:
        """Leave no trace."""
        for replacement in reversed(self._others):
            replacement.remove()
        self._sweep.remove()
        _to_static(self._static)

    def _named(self, name: str) -> bool:
        return self._wants and (self._patterns is None or self._patterns.match_name(name))

    def _stand_in(self, name: str, function: Function) -> Function | None:
        if not self._named(name):
            return None
        policy = self._policy

        def call(*args: Any, **kwargs: Any) -> Any:
            return policy.operator(name, function, args, kwargs)

        return named_as(call, function)

    def _methods(self) -> list[Replacement]:
        special = (f"__{name}__" for name in OPERATORS)
        names = [name for name in (*special, *METHODS) if hasattr(paddle.Tensor, name) and self._named(f"paddle.Tensor.{name}")]
        found = [Replacement(paddle.Tensor, name, functools.partial(_method, self._policy, name)) for name in names]
        if self._wants:
            found.append(Replacement(paddle.autograd.PyLayer, "apply", functools.partial(_applies, self._policy)))
        return found


def _method(policy: AppliedPolicy, name: str, original: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        return policy.operator(f"paddle.Tensor.{name}", original, args, kwargs)

    return named_as(call, original)


def _applies(policy: AppliedPolicy, _: Function) -> Any:
    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        original = super(paddle.autograd.PyLayer, kind).apply
        if kind.__module__.startswith("paddle.distributed.fleet.recompute"):
            return original(*args, **kwargs)
        return policy.operator(f"{kind.__name__}.apply", original, args, kwargs)

    return classmethod(apply)


def _layers(policy: AppliedPolicy, original: Function) -> Function:
    @functools.wraps(original)
    def call(layer: paddle.nn.Layer, *args: Any, **kwargs: Any) -> Any:
        return policy.layer(original, layer, args, kwargs)

    return call


def _passes(policy: AppliedPolicy, original: Function) -> Function:
    return functools.partial(policy.run_pass, original)


def _steps(policy: AppliedPolicy, original: Function) -> Function:
    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        return policy.run_step(original, *args, **kwargs)

    return step


def _to_static(on: bool) -> bool:
    """Let to_static compile or not; return whether it did. No rule reaches into a program."""
    from paddle.jit.dy2static.program_translator import ProgramTranslator

    translator = ProgramTranslator()
    before = bool(translator.enable_to_static)
    translator.enable(on)
    return before
