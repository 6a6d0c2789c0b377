"""What the cases share, a plugin (not a conftest, which the process with PyTorch would load): captures, and their rows."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import trueup
from end_to_end.executing import lines_of
from test_documentation import ROOT

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)

Row = dict[str, Any]
Record = Callable[..., list[Row]]
TRAIN = Path(__file__).parent / "train.py"


LINES = [shlex.split(line) for line in lines_of(ROOT / "docs/tensorflow.md")]
"""The commands of the page, which are executed as they are written there."""
WARM = sys.executable
"""A Python with TensorFlow in it already, where `test_cases` runs this."""
COLD = os.environ.get("COLD", sys.executable)
"""One without."""


def found_by(python: str) -> dict[str, str]:
    """Return an environment in which ``python`` is this one."""
    return {**os.environ, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}


def cli(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``trueup`` as a process of its own, as a user starts it."""
    command = [COLD, "-m", "trueup", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=found_by(COLD))


@pytest.fixture(scope="session")
def unedited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return a capture of `train.py`, launched with no edit of the script, and what the command said: the page's first."""
    folder = tmp_path_factory.mktemp("unedited")
    (folder / "train.py").write_text(TRAIN.read_text())
    run = cli(*LINES[0], cwd=folder)
    assert run.returncode == 0, run.stderr[-3000:]
    return folder / "runs/cpu", run


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Return a function that captures what a function executes and returns the rows, in order."""
    numbers = itertools.count()

    def run(function: Callable[[], Any], **options: Any) -> list[Row]:
        into = tmp_path / f"capture{next(numbers)}"
        with trueup.capture(into, **{"level": ["module", "api"], **options}):
            function()
        return rows_of(into)

    return run


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a capture."""
    rows: list[Row] = trueup.open_capture(path).records().to_pylist()
    return rows


def notes_of(path: Path) -> list[str]:
    """Return what a capture says of itself."""
    return [note for manifest in trueup.open_capture(path).ranks.values() for note in manifest.get("notes", [])]


def bits(values: Iterable[Any]) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Return tensors or arrays as what can be compared bit by bit."""
    arrays = [np.asarray(value) for value in values]
    return [(str(a.dtype), a.shape, a.tobytes()) for a in arrays]


def slots(rows: list[Row], op: str, phase: str = "forward") -> dict[str, Row]:
    """Return the slots of the first call of an operation or layer, by name."""
    found = [row for row in rows if row["op"].endswith(op) and row["phase"] == phase]
    return {row["slot"]: row for row in found if row["seq"] == found[0]["seq"]}
