"""Running the command line as a user does, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trueup
from trueup.doors.cli import main

SCRIPTS = Path(__file__).parent / "scripts"
SOURCE = str(Path(trueup.__file__).parents[1])
COMPAT = str(Path(__file__).parents[2] / "compat-packages/src")
PYTHON = sys.executable
TRUEUP = (PYTHON, "-m", "trueup")


NO_COMPILER = "ignore:trueup's compiled statistics kernel is missing:RuntimeWarning"
"""A machine without a C compiler is told once per process; here that would be read as part of what is tested."""


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which this very Trueup and trueup_compat are found, one thread per process."""
    path = os.pathsep.join(filter(None, [SOURCE, COMPAT, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": NO_COMPILER, **more}


def trueup_run(*arguments: str | Path, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ``trueup`` with these arguments and environment variables; forked where a test asks for `warm`."""
    command = [sys.executable, "-m", "trueup", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(**more), cwd=cwd, timeout=600
    )


def script(name: str, *arguments: str) -> list[str]:
    """Return the command of one of the scripts beside this file."""
    return [sys.executable, str(SCRIPTS / name), *arguments]


def said(run: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines on stderr that are Trueup's own."""
    return [line for line in run.stderr.splitlines() if line.startswith(("trueup:", "  "))]


def cli(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Run a command line in this process; return exit code, stdout, stderr."""
    capsys.readouterr()
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err
