"""The Triton kernel against the host's, element by element through Triton's interpreter.

It runs where Triton is installed; no GPU is needed. The development environment leaves Triton out (the wheel has 290 MB)::

    pip install --no-deps triton && pytest tests/adapters/test_triton.py

Triton decides at import whether it interprets, so the tests run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed; to run these tests: pip install --no-deps triton",
)


def run(script: str, *tests: str, **environment: str) -> str:
    """Run a file of tests in a new process; its output if it passed."""
    roots = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE.parent)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "scripts" / script), *tests],
        env={**os.environ, "PYTHONPATH": roots, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("part", ["values", "pairs", "programs", "captures"])
def test_interpreted(part: str) -> None:
    assert run("interpreted.py", part, TRITON_INTERPRET="1").endswith(f"{part} passed\n")


@pytest.mark.parametrize(("target", "dtypes"), [("cuda:80", "few"), ("cuda:90", "all"), ("hip:gfx942", "few")])
def test_compiles_for(target: str, dtypes: str, tmp_path: Path) -> None:
    """Without a device; on CUDA loads are 128 bits wide and nothing is spilled."""
    output = run("compiled.py", target, dtypes, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert output.endswith(f"{target} passed\n")


def test_importing_the_adapter_imports_no_triton() -> None:
    code = "import sys, trueup, trueup.recording.adapters.torch.session; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")})
