"""The tool's settings (``precision_tool/config.py``, 0.1.11) and where it keeps its data, read when they are used.

A script may set them: ``import precision_tool.config as config; config.TF_DUMP_STEP = "0|5"``.
"""

from __future__ import annotations

from pathlib import Path

from trueup.foundation.model import TrueupError

ROOT_DIR = ""
"""Parent of ``precision_data``; the working directory."""
TF_DUMP_STEP = "0"
"""Steps that are dumped, separated by ``|``."""
OP_DEBUG_LEVEL = 4
DUMP_GE_GRAPH_VALUE = 2
DUMP_GRAPH_LEVEL = 3
DUMP_SEED = 2022


def data() -> Path:
    """Return ``precision_data``."""
    return Path(ROOT_DIR or ".").absolute() / "precision_data"


def npu_dump() -> Path:
    """Return where the device dumps."""
    return data() / "npu" / "debug_0" / "dump"


def npu_graph() -> Path:
    """Return where the device writes its graphs."""
    return data() / "npu" / "debug_0" / "graph"


def npu_overflow() -> Path:
    """Return where the device dumps what overflows."""
    return data() / "overflow" / "dump"


def fusion() -> Path:
    """Return where files that switch fusion are."""
    return data() / "fusion"


def baseline() -> Path:
    """Return the native capture of `sess_dump`."""
    return data() / "tf" / "dump"


def candidate() -> Path:
    """Return the native capture of the action ``dump``."""
    return data() / "npu" / "debug_0" / "dump"


def overflow() -> Path:
    """Return the folder in which a watch saves the steps that overflow (action ``overflow``)."""
    return data() / "overflow" / "dump"


def results() -> Path:
    """Return where tables of comparisons are written."""
    return data() / "temp" / "vector_compare"


def steps() -> str:
    """Return `TF_DUMP_STEP` as Trueup writes steps.

    Raises:
        TrueupError: it is no list of numbers.
    """
    numbers = TF_DUMP_STEP.split("|")
    if not all(number.strip().isdecimal() for number in numbers):
        raise TrueupError(f"TF_DUMP_STEP is {TF_DUMP_STEP!r}: expected step numbers separated by |, such as 0|5|10")
    return ",".join(number.strip() for number in numbers)
