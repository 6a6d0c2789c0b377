"""SIGKILL at ten random moments: nothing is corrupt, whatever was being written."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from nursery import Nursery
from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture

from .readable import check, steps_trained

MOMENTS = 10
AT_ONCE = 2


def test_killed_at_random_moments(
    nursery: Nursery, complete: Path, losses: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every second one keeps tensors; a flush each 50 ms makes that most die while they write."""
    moments = random.Random(20261121)
    written = []
    for first in range(0, MOMENTS, AT_ONCE):
        children = []
        for k in range(first, first + AT_ONCE):
            detail = ("stats", "tensor")[k % 2]
            children.append(
                nursery.start("train", tmp_path / f"log-{k}", out=tmp_path / f"{k}", flush=0.05, detail=detail)
            )
        for child, k in zip(children, range(first, first + AT_ONCE), strict=True):
            child.see("step 0 ")
            time.sleep(moments.uniform(0, 0.6))
            child.kill()
            assert child.wait() == -9
            assert steps_trained(child.said)[:400] == losses[: len(steps_trained(child.said))]
            written.append(_readable(tmp_path / f"{k}", complete, capsys))
    assert sum(rows > 0 for rows in written) > MOMENTS // 2, "hardly any had written something: this tested nothing"


def _readable(path: Path, complete: Path, capsys: pytest.CaptureFixture[str]) -> int:
    if not (path / "manifest.json").exists():  # killed before there was anything
        with pytest.raises(TrueupError):
            open_capture(path)
        return 0
    if not open_capture(path).rows:
        return 0
    capture = check(path, complete, capsys)
    (manifest,) = capture.ranks.values()
    assert manifest.get("status") in ("recording", None)
    assert any("interrupted" in problem or "as it began" in problem for problem in capture.problems)
    return capture.rows
