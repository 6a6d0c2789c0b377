"""The tests of the Paddle adapter, each file of ``cases/`` in a process of its own: one framework a process.

Run one by hand: ``python -m pytest tests/with_paddle/cases/check_backward.py``.
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


@pytest.mark.parametrize("name", sorted(path.name for path in CASES.glob("check_*.py")))
def test_case(name: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
    command = [sys.executable, "-m", "pytest", name]  # with the pytest.ini beside it, and without the conftest above
    run = subprocess.run(command, env=environment, cwd=CASES, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
