"""The tests of the Paddle adapter, in processes of their own: one framework a process.

Run some by hand, in the folder ``cases``: ``python -m pytest check_backward.py -k recurrent``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trueup.simdev.paddle import COMPILERS, build

FOLDER = Path(__file__).parent
CASES = FOLDER / "cases"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="paddlepaddle is not installed")


LAUNCH = "check_launch.py"
GROUPS = {"in one process": sorted({path.name for path in CASES.glob("check_*.py")} - {LAUNCH}), "launch": [LAUNCH]}


def run(files: list[str], **variables: str) -> None:
    """Run some files of cases in a process of their own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2", **variables}
    command = [sys.executable, "-m", "pytest", *files]  # with the pytest.ini beside them
    ended = subprocess.run(command, env=environment, cwd=CASES, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


@pytest.mark.parametrize("group", GROUPS)
def test_cases(group: str) -> None:
    run(GROUPS[group])


def test_cases_on_a_second_device(tmp_path: Path) -> None:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler to build the device with")
    build(tmp_path, name="host", devices=2)
    files = sorted(path.name for path in CASES.glob("device_*.py"))
    run(files, CUSTOM_DEVICE_ROOT=str(tmp_path), FLAGS_use_stride_kernel="0")  # strided copies need kernels of the device
