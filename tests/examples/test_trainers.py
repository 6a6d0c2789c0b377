"""Each kind of training loop, in an example that runs as it is, under `trueup capture`, and recording itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trueup
from nursery import Nursery

FOLDER = Path(__file__).parents[2] / "examples" / "trainers"
SOURCE = str(Path(trueup.__file__).parents[1])
STEPS = {"plain_loop": 4, "accelerate_loop": 3, "hugging_face": 3, "lightning_fit": 3}
"""The optimizer's steps that each script is asked for; all but the first accumulate two batches in each."""


LIBRARIES = ("accelerate", "pytorch_lightning", "sklearn.datasets", "transformers.trainer")


def watched(path: Path, *command: str) -> subprocess.Popen[str]:
    """Start a command under `trueup capture`."""
    source = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "trueup", "capture", "-o", str(path), "--", *command)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_counted_and_nothing_changes(name: str, nursery: Nursery, tmp_path: Path) -> None:
    script, options = FOLDER / f"{name}.py", ("--steps", str(STEPS[name]))
    nursery.load(*LIBRARIES)
    run = watched(tmp_path / "watched", sys.executable, str(script), *options)
    plain = nursery.script(tmp_path / "plain", script, *options)
    itself = nursery.script(tmp_path / "log", script, *options, "--capture", tmp_path / "itself")
    out, error = run.communicate(timeout=600)
    ends = [(run.returncode, error), *((child.wait(), child.complained) for child in (plain, itself))]
    assert [end for end in ends if end[0]] == []
    assert "loss" in plain.said
    assert [out, itself.said] == [plain.said] * 2  # the losses to the last digit
    for path in (tmp_path / "watched", tmp_path / "itself"):
        capture = trueup.open_capture(path)
        steps = {phase: set(capture.records(phase=phase)["step"].to_pylist()) for phase in ("backward", "optimizer")}
        assert steps == {"backward": {*range(STEPS[name])}, "optimizer": {*range(STEPS[name])}}
        assert (capture.problems, capture.ranks[0]["notes"]) == ([], [])


def test_scripts_are_small() -> None:
    assert [path.name for path in FOLDER.glob("*.py") if len(path.read_text().splitlines()) > 80] == []
