"""A fault in a kernel of Paddle's is found: the first culprit is the call whose result it changed first, from statistics alone.

`benchmarks/locate_paddle.py` prints the whole table; here are one fault or two for each kind of operator.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import faulty
import pytest

import models
import trueup
from trueup.analysis.remedy.advice import next_command, policy_to_try, suggest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import locate_paddle

FAULTS = {
    "transformer": ("gelu-backward", "embedding-backward-duplicates", "layer-norm-epsilon", "transposed-view-copy"),
    "lstm": ("tanh-table-lookup", "lstm-backward-cell-gate", "adam-second-moment-value"),
    "ctc": ("conv-weight-grad-last-tile", "batch-norm-backward", "batch-norm-running-variance-biased"),
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    for model in FAULTS:
        locate_paddle.run(model, folder / model)
    return folder


@pytest.mark.parametrize(("model", "fault"), [(model, fault) for model in FAULTS for fault in FAULTS[model]])
def test_the_first_culprit_is_the_call_that_broke(tmp_path: Path, healthy: Path, model: str, fault: str) -> None:
    with faulty.inject(fault) as injection:
        locate_paddle.run(model, tmp_path / "broken")
    assert injection.fired, "the fault changed nothing"
    outcome = locate_paddle.check(model, fault, healthy / model, tmp_path / "broken", injection.fired)
    assert outcome.word == "ok", outcome


def test_what_is_said_of_a_culprit(tmp_path: Path, healthy: Path) -> None:
    with faulty.inject("batch-norm-backward"):
        locate_paddle.run("ctc", tmp_path / "broken")
    result = trueup.compare(healthy / "ctc", tmp_path / "broken")
    first, second, third, *_ = result.sentence.splitlines()
    assert first == "DEVIATES  first culprit: backbone.5, backward, step 0, rank 0  (paddle._C_ops.batch_norm)"
    assert second.strip().startswith("inputs are bitwise equal, outputs are not (rel. L2 ")
    assert "models.py:" in third
    assert third.endswith(" in forward")
    assert next_command(result)[1].startswith("trueup show ")  # type: ignore[index]
    assert policy_to_try(result) is None  # it ran on the CPU already
    assert "paddle" in str(suggest(result.culprit, on=["gpu:0"]))  # type: ignore[arg-type]


def test_the_next_command_makes_a_test_of_a_culprit_whose_elements_were_kept(tmp_path: Path) -> None:
    for name, fault in (("healthy", None), ("broken", "hardswish-backward-slope")):
        training = models.build("ctc")
        with contextlib.ExitStack() as stack:
            if fault is not None:
                stack.enter_context(faulty.inject(fault))
            stack.enter_context(trueup.capture(tmp_path / name, model=training.model, detail="tensor", level=["module", "api"]))
            training.step(0)
    result = trueup.compare(tmp_path / "healthy", tmp_path / "broken")
    assert result.culprit is not None
    _, command = next_command(result)  # type: ignore[misc]
    assert command == f"trueup reproduce {tmp_path}/healthy {result.culprit.seq[0]} -o {tmp_path}/broken-reproducer"


def test_a_healthy_run_is_aligned(tmp_path: Path, healthy: Path) -> None:
    locate_paddle.run("lstm", tmp_path / "again")
    result = trueup.compare(healthy / "lstm", tmp_path / "again")
    assert (result.verdict, result.counts["equal"]) == ("aligned", result.counts["compared"])
    assert set(models.MODELS) >= set(FAULTS)
