"""What an action asks of the device, as keys of the ``NpuOptimizer`` that its plug-in for TensorFlow reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from trueup.doors.report.saving import replaced
from trueup.foundation.model import TrueupError
from trueup_compat.precision_tool import config

ACTIONS = ("overflow", "dump", "fusion_off", "fusion_switch", "prof")
OPTIMIZER = "NpuOptimizer"
FUSION_OFF = {"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}
FUSION_SWITCH: dict[str, Any] = {"Switch": {"GraphFusion": {}, "UBFusion": {}}}
"""A template: names of rules, ``"off"``."""
PROFILING = {
    "output": "", "storage_limit": "1000MB", "training_trace": "on", "l2": "on", "hccl": "on", "task_trace": "on", "aicpu": "on",
    "fp_point": "", "bp_point": "", "aic_metrics": "PipeUtilization", "msproftx": "on",
}  # fmt: skip
ASKED_BY_ENVIRONMENT = {"PRECISION_TOOL_OVERFLOW": "overflow", "PRECISION_TOOL_DUMP": "dump"}

Value = bool | int | str


def actions_of(action: str | None) -> tuple[str, ...]:
    """Return the actions that a script, or its environment, asks for: ``fusion_off|overflow`` is two.

    Raises:
        TrueupError: there is no such action.
    """
    asked = [word for name, word in ASKED_BY_ENVIRONMENT.items() if os.environ.get(name, "").lower() in ("1", "true", "on")]
    found = [word.strip() for word in (action or "").split("|") if word.strip()] or asked
    unknown = [word for word in found if word not in ACTIONS]
    if unknown:
        raise TrueupError(f"action {action!r} is unknown: expected {', '.join(ACTIONS)}, or several joined by |")
    return tuple(found)


def keys_of(actions: tuple[str, ...]) -> dict[str, Value]:
    """Return the keys of a session's optimizer: overflow wins over dump, fusion_off over fusion_switch; files are written."""
    found: dict[str, Value] = {}
    if "overflow" in actions:
        found |= {"enable_dump_debug": True, "dump_debug_mode": "all", "dump_path": str(config.npu_overflow())}
    elif "dump" in actions:
        found |= {"enable_dump": True, "dump_mode": "all", "dump_step": config.TF_DUMP_STEP, "dump_path": str(config.npu_dump())}
    if found:
        found["op_debug_level"] = config.OP_DEBUG_LEVEL
    if "fusion_off" in actions:
        found["fusion_switch_file"] = _written("fusion_off.cfg", FUSION_OFF, keep=False)
    elif "fusion_switch" in actions:
        found["fusion_switch_file"] = _written("fusion_switch.cfg", FUSION_SWITCH, keep=True)
    if "prof" in actions:
        profiling = PROFILING | {"output": str(config.data() / "npu" / "debug_0" / "prof")}
        found |= {"profiling_mode": True, "profiling_options": json.dumps(profiling)}
    return found


def environment_of(actions: tuple[str, ...]) -> dict[str, str]:
    """Return the variables by which the device is told to write its graphs."""
    if not {"dump", "overflow"} & set(actions):
        return {}
    return {
        "DUMP_GE_GRAPH": str(config.DUMP_GE_GRAPH_VALUE), "DUMP_GRAPH_LEVEL": str(config.DUMP_GRAPH_LEVEL),
        "DUMP_GRAPH_PATH": str(config.npu_graph()), "NPU_DUMP_GRAPH": "true",
    }  # fmt: skip


def set_keys(optimizer: Any, keys: Mapping[str, Value]) -> None:
    """Write keys into the parameter map of a custom optimizer of ``RewriterConfig``."""
    for name, value in keys.items():
        parameter = optimizer.parameter_map[name]
        if isinstance(value, bool):
            parameter.b = value
        elif isinstance(value, int):
            parameter.i = value
        else:
            parameter.s = value.encode()


def _written(name: str, content: dict[str, Any], *, keep: bool) -> str:
    """Write a switch file, unless there is one that its user edits; return its path."""
    path = config.fusion() / name
    if not (keep and path.exists()):
        with replaced(path, "a file that switches fusion") as temporary:
            temporary.write_text(json.dumps(content, indent=2), "utf-8")
    return str(path)
