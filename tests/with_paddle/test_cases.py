"""The tests of the Paddle adapter, in processes of their own: one framework a process.

Run some by hand, in the folder ``cases``: ``python -m pytest check_backward.py -k recurrent``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="paddlepaddle is not installed")


LAUNCH = "check_launch.py"
GROUPS = {"in one process": sorted({path.name for path in CASES.glob("check_*.py")} - {LAUNCH}), "launch": [LAUNCH]}


@pytest.mark.parametrize("group", GROUPS)
def test_cases(group: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
    command = [sys.executable, "-m", "pytest", *GROUPS[group]]  # with the pytest.ini beside them
    run = subprocess.run(command, env=environment, cwd=CASES, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
