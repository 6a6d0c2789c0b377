"""Names that a reproducer may use: of functions that the table of allowed ones holds, of files and tests."""

from __future__ import annotations

import re
from typing import Any

import torch

from trueup.recording.adapters.torch import allowed
from trueup.recording.adapters.torch.replay_memory import NotReplayable
from trueup.recording.execution.recorded import RecordedCall


def function_name(call: RecordedCall) -> str:
    """Return the name of the function of a call, as Python finds it.

    Raises:
        NotReplayable: it is not to be executed, or PyTorch has no such name.
    """
    op = call.key.op
    if call.key.level == "module" or call.key.phase == "collective":
        why = "a module is code, which no capture holds" if call.key.level == "module" else "a collective needs the other ranks"
        raise NotReplayable(f"{why}: name one of its api or aten calls")
    if call.key.level == "aten":
        overload = (call.invocation or {}).get("overload")
        name = overload if isinstance(overload, str) else None
        found = allowed.operator(op, name)
        if found is None:
            raise NotReplayable(f"{op} is not among the functions that a capture may have executed")
        namespace, _, bare = op.partition("::")
        return f"torch.ops.{namespace}.{bare}" + ("" if name is None else f".{name or 'default'}")
    found = allowed.function(op)
    if found is None:
        raise NotReplayable(f"{op} is not among the functions that a capture may have executed")
    for candidate in (op, f"{op}.__get__"):
        if _resolved(candidate) == found:
            return candidate
    raise NotReplayable(f"PyTorch has no public name for {op}: name an aten call of it")


def _resolved(name: str) -> Any:
    """Return what a name of the table of allowed functions means to Python, or None."""
    first, *rest = name.split(".")
    found: Any = torch if first == "torch" else None
    for part in rest:
        found = getattr(found, part, None) if part.isidentifier() else None
    return found


def plain_name(call: RecordedCall) -> str:
    """Return a short name for files and functions: ``native_layer_norm``, ``lstm_backward``."""
    name = re.sub(r"[^a-z0-9_]", "", call.key.op.rpartition("::")[2].rpartition(".")[2].lower())[:60].strip("_") or "call"
    return f"{name}_backward" if call.key.phase == "backward" and "backward" not in name else name
