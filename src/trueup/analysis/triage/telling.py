"""Words for figures, names and settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trueup.analysis.triage.table import Switch


def percent(share: float) -> str:
    """Write a relative distance: ``3.1 %``, ``2.4e-07``."""
    if not math.isfinite(share):
        return "infinitely far"
    return f"{100 * share:.3g} %" if share >= 1e-4 or share == 0 else f"{share:.2g}"


def figure(loss: float, other: float) -> str:
    """Write a loss with as many digits as tell it from another one."""
    for digits in range(6, 17):
        if f"{loss:.{digits}g}" != f"{other:.{digits}g}":
            return f"{loss:#.{digits}g}"
    return f"{loss!r}"


def named(names: Sequence[str]) -> str:
    """Write names as a sentence does: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def by_hand(switch: Switch) -> Iterator[str]:
    """Yield what switches it off in a training of one's own: lines for a shell or a script."""
    yield from (f"export {name}={value}" for name, value in switch.environment.items())
    for target, *arguments in switch.order.get("call", ()):
        yield f"{target}({', '.join(map(repr, arguments))})"
    yield from (f"{target} = {value!r}" for target, value in switch.order.get("set", {}).items())
    for action, argument in switch.order.get("adapter", {}).items():
        yield from _adapted(action, argument)
    if switch.rules:
        yield f"fusion_switch_file with {', '.join(switch.rules)} off (see the runs' *.fusion_switch.json)"


def _adapted(action: str, argument: Any) -> Iterator[str]:
    if action == "compile_stance":
        yield f'torch.compiler.set_stance("{argument}")'
    elif action == "compile_backend":
        yield f'torch.compile(..., backend="{argument}")'
    elif action == "optimizers":
        yield f"torch.optim.Adam(..., {', '.join(f'{name}=False' for name in argument)})  # of whichever optimizer it is"
    elif action == "xla_functions":
        yield "tf.function(..., jit_compile=False), model.compile(..., jit_compile=False)"
    elif action in ("rewriter", "optimizer_options"):
        if action == "rewriter":
            yield f"tf.config.optimizer.set_experimental_options({ {name: value is True for name, value in argument.items()} })"
        numbers = NUMBERS[action]
        place = "rewrite_options" if action == "rewriter" else "optimizer_options"
        for name, value in argument.items():
            yield f"config.graph_options.{place}.{name} = {numbers.get(value, value)}  # TensorFlow 1"


NUMBERS = {"rewriter": {"ON": 1, "OFF": 2, "NO_MEM_OPT": 1}, "optimizer_options": {"OFF": -1, "L0": -1}}
"""Values of RewriterConfig.Toggle and MemOptType, of OptimizerOptions.GlobalJitLevel and Level (TensorFlow 2.21)."""
