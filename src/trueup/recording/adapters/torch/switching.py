"""Optimisations of PyTorch that no setting switches off for the whole process, switched off (`engine.replacing`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trueup.recording.engine.replacing import Replacement, WhenLoaded

PLAIN = ("eager", "aot_eager", "aot_eager_decomp_partition")
"""Backends that generate no code."""


def optimizers(names: Sequence[str]) -> None:
    """Make all optimizers of torch.optim with these options (``foreach``, ``fused``) false, whatever the script asks for."""
    classes: list[Any] = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    kinds = [kind for kind in classes if issubclass(kind, torch.optim.Optimizer)]
    for kind in kinds:
        known = [name for name in names if name in inspect.signature(kind.__init__).parameters]
        if known:
            Replacement(kind, "__init__", functools.partial(_made_with, dict.fromkeys(known, False))).install()


def _made_with(forced: dict[str, bool], original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(self, *args, **kwargs)
        given.arguments.update(forced)
        original(*given.args, **given.kwargs)

    return __init__


def compile_stance(name: str) -> None:
    """Have compiled functions run under a stance once Dynamo is imported; ``force_eager`` runs the Python code they were made
    of."""
    WhenLoaded("torch._dynamo", lambda: torch.compiler.set_stance(name)).install()


def compile_backend(name: str) -> Callable[[], list[str]]:
    """Have torch.compile hand its graphs to a backend (``aot_eager`` executes operators); return what tells which ones were asked
    for."""
    asked: dict[str, None] = {}

    def make(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def get_compiler_fn(compiler: Any) -> Any:
            if compiler in PLAIN or compiler is None:
                return original(compiler)
            asked[_named(compiler)] = None
            return original(name)

        return get_compiler_fn

    def stand_in() -> None:
        from torch._dynamo import eval_frame

        Replacement(eval_frame, "get_compiler_fn", make).install()

    WhenLoaded("torch._dynamo.eval_frame", stand_in).install()
    return lambda: list(asked)


def _named(compiler: Any) -> str:
    """Name a backend, with the line of its code where it is no string."""
    inner = getattr(compiler, "compiler_fn", compiler)
    if isinstance(inner, str):
        return inner
    if type(compiler).__name__ == "_TorchCompileInductorWrapper":
        return "inductor"
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def left_to_aten(operators: Sequence[str]) -> None:
    """Have Inductor leave some operators to ATen once it is imported (`inductor_fallbacks`, which ``trueup bisect`` writes)."""

    def leave() -> None:
        from trueup.recording.adapters.torch.inductor_fallbacks import leave_to_aten

        leave_to_aten(operators)

    WhenLoaded("torch._inductor.lowering", leave).install()


def operators_compiled(_: object) -> Callable[[], list[str]]:
    """Return what tells of which operators Inductor generates code. None is decomposed meanwhile, so they are those that the user's
    functions call; views compute nothing and are left out."""
    found: dict[str, None] = {}

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
            schema = getattr(target, "_schema", None)
            if schema is not None and schema.name.startswith("aten::") and not any(one.alias_info for one in schema.returns):
                found[schema.name.removeprefix("aten::")] = None
            return original(self, target, args, kwargs)

        return call_function

    def stand_in() -> None:
        from torch._inductor import config, decomposition, graph

        config.force_disable_caches = True  # of cached code nothing is generated
        decomposition.decompositions.clear()
        decomposition.fast_random_decomps.cache_clear()
        Replacement(graph.GraphLowering, "call_function", make).install()

    WhenLoaded("torch._inductor.graph", stand_in).install()
    return lambda: list(found)
