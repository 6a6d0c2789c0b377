"""``module_dump``: one module under a name of the script's choice, and no function until ``module_dump_end``."""

from __future__ import annotations

from typing import Any

import torch

from trueup_compat.ptdbg_ascend.debugger import PrecisionDebugger
from trueup_compat.ptdbg_ascend.dumping import Dumping
from trueup_compat.ptdbg_ascend.errors import CompareException
from trueup_compat.ptdbg_ascend.switches import SCRIPT


def module_dump(module: Any, dump_name: str) -> None:
    """Dump what a module gets and gives, forward and backward, as ``{dump_name}.{n}.forward.input.0``; n counts its calls.

    Args:
        module: a `torch.nn.Module`.
        dump_name: what the files call it.

    Raises:
        CompareException: nothing is dumped at present, the version has no such thing, or an argument is of another type.
    """
    if not isinstance(module, torch.nn.Module):
        raise CompareException.of_parameter(f"module_dump: expected a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(dump_name, str) or not dump_name:
        raise CompareException.of_parameter(f"module_dump: expected a name, got {dump_name!r}")
    _dumping().dump_module(module, dump_name)


def module_dump_end() -> None:
    """Go on with functions; the module's backward is dumped whenever it comes.

    Raises:
        CompareException: nothing is dumped at present.
    """
    _dumping().dump_functions()


def _dumping() -> Dumping:
    found = PrecisionDebugger.dumping() or SCRIPT.dumping
    if found is None:
        raise CompareException.of_parameter(
            "module_dump comes after PrecisionDebugger.start(), or after register_hook(model, acc_cmp_dump)"
        )
    return found
