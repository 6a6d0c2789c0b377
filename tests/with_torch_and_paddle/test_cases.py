"""The tests of PyTorch against PaddlePaddle, in a process that holds both.

Run some by hand, in the folder ``cases``: ``python -m pytest check_layers.py -k lstm``.
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


@pytest.mark.usefixtures("warm")
def test_cases() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
    command = [sys.executable, "-m", "pytest", *sorted(path.name for path in CASES.glob("check_*.py"))]
    run = subprocess.run(command, env=environment, cwd=CASES, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
