"""`trueup capture -- python train.py`, with no edit of the script, and what follows a capture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import paddle
import pytest
from paddle import nn
from recording import COLD, WARM, rows_of

import trueup
from trueup.foundation.model import TrueupError
from trueup.recording.registry import meant

TRAIN = Path(__file__).parent / "train.py"


def cli(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([WARM, "-m", "trueup", *map(str, words)], capture_output=True, text=True)


def test_an_unedited_script_is_captured_its_data_workers_are_not(tmp_path: Path) -> None:
    plain = subprocess.run([COLD, str(TRAIN), "0"], capture_output=True, text=True)
    into = tmp_path / "capture"
    run = cli("capture", "-o", into, "--", COLD, TRAIN, 1)
    assert (run.returncode, run.stdout) == (0, plain.stdout), run.stderr
    assert "over 2 steps into" in run.stderr
    rows = rows_of(into)
    assert "paddle._C_ops.relu" in {row["op"] for row in rows}, "bound by name before the capture began"
    assert {row["phase"] for row in rows} == {"forward", "backward", "optimizer"}
    assert {row["scope"] for row in rows} == {"", "first", "norm", "last"}
    shown = cli("show", into, "--scope", "norm", "--phase", "backward", "--step", "1")
    assert "norm  paddle._C_ops.batch_norm#0  backward, step 1, api" in shown.stdout
    losses = dict(trueup.compare(into, into).baseline.losses)
    assert [value.hex() for value in losses.values()] == plain.stdout.split()


def launched(into: Path, logs: Path) -> trueup.Capture:
    launch = [WARM, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--backend", "gloo"]
    run = cli("capture", "-o", into, "--", *launch, "--log_dir", logs, TRAIN.with_name("ranks.py"))
    assert run.returncode == 0, run.stderr[-3000:]
    return trueup.open_capture(into)


def test_ranks_of_paddles_launcher_and_what_they_send_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = launched(tmp_path / "healthy", tmp_path / "log")
    assert {rank: manifest["world_size"] for rank, manifest in capture.ranks.items()} == {0: 2, 1: 2}
    roles = {json.loads(path.read_text())["role"] for path in (tmp_path / "healthy" / "processes").iterdir()}
    assert roles == {"launcher", "run"}
    assert any("paddle.DataParallel adds up gradients over the ranks in C++" in note for note in capture.ranks[1]["notes"])
    rows = capture.records(phase="collective", level="api", step=1).to_pylist()
    seen = {(row["rank"], row["op"].rpartition(".")[2], row["slot"]): row["max"] for row in rows if row["slot"] != "arguments"}
    ended = {key: value for key, value in seen.items() if key[1] != "reduce_gradients"}
    assert ended == {
        (0, "all_reduce", "input.0"): 1, (1, "all_reduce", "input.0"): 2,
        (0, "all_reduce", "output.0"): 3, (1, "all_reduce", "output.0"): 3,
        (0, "all_gather", "input.0"): 1, (1, "all_gather", "input.0"): 2,
        **{(rank, "all_gather", f"output.{k}"): k + 1 for rank in (0, 1) for k in (0, 1)},
        (0, "scatter", "input.0"): 10, (0, "scatter", "input.1"): 20, (0, "scatter", "output.0"): 10,
        (1, "scatter", "output.0"): 20,
        (1, "broadcast", "input.0"): 2, (0, "broadcast", "output.0"): 2,
        (0, "reduce", "input.0"): 5, (1, "reduce", "input.0"): 6, (1, "reduce", "output.0"): 11,
        (0, "send", "input.0"): 7, (1, "recv", "output.0"): 7,
    }  # fmt: skip
    told = {(row["rank"], row["op"].rpartition(".")[2]): json.loads(row["value"]) for row in rows if row["slot"] == "arguments"}
    assert told[1, "all_reduce"]["ranks"] == "0-1"
    assert (told[0, "send"]["dst"], told[1, "recv"]["src"], told[0, "broadcast"]["root"]) == (1, 0, 1)
    assert told[1, "all_gather_object"] == {}
    reduced = capture.records(rank=0, step=1, op="paddle.DataParallel.reduce_gradients", level="api").to_pylist()
    (call,) = {row["seq"] for row in reduced}
    assert {row["slot"] for row in reduced} >= {"input.first.weight", "output.first.weight", "input.last.bias", "output.last.bias"}
    updates = capture.records(rank=0, step=1, op="paddle._C_ops.sgd_", level="api", slot="input.2").to_pylist()
    assert [row["producer_seq"] for row in updates] == [call] * 4, "the optimizer reads what the reducer gave"

    monkeypatch.setenv("FAULT", "1")
    launched(tmp_path / "faulty", tmp_path / "log")
    result = trueup.compare(tmp_path / "healthy", tmp_path / "faulty")
    culprit = result.culprits[0]
    assert (culprit.rank, culprit.op, culprit.phase, culprit.step) == (1, "paddle._C_ops.exp", "forward", 0)
    came = {one.rank: (one.sender, one.op) for one in result.occurrences}
    assert came[0] == (1, "paddle.DataParallel.reduce_gradients")


def test_the_suggested_policy_heals_a_run(tmp_path: Path) -> None:
    run = cli("capture", "-o", tmp_path / "large", "--", WARM, TRAIN.with_name("overflows.py"))
    assert run.stdout.split()[-1] == "nan"
    healed = cli("heal", tmp_path / "large", "--", WARM, TRAIN.with_name("overflows.py"))
    assert healed.returncode == 0, healed.stderr
    assert "HEALED  with 1 rule, energy, forward, step 1, rank 0 (paddle._C_ops.exp)" in healed.stdout
    assert 'scope = "energy"' in (tmp_path / "large-healed" / "policy.toml").read_text()
    (manifest,) = trueup.open_capture(tmp_path / "large-healed" / "run-1").ranks.values()
    assert manifest["policy"][0]["changed"]


def test_one_capture_at_a_time_and_steps_by_hand(tmp_path: Path) -> None:
    with trueup.capture(tmp_path / "capture") as capture:
        with pytest.raises(TrueupError, match="is already running"), trueup.capture(tmp_path / "other"):
            pass
        for _ in range(3):
            paddle.ones([2]).sum()
            trueup.step()
        capture.step()
    assert {row["step"] for row in rows_of(tmp_path / "capture")} == {0, 1, 2}


def test_the_framework_is_that_of_the_model() -> None:
    assert [meant(model).name for model in (None, nn.Linear(1, 1), [nn.Linear(1, 1)])] == ["paddle"] * 3
    assert "torch" not in sys.modules, "no part of Trueup that Paddle needs imports PyTorch"
