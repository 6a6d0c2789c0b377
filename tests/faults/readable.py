"""What must hold of any capture, however the process that wrote it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.running import cli
from trueup.foundation.store import Capture, open_capture


def check(path: Path, complete: Path, capsys: pytest.CaptureFixture[str]) -> Capture:
    """Read every row, tensor and call stack; show and compare the capture; return it.

    An interrupted capture lacks what came after its last flush. It has lost nothing that it says it has.
    """
    capture = open_capture(path)
    assert capture.lost == []
    records = capture.records()
    assert records.num_rows == capture.rows
    for rank in capture.ranks:
        known = capture.sites(rank)
        assert set(capture.records(["site"], rank=rank)["site"].drop_null().to_pylist()) <= set(known)
    for row in records.select(["rank", "payload_segment", "payload_key"]).to_pylist():
        if row["payload_segment"] is not None:
            capture.payload(row["rank"], row["payload_segment"], row["payload_key"])
    assert capture.lost == []
    code, out, err = cli(capsys, "show", path)
    assert (code, err) == (0, ""), err
    code, out, err = cli(capsys, "compare", complete, path)
    assert err == ""
    assert code in (0, 2), out  # nothing of it deviates
    return capture


def steps_trained(said: str) -> list[str]:
    """Return the lines that a training printed for its steps; one that a kill cut off is none."""
    return [line[:-1] for line in said.splitlines(keepends=True) if line.startswith("step ") and line.endswith("\n")]
