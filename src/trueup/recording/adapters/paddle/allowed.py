"""Which functions a capture may name to have them executed: Paddle's own operators, and only those that compute tensors.

A capture is untrusted, so a name is never followed: it is looked up among the functions of ``paddle._C_ops`` and
``paddle._legacy_C_ops`` and the operators of `paddle.Tensor` in front of which a capture stands. What loads or saves, talks to
other processes, hands out memory, or runs a program or code that it is given is not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import paddle

from trueup.recording.adapters.paddle.entrances import METHODS, MODULES, OPERATORS

REFUSED = (
    "load", "save", "file", "read", "print", "assert", "program", "run_", "custom", "engine", "fetch", "feed", "send", "recv",
    "allreduce", "all_reduce", "allgather", "all_gather", "all_to_all", "reduce_scatter", "global_gather", "global_scatter",
    "comm", "barrier", "sync_", "share", "memcpy", "parameter", "persistable", "array", "shard", "dtensor", "nan_inf", "core_ops",
    "builtin", "tokenizer", "strings", "shadow", "check_numerics", "tdm_", "graph_", "pyramid_hash", "distributed", "dist_",
    "seed", "coalesce_tensor",
)  # fmt: skip
"""Parts of names that are not executed whatever they are: files, programs, other processes, state of the process, shared memory."""

REFUSED_NAMES = frozenset(
    {"broadcast", "broadcast_", "reduce", "reduce_", "data", "core", "legacy", "name", "depend", "nop", "nop_", "set", "set_",
     "c_broadcast", "c_concat", "c_split", "c_scatter", "c_identity", "c_identity_", "c_embedding", "py_func"}
)  # fmt: skip

ALLOWED_NAMES = frozenset({"reduce_as", "broadcast_tensors", "as_strided", "fused_linear_param_grad_add"})
"""Named like what is refused, and harmless."""


def is_refused(name: str) -> bool:
    """Tell whether a name, without its module, is of what is never executed."""
    return name not in ALLOWED_NAMES and (name in REFUSED_NAMES or any(part in name for part in REFUSED))


def function(name: str) -> Callable[..., Any] | None:
    """Return the function that a capture means by a name, or None where it is not to be executed.

    It is looked up each time: what stands in the place of an operator now is what this process executes.
    """
    found = _holders().get(name)
    return None if found is None else getattr(found, name.rpartition(".")[2], None)


@lru_cache(maxsize=1)
def _holders() -> dict[str, Any]:
    """Return what holds each function that may be named, by the names that captures give."""
    found: dict[str, Any] = {}
    for path, module in MODULES:
        for name in dir(module):
            if not name.startswith("_") and callable(getattr(module, name)) and not is_refused(name):
                found[f"{path}.{name}"] = module
    methods = [f"__{name}__" for name in OPERATORS] + list(METHODS)
    return found | {f"paddle.Tensor.{name}": paddle.Tensor for name in methods if hasattr(paddle.Tensor, name)}
