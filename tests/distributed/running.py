"""Runs the scenarios of `ranks.py` in two processes that are joined by gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import trueup

SOURCE = Path(trueup.__file__).parents[1]
TESTS = Path(__file__).parents[1]
WORLD = 2
SECONDS = 240


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(out: Path, *scenarios: str, **variables: str) -> list[tuple[int, str]]:
    """Run scenarios one after the other in both ranks; return each rank's exit code and stderr."""
    path = os.pathsep.join([str(SOURCE), str(TESTS), os.environ.get("PYTHONPATH", "")])
    common = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()), "PYTHONWARNINGS": "ignore", **variables,
    }  # fmt: skip
    command = [sys.executable, "-m", "distributed.ranks", str(out), *scenarios]
    processes = [
        subprocess.Popen(command, env=common | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True, cwd=TESTS)
        for rank in range(WORLD)
    ]
    try:
        errors = [process.communicate(timeout=SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def run(out: Path, *scenarios: str, **variables: str) -> None:
    """Run scenarios that are to succeed."""
    for code, error in start(out, *scenarios, **variables):
        assert code == 0, error[-4000:]


def said(out: Path, scenario: str, rank: int) -> Any:
    """Return what a scenario returned in a rank."""
    return json.loads((out / f"{scenario}.{rank}.json").read_text())
