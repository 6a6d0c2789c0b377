"""`trueup monitor -- COMMAND` with two ranks: one capture of both, gone on with by a second run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ports import free_port
from trueup.doors.cli import main
from trueup.foundation.store.series import SeriesReader

SCRIPT = """
import os, subprocess, sys
if "RANK" not in os.environ:
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=os.environ | world | {"RANK": str(r)}) for r in range(2)]
    sys.exit(max(one.wait() for one in ranks))
import torch
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
torch.manual_seed(int(os.environ["RANK"]))
for step in range(4):
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""


@pytest.mark.usefixtures("warm")
def test_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    Path("train.py").write_text(SCRIPT)
    run = [sys.executable, "train.py"]
    command = ["monitor", "-o", "m", "--every", "1", "--digests", "2", "--no-alerts", "--json", "found.json", "--", *run]
    assert main(command) == 0
    said = capfd.readouterr().err
    assert f"series over 4 steps on 2 ranks into {tmp_path}/m: no alert" in said
    read = SeriesReader("m")
    assert (read.problems, read.ranks, read.steps(1).tolist()) == ([], [0, 1], [0, 1, 2, 3])
    assert read.column(0, "digest/0.weight")[[0, 2]].tolist() == read.column(1, "digest/0.weight")[[0, 2]].tolist()
    assert read.column(0, "gradient_norm/2").tolist() == read.column(1, "gradient_norm/2").tolist()
    assert read.column(0, "local_gradient_norm/2")[0] != read.column(1, "local_gradient_norm/2")[0]
    assert read.column(0, "samples").tolist() == [3] * 4
    assert '"ranks": 2' in Path("found.json").read_text()


KILLED = """
import os, pathlib, torch
torch.set_num_threads(1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
for step in range(10**6):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 0 and list(pathlib.Path("m").glob("rank-*/series-*.parquet")):
        os.kill(os.getpid(), 9)
"""


@pytest.mark.usefixtures("warm")
def test_what_a_killed_run_wrote_is_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(KILLED)
    assert main(["monitor", "-o", "m", "--no-alerts", "--", sys.executable, "train.py"]) == 137
    read = SeriesReader("m")
    last = int(read.steps(0)[-1])
    said = f"trueup: the command was killed (exit code 137); its series in {tmp_path}/m end with step {last:,}"
    assert said in capfd.readouterr().err
    assert read.steps(0).tolist() == list(range(last + 1))


def test_bad_usage(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["monitor"]) == 64
    assert main(["monitor", "--on-alert", "dance", "--", "true"]) == 64
    assert main(["monitor", "-o", "n", "--", "true"]) == 2
    said = capfd.readouterr().err
    assert "There is nothing to monitor" in said
    assert "on_alert 'dance' is unknown: expected message, stop, capture" in said
    assert "nothing was monitored" in said
    assert not Path("n").exists()
