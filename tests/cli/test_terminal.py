"""What becomes of a command whose reader leaves, as ``trueup compare ... | head`` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from .written import capture

COMMAND = "import sys; from trueup.doors.cli import main; sys.exit(main())"


def test_a_reader_who_leaves_costs_neither_the_report_nor_the_exit_code(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    healthy = capture(tmp_path / "a", {"torch.relu": {"input.0": x, "output.0": np.maximum(x, 0)}})
    broken = capture(tmp_path / "b", {"torch.relu": {"input.0": x, "output.0": np.abs(x)}})
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", COMMAND, "compare", str(healthy), str(broken), "-o", str(tmp_path / "report")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert (tmp_path / "report" / "index.html").stat().st_size > 0
