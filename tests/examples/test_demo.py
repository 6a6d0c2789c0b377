"""`make demo` from end to end: the planted fault is found and the report is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "centernet" / "demo.py"


@pytest.mark.usefixtures("warm")
def test_the_demo_finds_the_broken_lstm(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--steps", "4", "--into", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "DEVIATES" in run.stdout
    assert "neck.lstm" in run.stdout
    assert "Exit code 1 of compare is the expected end" in run.stdout
    assert run.stdout.splitlines()[-2] == f'  export PATH="{Path(sys.executable).parent}:$PATH"'
    assert (tmp_path / "report" / "index.html").stat().st_size < 1_000_000
