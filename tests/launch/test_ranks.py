"""Each rank records into its own folder, whoever started it; launchers and data workers are left alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nursery import Nursery
from ports import free_port
from trueup.foundation.store import Capture, open_capture

from .running import SCRIPTS, environment, said, script, trueup_run

TORCHRUN = Path(sys.executable).with_name("torchrun")
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]

pytestmark = pytest.mark.usefixtures("warm")


def first_inputs(capture: Capture) -> dict[int, float]:
    """Return what the layer got on each rank: the scripts feed rank r with 1 + r."""
    table = capture.records(["rank", "mean"], step=0, level="module", op="Linear", phase="forward", slot="input.0")
    return dict(zip(table.column("rank").to_pylist(), table.column("mean").to_pylist(), strict=True))


def roles(directory: Path) -> list[str]:
    return sorted(json.loads(path.read_text())["role"] for path in (directory / "processes").glob("*.json"))


def launched(out: Path, *command: str | Path) -> Capture:
    """Run a launcher, whose process says of itself that it is one, and return what its ranks recorded."""
    run = trueup_run("capture", "-o", out, "--", *command, SCRIPTS / "ddp.py")
    assert run.returncode == 0, run.stderr
    capture = open_capture(out)
    assert capture.problems == []
    assert capture.steps == [0, 1]
    assert capture.records(["op"], phase="collective").num_rows > 0
    assert said(run)[1:] == ["trueup: note: nothing to record in 1 launcher"]
    assert roles(out) == ["launcher", *["run"] * len(capture.ranks)]
    return capture


def test_torchrun(tmp_path: Path) -> None:
    if not TORCHRUN.exists():
        pytest.skip("torchrun is not installed beside this Python")
    capture = launched(tmp_path / "capture", sys.executable, TORCHRUN, *RENDEZVOUS, "--nproc-per-node", "2")
    assert first_inputs(capture) == {0: 1.0, 1: 2.0}
    assert {rank: (m["rank"], m["world_size"]) for rank, m in capture.ranks.items()} == {0: (0, 2), 1: (1, 2)}


def test_two_nodes_record_into_one_folder(tmp_path: Path) -> None:
    """Each starts a launcher of its own; the run's id says that they belong together."""
    out, port = tmp_path / "capture", str(free_port())
    logs = [tmp_path / f"node-{node}.log" for node in range(2)]
    nodes = []
    for node, log in enumerate(logs):
        command = [sys.executable, "-m", "trueup", "capture", "-o", out, "--run-id", "job-7", "--"]
        command += [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
        command += ["--master-port", port, SCRIPTS / "ddp.py"]
        with log.open("w") as said_there:
            nodes.append(subprocess.Popen(command, env=environment(), stdout=said_there, stderr=said_there))
    while None in (codes := [node.poll() for node in nodes]) and not any(codes):
        time.sleep(0.1)
    for node in nodes:
        node.terminate()  # the other of one that failed waits for it
        node.wait()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    capture = open_capture(out)
    assert (capture.problems, first_inputs(capture), capture.root["run"]) == ([], {0: 1.0, 1: 2.0}, "job-7")
    again = trueup_run("capture", "-o", out, "--run-id", "job-8", "--", sys.executable, SCRIPTS / "ddp.py")
    assert (again.returncode, "is not empty, and of another run" in again.stderr) == (2, True)


def test_forked_workers(tmp_path: Path) -> None:
    """What they inherit of their parent's capture is put down; the right one is taken up when they join a group."""
    out = tmp_path / "capture"
    run = trueup_run("capture", "-o", out, "--", *script("workers.py", "fork"))
    assert run.returncode == 0, run.stderr
    check_workers(open_capture(out))
    assert said(run) == [
        f"trueup: captured {open_capture(out).rows:,} slots over 1 step, 2 ranks into {out}",
        "trueup: note: nothing to record in 1 other process",
    ]


def check_workers(capture: Capture) -> None:
    assert first_inputs(capture) == {0: 1.0, 1: 2.0}
    assert capture.problems == []
    assert {rank: (m["rank"], m["world_size"]) for rank, m in capture.ranks.items()} == {0: (0, 2), 1: (1, 2)}
    before = capture.records(["mean"], op="torch.ones", slot="output.0")
    assert before.num_rows == 0, "what ran before the rank was known is no part of it"


def test_a_parent_that_computed_gives_way_to_its_spawned_workers(tmp_path: Path) -> None:
    out = tmp_path / "capture"
    run = trueup_run("capture", "-o", out, "--", *script("workers.py", "spawn", "prepare"))
    assert run.returncode == 0, run.stderr
    check_workers(open_capture(out))
    (aside,) = out.glob("unranked-*")
    pid = aside.name.removeprefix("unranked-")
    assert said(run)[1:] == [
        f"trueup: note: what process {pid} ({SCRIPTS / 'workers.py'} spawn prepare) recorded before its ranks started "
        "is not part of the capture"
    ]


def test_workers_that_join_no_group_are_not_captured(tmp_path: Path) -> None:
    out = tmp_path / "capture"
    run = trueup_run("capture", "-o", out, "--", *script("workers.py", "none"))
    assert run.returncode == 2
    (message,) = said(run)
    assert message.startswith(f"trueup: nothing was captured into {out}: process ")
    assert "it joined no process group, and a child of multiprocessing is captured from the moment it does" in message
    assert not out.exists()


def test_one_rank_of_several(tmp_path: Path) -> None:
    out = tmp_path / "capture"
    run = trueup_run("capture", "-o", out, "--ranks", "1,7", "--", *script("workers.py", "fork"))
    assert run.returncode == 0, run.stderr
    assert first_inputs(open_capture(out)) == {1: 2.0}
    assert "trueup: note: ranks 7 selected nothing: ranks 0, 1 ran" in said(run)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_data_workers_record_nothing_and_change_nothing(nursery: Nursery, tmp_path: Path, method: str) -> None:
    """RANK is set, as under torchrun: a worker inherits it and must not take its parent's folder."""
    out = tmp_path / "capture"
    run = trueup_run("capture", "-o", out, "--", *script("loader.py", method), RANK="0", WORLD_SIZE="1")
    assert run.returncode == 0, run.stderr
    capture = open_capture(out)
    assert list(capture.ranks) == [0]
    assert capture.problems == []
    assert capture.records(["op"], op="torch.Tensor.sin").num_rows == 0
    notes = ["trueup: note: nothing to record in 1 data worker"] if method == "spawn" else []
    assert said(run) == [f"trueup: captured {capture.rows:,} slots over 2 steps into {out}", *notes]
    if method == "fork":
        alone = nursery.script(tmp_path / "alone", SCRIPTS / "loader.py", method)
        assert (alone.wait(), alone.said) == (0, run.stdout), alone.complained
