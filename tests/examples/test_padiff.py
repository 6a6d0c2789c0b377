"""The models of PaDiff's tutorial: aligned where they are the same, named where they are not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trueup

FOLDER = Path(__file__).parents[2] / "examples" / "padiff"
SOURCE = str(Path(trueup.__file__).parents[1])

pytestmark = pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="paddlepaddle is not installed")

CASES = """
import sys
sys.path.insert(0, sys.argv[1])
import simple
for case in (["attention", "--steps", "1"], ["gelu"]):
    sys.argv[1:] = case
    print("code", case[0], simple.main())
"""


@pytest.mark.usefixtures("warm")
def test_cases() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    run = subprocess.run([sys.executable, "-c", CASES, str(FOLDER)], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    codes = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("code ")]
    assert codes == [["attention", "0"], ["gelu", "1"]], run.stdout
    last = run.stdout.split("code attention 0\n")[1]
    assert last.startswith('DEVIATES  approximate of act (GELU): none in the baseline, tanh in the candidate\n')
    assert "first seen in: act, forward, step 0, rank 0  (paddle._C_ops.gelu)" in last
