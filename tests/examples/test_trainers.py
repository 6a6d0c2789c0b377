"""Each kind of training loop, in an example that runs as it is, under `trueup capture`, and recording itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trueup

FOLDER = Path(__file__).parents[2] / "examples" / "trainers"
SOURCE = str(Path(trueup.__file__).parents[1])
STEPS = {"plain_loop": 4, "accelerate_loop": 3, "hugging_face": 3, "lightning_fit": 3}
"""The optimizer's steps that each script is asked for; all but the first accumulate two batches in each."""


def started(*command: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_counted_and_nothing_changes(name: str, tmp_path: Path) -> None:
    script = (sys.executable, str(FOLDER / f"{name}.py"), "--steps", str(STEPS[name]))
    watched, itself = tmp_path / "watched", tmp_path / "itself"
    runs = [
        started(*script),
        started(sys.executable, "-m", "trueup", "capture", "-o", str(watched), "--", *script),
        started(*script, "--capture", str(itself)),
    ]
    said = [(run, *run.communicate(timeout=200)) for run in runs]
    assert [(run.returncode, error) for run, _, error in said if run.returncode] == []
    plain = said[0][1]
    assert "loss" in plain
    assert [out for _, out, _ in said] == [plain] * 3  # the losses to the last digit
    for path in (watched, itself):
        capture = trueup.open_capture(path)
        steps = {phase: set(capture.records(phase=phase)["step"].to_pylist()) for phase in ("backward", "optimizer")}
        assert steps == {"backward": {*range(STEPS[name])}, "optimizer": {*range(STEPS[name])}}
        assert (capture.problems, capture.ranks[0]["notes"]) == ([], [])


def test_scripts_are_small() -> None:
    assert [path.name for path in FOLDER.glob("*.py") if len(path.read_text().splitlines()) > 80] == []
