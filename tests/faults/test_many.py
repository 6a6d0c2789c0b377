"""A hundred thousand calls in one step, two thousand steps: memory stays what it was. `make soak` records ten thousand."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launch.running import cli
from nursery import Nursery
from trueup.foundation.store import open_capture

MB = 2**20


def test_many_calls_in_a_step(nursery: Nursery, tmp_path: Path, capsys) -> None:
    out = tmp_path / "capture"
    child = nursery.start("many_calls", tmp_path / "log", out=out, calls=100_000, level="api", phase="forward")
    assert child.wait() == 0, child.said
    said = dict(zip(*[iter(child.said.split())] * 2, strict=True))
    assert float(said["more"]) < 256
    started = time.monotonic()
    capture = open_capture(out)
    records = capture.records(["seq", "ordinal"], op="torch.tanh", slot="output.0")
    took = time.monotonic() - started
    print(child.said, capture, f"opened and read in {took:.1f} s")
    assert (capture.problems, records.num_rows) == ([], 50_000)
    assert records["ordinal"].to_pylist() == list(range(50_000))
    assert cli(capsys, "show", out)[0] == 0


@pytest.mark.parametrize("options", [{"level": "module"}])
def test_many_steps(options: dict[str, str], nursery: Nursery, tmp_path: Path, capsys) -> None:
    out, steps = tmp_path / "capture", 2_000
    child = nursery.start("many_steps", tmp_path / "log", out=out, steps=steps, **options)
    assert child.wait() == 0, child.said
    tenths = [tuple(map(float, line.split()[1:])) for line in child.said.splitlines() if line.startswith("tenth")]
    started = time.monotonic()
    capture = open_capture(out)
    opened = time.monotonic() - started
    print(child.said, f"opened in {opened:.1f} s", len(list(out.rglob("*"))), "names")
    assert (capture.problems, capture.steps) == ([], list(range(steps)))
    grown = tenths[-1][1] - tenths[1][1]
    assert grown < 192, f"memory grew by {grown:.0f} MB, more than may wait for a slow disk: {tenths}"
