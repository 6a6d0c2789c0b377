"""One complete capture, for the tests that compare with it or break it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nursery import Nursery

from .running import SCRIPTS, trueup_run


@pytest.fixture(scope="session")
def complete(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "complete"
    run = trueup_run("capture", "-o", out, "--detail", "tensor", "--", nursery.python, SCRIPTS / "train.py")
    assert run.returncode == 0, run.stderr
    return out
