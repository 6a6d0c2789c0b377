"""`trueup watch -- COMMAND`, as a user runs it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from trueup.foundation.store import open_capture

from .running import SCRIPTS, cli, said, script, trueup_run

RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node", "2"]

pytestmark = pytest.mark.usefixtures("warm")


def test_a_healthy_run_leaves_nothing(tmp_path: Path) -> None:
    run = trueup_run("watch", "--", *script("watched.py", "healthy"), cwd=tmp_path)
    assert (run.returncode, said(run)) == (0, ["trueup: watched 6 steps: nothing bad"])
    assert list(tmp_path.iterdir()) == []


def test_the_run_stops_with_its_exit_code_and_says_where_everything_is(tmp_path: Path) -> None:
    out = tmp_path / "watch"
    run = trueup_run("watch", "-o", out, "--stop-after", "1", "--", *script("watched.py"))
    assert run.returncode == 3, run.stderr
    assert run.stdout.splitlines() == ["rank 0 finished step 0", "rank 0 finished step 1"]
    lines = said(run)
    assert lines[0].startswith("trueup: torch.exp, forward, step 2, rank 0 (torch.exp): overflow: of clean inputs up to ")
    assert lines[1].startswith("  your code: ")
    assert lines[1].endswith(": return self.down(torch.exp(self.up(x) * self.gain))")
    assert lines[2].startswith("  tensors:   executed again with the same result")
    assert lines[3:5] == [f"  saved:     {out}/step-000002", f"  next:      trueup overflow {out}/step-000002"]
    assert lines[5] == (
        f"trueup: the run was stopped after the first hit, as asked; everything is in {out}, the last hit in {out}/step-000002 "
        "(exit code 3)"
    )
    assert "Traceback" not in run.stderr
    capture = open_capture(out / "step-000002")
    assert capture.problems == []
    assert capture.steps == [1, 2]
    assert capture.records(step=2, op="torch.exp", phase="forward", slot="output.0").to_pylist()[0]["payload_key"]


def test_a_run_that_goes_on_ends_with_its_own_code(tmp_path: Path) -> None:
    out = tmp_path / "watch"
    run = trueup_run("watch", "-o", out, "--frames", "1", "--", *script("watched.py"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("finished") == 6
    assert "trueup: watched 6 steps: 4 hits" in said(run)
    assert [path.name for path in sorted(out.glob("step-*"))] == ["step-000002"]
    report = json.loads((out / "watch-rank-00000.json").read_text())
    assert [hit["kind"] for hit in report["all"]] == ["overflow", "follows", "follows", "follows"]


def test_all_ranks_stop_and_none_hangs(tmp_path: Path) -> None:
    """Rank 1 alone overflows in step 2; both stop when they look at step 3, before its optimizer."""
    out, launcher = tmp_path / "watch", (sys.executable, "-m", "torch.distributed.run")
    run = trueup_run("watch", "-o", out, "--stop-after", "1", "--", *launcher, *RENDEZVOUS, SCRIPTS / "watched.py")
    assert run.returncode == 3, run.stderr
    finished = sorted(re.findall(r"rank \d finished step \d", run.stdout))  # two ranks may write into one line
    assert finished == [f"rank {rank} finished step {step}" for rank in (0, 1) for step in range(3)]
    order = json.loads((out / "stop").read_text())
    assert (order["step"], order["at"]) == (2, 3)
    capture = open_capture(out / "step-000002")
    assert sorted(capture.ranks) == [0, 1]
    origin = capture.records(step=2, rank=1, op="torch.exp", phase="forward", slot="output.0").to_pylist()
    assert origin[0]["n_posinf"] > 0
    assert origin[0]["payload_key"]


def test_what_cannot_be_read_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(capsys, "watch") == (
        64, "",
        "trueup: There is nothing to watch.\n  expected: a command to run\n  got:      none\n"
        "  next:     trueup watch --stop-after 1 -- python train.py\n",
    )  # fmt: skip
    code, _, err = cli(capsys, "watch", "--stop-after", "soon", "--", "true")
    assert (code, err) == (64, "trueup: stop_after 'soon' is unknown: expected a number of hits from 1 on, or never\n")


def test_a_command_without_a_framework(tmp_path: Path) -> None:
    run = trueup_run("watch", "-o", tmp_path / "watch", "--", sys.executable, "-c", "pass")
    assert run.returncode == 2
    assert said(run)[0].startswith("trueup: nothing was watched: no process of the command imported PyTorch")
    assert not (tmp_path / "watch").exists()
