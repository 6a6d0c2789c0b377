"""Clocks that jump, forks in the middle of a flush, two processes and two runs that are given the same directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launch.running import TRUEUP, environment, script
from nursery import Nursery
from trueup.foundation.store import open_capture

from .readable import check, steps_trained


def test_a_clock_that_jumps(nursery: Nursery, complete: Path, losses: list[str], tmp_path: Path, capsys) -> None:
    """Nothing but the dates in the manifests comes from the wall clock."""
    out = tmp_path / "capture"
    child = nursery.start("jumping_clock", tmp_path / "log", out=out, steps=12)
    assert child.wait() == 0, child.said
    assert steps_trained(child.said) == losses[:12]
    capture = check(out, complete, capsys)
    assert (capture.problems, capture.steps) == ([], list(range(12)))


@pytest.mark.parametrize("how", ["exit", "_exit"])
def test_a_fork_in_the_middle_of_a_flush(
    how: str, nursery: Nursery, complete: Path, losses: list[str], tmp_path: Path, capsys
) -> None:
    """The child shares the open file: not a byte of what it inherited may reach it twice."""
    out = tmp_path / "capture"
    child = nursery.start("forks_while_writing", tmp_path / "log", out=out, steps=15, how=how)
    assert child.wait() == 0, child.said
    assert int(child.said.split()[-1]) > 3, "it forked between flushes: this tested nothing"
    assert steps_trained(child.said)[:1] == losses[:1]
    capture = check(out, complete, capsys)
    assert (capture.problems, capture.steps) == ([], list(range(15)))


def test_two_processes_in_one_directory(nursery: Nursery, complete: Path, tmp_path: Path, capsys) -> None:
    """Two live processes are two ranks, as where each rank of a run opens its own ``with`` block."""
    for attempt in range(2):
        out, barrier = tmp_path / f"capture-{attempt}", tmp_path / f"barrier-{attempt}"
        barrier.mkdir()
        pair = [
            nursery.start("in_barrier", tmp_path / f"log-{attempt}-{me}", out=out, barrier=barrier, me=me, steps=3)
            for me in (0, 1)
        ]
        assert [child.wait() for child in pair] == [0, 0]
        refused = [child for child in pair if "refused: " in child.said]
        capture = check(out, complete, capsys)
        assert len(capture.ranks) == 2 - len(refused), [child.said for child in pair]
        for child in refused:
            assert "already holds a capture: nothing was recorded; choose another -o or remove it" in child.said
        for rank in capture.ranks:
            assert sorted(set(capture.records(["step"], rank=rank)["step"].to_pylist())) == [0, 1, 2]
        assert capture.problems == []


@pytest.mark.usefixtures("warm")
def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    """Both find it empty; one gets it, whole, and the other is told, and trains on."""
    out = tmp_path / "capture"
    out.mkdir()
    command = [*TRUEUP, "capture", "-o", str(out), "--", *script("train.py")]
    pair = [
        subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = [process.communicate(timeout=600) for process in pair]
    codes = [process.returncode for process in pair]
    trained = ["step 2" in out for out, _ in ended]
    assert 0 in codes, ended
    assert any("already holds a capture" in err or "is not empty" in err for _, err in ended), ended
    assert sum(trained) >= 1
    capture = open_capture(out)
    assert (capture.problems, capture.lost, list(capture.ranks), capture.steps) == ([], [], [0], [0, 1, 2])
