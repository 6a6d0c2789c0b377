"""What Trueup loads before it does anything: a start is as quick as what it imports. `make bench-startup` tells the seconds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from .running import PYTHON, TRUEUP, environment

FRAMEWORKS = {"torch", "tensorflow", "paddle", "jax"}
READERS = {"numpy", "pyarrow", "safetensors", "xxhash", "bokeh", "duckdb"}
"""What reads captures and writes reports: half a second together."""


def loaded(*command: str) -> set[str]:
    """Return the packages that a Python process and its children import."""
    run = subprocess.run(command, env=environment() | {"PYTHONPROFILEIMPORTTIME": "1"}, capture_output=True, text=True)
    found = {name.partition(".")[0] for name in re.findall(r"^import time:.*\|\s*(\S+)$", run.stderr, re.MULTILINE)}
    assert "trueup" in found
    return found


def test_no_framework_is_imported() -> None:
    assert not loaded(PYTHON, "-c", "import trueup") & (FRAMEWORKS | READERS)


def test_help_loads_what_prints_it() -> None:
    assert not loaded(*TRUEUP, "--help") & (FRAMEWORKS | READERS)


def test_capture_of_a_command_that_trains_nothing_loads_next_to_nothing(tmp_path: Path) -> None:
    """In the launcher and in the command: neither the readers of captures nor a framework."""
    assert not loaded(*TRUEUP, "capture", "-o", str(tmp_path / "c"), "--", PYTHON, "-c", "pass") & (FRAMEWORKS | READERS)
