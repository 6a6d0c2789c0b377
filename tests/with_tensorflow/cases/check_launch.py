"""`trueup capture -- python train.py`, with no edit of the script, and what follows a capture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from recording import cli, rows_of

import trueup
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.tensorflow.armed import Armed
from trueup.recording.recorder import CaptureOptions
from trueup.recording.registry import meant


def test_an_unedited_script_is_captured(unedited: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    into, run = unedited
    assert "over 3 steps into" in run.stderr
    rows = rows_of(into)
    assert {row["step"] for row in rows} == {0, 1, 2}
    for steps in ({0, 1}, {2}):  # of the loop, of fit
        scopes = {row["scope"] for row in rows if row["step"] in steps and row["phase"] in ("forward", "backward")}
        assert scopes == {"", "first", "last"}
    assert {"module", "api"} == {row["level"] for row in rows}
    shown = cli("show", into, "--scope", "first", "--phase", "backward", "--step", "1", "--op", "*Tanh")
    assert "first  tf.raw_ops.Tanh#0  backward, step 1, api" in shown.stdout
    result = trueup.compare(into, into)
    assert result.verdict == "aligned"
    assert [float(value).hex() for value in dict(result.baseline.losses).values()] == run.stdout.split()[:3]


def test_what_there_is_not_is_refused(tmp_path: Path) -> None:
    options = CaptureOptions.of().to_json()
    with pytest.raises(TrueupError, match="a policy is not there for TensorFlow"):
        Armed(tmp_path, options, {}, ("policy.toml", ""))
    assert meant(None).name == "tensorflow"
    assert "torch" not in sys.modules, "no part of Trueup that TensorFlow needs imports PyTorch"
